"""A real run of `algos/sft.py` with the tiny model on two ranks, and the data files that it refuses.

`test_sft_functions.py` has the mask and the loss.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from algos.sft import Args, encode_all, main, split_rows, step_rows
from common import checks
from common.logger import LogFlags
from common.models import char_tokenizer, resolve_model

ROOT = Path(__file__).parents[1]
DEADLINE_S = 600
GOOD = {"prompt": "1234", "response": "4321"}


def sft(*arguments: str) -> subprocess.CompletedProcess:
    """`python -m algos.sft` in a process of its own, to its end."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "-m", "algos.sft", *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip


def test_a_run_on_two_ranks_learns_from_both_formats_and_writes_all_its_files(tmp_path):
    numbers = [f"{number:04d}" for number in range(37, 10_000, 250)]
    records = []
    for i, number in enumerate(numbers):
        turns = [{"role": "user", "content": number}, {"role": "assistant", "content": "same " + number}]
        prompt = [number, turns[:1]][i // 2 % 2]  # a prompt may be messages too
        records += [{"messages": turns * 2} if i % 2 else {"prompt": prompt, "response": "same " + number}]
    records.append({"prompt": "long" * 20, "response": "left out"})
    data, output_dir = tmp_path / "data.jsonl", tmp_path / "run"
    data.write_text("\n\n".join(json.dumps(record) for record in records) + "\n")

    done = sft(
        "--model", "tiny", "--data", str(data), "--output-dir", str(output_dir), "--max-steps", "8",
        "--num-trainers", "2", "--batch-size", "16", "--micro-batch-tokens", "256", "--max-length", "60",
        "--eval-every", "4", "--save-every", "4", "--lr-warmup-steps", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "1 of 41 conversations are longer than --max-length 60 and left out" in done.stdout

    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["lr"] for row in rows[:3]] == pytest.approx([2e-3 / 2, 2e-3 * 7 / 8, 2e-3 * 6 / 8])
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["time/step"] >= row["time/train"] > 0
        assert row["perf/train_tokens_per_s"] > 0 and row["perf/samples_per_s"] > 0
    assert [row["step"] for row in rows if "loss/eval" in row] == [0, 4]
    assert [row["step"] for row in rows if "loss/eval_end" in row] == [7]
    assert rows[-1]["loss/sft"] < 0.8 * rows[0]["loss/sft"]
    assert rows[-1]["loss/eval_end"] < 0.8 * rows[0]["loss/eval"]

    samples = [json.loads(line) for line in (output_dir / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [step for step in range(8) for _ in range(4)]
    for sample in samples:
        answers = sample["learned"].split("<|im_end|>")
        assert answers.pop() == "" and all(answer.startswith("same ") for answer in answers)
        assert len(answers) == sample["transcript"].count("<|im_start|>assistant")

    summary = json.loads((output_dir / "summary.json").read_text())
    assert summary["steps"] == 8
    assert summary["loss/sft"] == {"first": rows[0]["loss/sft"], "last": rows[-1]["loss/sft"]}
    assert summary["loss/eval"] == {"first": rows[0]["loss/eval"], "end": rows[-1]["loss/eval_end"]}
    assert (output_dir / "curve.png").exists()
    assert summary["checkpoint"] == str(output_dir / "checkpoints" / "step_8")
    assert (output_dir / "checkpoints" / "step_4").is_dir()

    # The first update and the last loss, without FSDP, micro-batches or any of the trainer's code.
    chats = [("data", each["messages"] if "messages" in each else as_chat(each)) for each in records[:-1]]
    tokenizer = AutoTokenizer.from_pretrained(summary["checkpoint"])
    train, held_out = split_rows(encode_all(chats, tokenizer, max_length=60))
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"))
    loss = mean_loss(model, step_rows(train, 0, Args(batch_size=16)))
    loss.backward()
    squares = sum(parameter.grad.square().sum().item() for parameter in model.parameters())
    assert rows[0]["loss/sft"] == pytest.approx(loss.item(), rel=1e-4)
    assert rows[0]["grad_norm"] == pytest.approx(squares**0.5, rel=1e-4)
    assert rows[0]["loss/eval"] == pytest.approx(mean_loss(model, held_out).item(), rel=1e-4)
    model = AutoModelForCausalLM.from_pretrained(summary["checkpoint"])
    assert rows[-1]["loss/eval_end"] == pytest.approx(mean_loss(model, held_out).item(), rel=1e-4)


def mean_loss(model, rows: list[dict]) -> torch.Tensor:
    """Mean cross-entropy over all tokens with loss, one conversation at a time."""
    losses = []
    for row in rows:
        ids, mask = torch.tensor(row["token_ids"]), torch.tensor(row["action_mask"])[1:]
        losses.append(cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")[mask])
    return torch.cat(losses).mean()


def as_chat(record: dict) -> list[dict]:
    """The messages of a prompt and its response."""
    prompt = record["prompt"]
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*turns, {"role": "assistant", "content": record["response"]}]


REFUSED = [
    ("{not json", "not JSON"),
    ('["a", "list"]', "not a JSON object"),
    ('{"prompt": "1", "answer": "2"}', "neither `messages` nor `prompt` and `response`"),
    ('{"prompt": 5, "response": "2"}', "`prompt` must be"),
    ('{"prompt": "1", "response": 2}', "`response` must be"),
    ('{"messages": [{"role": "user"}]}', "`messages` must be"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "no turn of the role assistant"),
    ('{"messages": [{"role": "assistant", "content": "a"}]}', "nothing to answer"),
]


@pytest.mark.parametrize("line, told", REFUSED)
def test_a_line_that_is_no_conversation_is_refused_by_number(line, told, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ray, "init", lambda *args, **kwargs: pytest.fail("Ray was started"))
    data = tmp_path / "data.jsonl"
    data.write_text(f"{json.dumps(GOOD)}\n\n{line}\n{json.dumps(GOOD)}\n")
    with pytest.raises(SystemExit) as stopped:
        checks.run(main, Args(data=str(data), log=LogFlags(output_dir=str(tmp_path / "run"))))
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert f"{data}:3: " in error and told in error
    assert not (tmp_path / "run").exists()


def test_a_missing_data_file_ends_the_program_with_exit_code_2(tmp_path):
    done = sft("--data", str(tmp_path / "none.jsonl"), "--output-dir", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: --data ") and "there is no such file" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_twentieth_is_held_out_and_at_least_one_and_at_most_128():
    sizes = [(2, 1), (39, 1), (40, 2), (2_560, 128), (10_000, 128)]
    for number, held in sizes:
        train, held_out = split_rows([{"row": index} for index in range(number)])
        assert len(held_out) == held
        assert sorted(row["row"] for row in train + held_out) == list(range(number))


def test_every_epoch_has_each_conversation_once_in_an_order_of_its_own():
    rows, args = [{"row": index} for index in range(10)], Args(batch_size=4)
    seen = [row["row"] for step in range(5) for row in step_rows(rows, step, args)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert seen[:4] != [row["row"] for row in step_rows(rows, 0, Args(batch_size=4, seed=2))]


def test_conversations_past_the_longest_length_are_left_out_whole():
    chats = [[{"role": "user", "content": "x" * n}, {"role": "assistant", "content": "y"}] for n in (1, 2, 3)]
    every = encode_all([("here", chat) for chat in chats], char_tokenizer(), max_length=1000)
    bound = len(every[1]["token_ids"])
    kept = encode_all([("here", chat) for chat in chats], char_tokenizer(), max_length=bound)
    assert [len(row["token_ids"]) for row in kept] == [bound - 1, bound]
