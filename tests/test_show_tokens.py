"""scripts/show_tokens.py on recorded rollouts of a real model: numbers, marks, and what is escaped."""

import importlib.util
import io
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from algos import grpo
from common.checkpoint import gather_model, write_model
from common.debug import dump_rollouts
from common.logger import Logger
from common.models import char_tokenizer, make_tiny
from common.sample import Rollout, Segment

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("show_tokens", ROOT / "scripts" / "show_tokens.py")
show_tokens = importlib.util.module_from_spec(spec)
sys.modules["show_tokens"] = show_tokens  # its dataclasses look themselves up there
spec.loader.exec_module(show_tokens)

PROMPT, ANSWER = "<|im_start|>user\n12<|im_end|>\n", "<b>&21"
TEMPERATURE, BOUND, STEP = 0.8, 1, 5


def segment(answer: str, versions: list[int], logprobs: list[float]) -> Segment:
    prompt, sampled = char_tokenizer().encode(PROMPT), char_tokenizer().encode(answer)
    gap = [0] * len(prompt)
    return Segment(
        prompt + sampled, [*gap, *[1] * len(sampled)], [*gap, *logprobs], [*(-1 for _ in gap), *versions],
        [len(prompt) + len(sampled)], "stop",
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder as the programs write it: rollouts of step 5, checkpoints of versions 2 and 5."""
    folder = tmp_path_factory.mktemp("run")
    base = make_tiny(folder / "base")
    args = grpo.Args(model=str(base), temperature=TEMPERATURE, max_staleness=BOUND, late="mask")
    args.debug.dump_rollouts, args.log.output_dir = str(folder / "rollouts"), str(folder)
    for version in (2, 5):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        generator = torch.Generator().manual_seed(version)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        path = folder / "checkpoints" / f"step_{version}"
        write_model(gather_model(model, 0), model, char_tokenizer(), path)
    with Logger(folder, asdict(args), 10, ("reward/mean",)) as log:
        for step in range(6):
            row = {"reward/mean": 0.5, "time/step": 1.0, "mismatch/abs_mean": 0.01 * step}
            row |= {"staleness/mean": float(step), "staleness/hist": [3, 2, step]}
            log.log_step({"step": step, **row, "rollout/dropped/timeout": step % 2})
    # by the engine: -1, -2, ...; versions 3 (late), 4 and 5
    answers = [segment(ANSWER, [3, 3, 4, 4, 5, 5], [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]),
               segment("21", [5, 5], [-0.5, -0.25])]  # fmt: skip
    rollouts = [Rollout(f"7.{i}", "g7", 7, "0", [each], [float(i)]) for i, each in enumerate(answers)]
    dump_rollouts(str(folder / "rollouts"), STEP, rollouts)
    return folder


def oracle(run: Path, version: int, ids: list[int], count: int) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / f"step_{version}", dtype=torch.float32)
    with torch.no_grad():
        logprobs = (model(torch.tensor([ids])).logits[0] / TEMPERATURE).log_softmax(-1)
    return np.array([logprobs[at - 1, ids[at]].item() for at in range(len(ids) - count, len(ids))])


def printed(run: Path, *flags: str) -> str:
    command = [sys.executable, "scripts/show_tokens.py", str(run), *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={"COLUMNS": "200", "PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_sampled_token_is_shown_with_its_numbers(run):
    text = printed(run)
    table = [line.split() for line in text.splitlines() if line.split()[1:2] and line.split()[0].isdigit()]
    own = [row for row in table if len(row) >= 8 and row[1] != "sampled"]
    assert [row[1] for row in own] == list(ANSWER), "the rollout with the most versions is chosen"
    assert [row[2:4] for row in own] == [[v, l] for v, l in zip("334455", "221100")]
    ids = char_tokenizer().encode(PROMPT + ANSWER)
    trainer, engine = oracle(run, 5, ids, 6), -np.arange(1.0, 7.0)
    assert [float(row[4]) for row in own] == pytest.approx(engine.tolist(), abs=1e-4)
    assert [float(row[5]) for row in own] == pytest.approx(trainer.tolist(), abs=2e-4)
    assert [float(row[6]) for row in own] == pytest.approx((trainer - engine).tolist(), abs=2e-4)
    assert [row[7] for row in own] == ["no", "no", "yes", "yes", "yes", "yes"]  # --late mask, bound 1
    # rewards 0 and 1 in the group: -.7071 for the first one; a masked token has none
    assert [row[8:] for row in own] == [[], []] + [["-0.7071"]] * 4
    assert "2 of version 3, 2 of version 4, 2 of version 5; lag mean 1, max 2; 2 late, 2 masked" in text
    mean, peak = np.abs(trainer - engine).mean(), np.abs(trainer - engine).max()
    assert f"trainer against engine mean {mean:.3g}, max {peak:.3g}" in text
    assert f"step_5, policy version 5; the step trained version {STEP}" in text.replace("\n", "")
    # of step 5, and of steps 0 to 5
    assert "mean 5 (run: 2.5)" in text and "abs_mean 0.05 (run: 0.025)" in text
    assert "timeout 1 (3 in the run)" in text and "[3, 2, 5]" in text


def test_another_rollout_and_another_checkpoint_or_none(run):
    text = printed(run, "--rollout", "7.1", "--checkpoint", str(run / "checkpoints" / "step_2"))
    trainer = oracle(run, 2, char_tokenizer().encode(PROMPT + "21"), 2)
    assert all(f"{value:.4f}"[:-1] in text for value in trainer) and "+0.7071" in text
    text = printed(run, "--rollout", "7.1", "--checkpoint", "none")
    assert "trainer against engine" not in text and "-0.2500" in text


def test_a_page_has_the_same_and_escapes_what_the_model_wrote(run, tmp_path):
    path = tmp_path / "tokens.html"
    printed(run, "--html", str(path))
    text = path.read_text()
    assert "<b>" not in text and "<|im_start|>" not in text and "<script" not in text
    assert "&lt;|im_start|&gt;" in text and ">&lt;</span>" in text and ">&amp;</span>" in text
    assert text.count("version: 3\n") == 2 and text.count("version: 5\n") == 2
    assert text.count("trained: yes") == 4 and text.count('class="dim"') == len(
        char_tokenizer().encode(PROMPT)
    )


def token(**change):
    fine = {"text": "x", "version": 4, "lag": 0, "engine": -1.0, "trainer": -1.0, "trained": True}
    return show_tokens.Token(**fine | {"advantage": 1.0, "late": False} | change)


@pytest.mark.parametrize(
    "change, style",
    [
        ({}, "green"),
        ({"lag": 1}, "yellow"),
        ({"lag": 3, "late": True}, "magenta"),
        ({"trainer": -1.51}, "red"),
        ({"trainer": None}, "green"),
        ({"lag": 3, "late": True, "trained": False}, "magenta strike"),
        ({"version": None, "lag": None, "engine": None, "trained": False}, "dim"),
    ],
)
def test_a_colour_says_what_is_wrong_with_a_token(change, style):
    assert token(**change).style == style
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    show_tokens.show(console, "title", [], [[token(**change)]])
    codes = {"green": "32", "yellow": "33", "magenta": "35", "red": "31", "dim": "2", "strike": "9"}
    wanted = ";".join(sorted((codes[word] for word in style.split()), key=int))
    assert f"\x1b[{wanted}mx" in console.file.getvalue()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--step", "4"], "--step 4: .* has 1 steps, [5] to [5]"),
        (["--rollout", "9.9"], "--rollout 9.9: the step has 7.0, 7.1"),
    ],
)
def test_what_is_not_there_is_named(run, flags, message):
    command = [sys.executable, "scripts/show_tokens.py", str(run), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert all(part in done.stderr for part in message.split(" .* "))


def test_the_nearest_checkpoint_is_taken_and_the_start_is_version_0(run):
    flags = json.loads((run / "config.json").read_text())["flags"]
    (run / "checkpoints" / "step_4.partial").mkdir(exist_ok=True)
    found = {step: show_tokens.nearest_model(run, flags, step)[1] for step in (0, 1, 2, 3, 4, 5, 9)}
    assert found == {0: 0, 1: 0, 2: 2, 3: 2, 4: 5, 5: 5, 9: 5}
    assert show_tokens.nearest_model(run, flags, 0)[0] == flags["model"]
