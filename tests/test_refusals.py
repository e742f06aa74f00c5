"""What a mistake on the command line costs: one line that names flag, value and fix, and exit code 2.

Through the real parser and `main`. Nothing may have started and no file may have been made.
"""

import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
import tyro

from algos import distill, distill_topk, flash_reinforce, grpo, ppo, sft
from common import checks
from common.models import make_tiny, resolve_model

ROOT = Path(__file__).parents[1]
MAINS = {"grpo": grpo, "flash_reinforce": flash_reinforce, "ppo": ppo, "sft": sft}
MAINS |= {"distill": distill, "distill_topk": distill_topk}
DEADLINE_S = 300

ENVS = """
from common.env import Env, Step


class Good(Env):
    def tasks(self, split):
        return [{"text": "short"}]

    def reset(self, task):
        return task["text"]

    def step(self, action):
        return Step(reward=1.0)


class Many(Good):
    def tasks(self, split):
        return [{"text": "short"}] * 62


class NoTasks(Good):
    def tasks(self, split):
        return [] if split == "eval" else super().tasks(split)


class NoStep(Env):
    def tasks(self, split):
        return [{}]

    def reset(self, task):
        return "a question"


class TasksRaise(Good):
    def tasks(self, split):
        raise FileNotFoundError("words.txt is not here")


class ResetRaises(Good):
    def reset(self, task):
        return task["question"]


class ResetGivesNothing(Good):
    def reset(self, task):
        pass


class Fits(Good):
    def tasks(self, split):
        return [{"text": "x" * 100}]


class TooLong(Good):
    def tasks(self, split):
        return [{"text": "x" * 600}]


class Ids(Good):
    async def reset(self, task):
        return [3] * 20


class OtherIds(Good):
    def reset(self, task):
        return [3, 5000]
"""
PICKY = (  # a chat template that knows two roles
    "{% for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('no role ' + message['role']) }}{% endif %}{{ message['content'] }}{% endfor %}"
)
PAIR = '{"prompt": "1", "answer": "2"}\n'
FILES = {
    "envs.py": ENVS,
    "raises.py": "import math\n\nraise RuntimeError('licence server is down')\n",
    "syntax.py": "def f(:\n",
    "good.jsonl": PAIR * 2,
    "line2.jsonl": PAIR + "{not json\n",
    "keys.jsonl": '{"question": "1", "answer": "2"}\n',
    "split.jsonl": '{"prompt": "1", "answer": "2", "split": "train"}\n',
    "empty.jsonl": "\n",
    "roles.jsonl": '{"prompt": [{"role": "usre", "content": "1"}], "answer": "2"}\n',
    "chats.jsonl": '{"prompt": "1", "response": "2"}\n' * 4,
    "chats3.jsonl": '{"prompt": "1", "response": "2"}\n' * 2 + '{"prompt": "1"}\n',
    "file": "",
    "held/metrics.jsonl": "",
    "ended/metrics.jsonl": "",
    "ended/checkpoints/step_5/progress.json": '{"step": 5, "queue": null, "files": {}}',
    "ended/checkpoints/step_5/trainer/step_000005.jsonl": "",
    "recorded/step_000000.jsonl": "",
    "three/step_000000.jsonl": "",
    "three/step_000001.jsonl": "",
    "three/step_000002.jsonl": "",
    "nothing/notes.txt": "",
    "picky/config.json": "{}",
}

# algorithm, flags, what the message begins with (the flag and its value), what it tells to do
REFUSED = [
    # numbers that cannot be
    ("grpo", "--group-size 0", "--group-size 0: ", "--group-size 2 or more, or algos/flash_reinforce.py"),
    ("grpo", "--group-size 1", "--group-size 1: ", "--group-size 2 or more, or algos/flash_reinforce.py"),
    ("grpo", "--group-size -3", "--group-size -3: ", "--group-size 2 or more, or algos/flash_reinforce.py"),
    ("flash_reinforce", "--group-size 8", "--group-size 8: ", "algos/grpo.py trains groups"),
    ("grpo", "--max-steps 0", "--max-steps 0: ", "must be greater than or equal to 1"),
    ("sft", "--max-steps 0", "--max-steps 0: ", "must be greater than or equal to 1"),
    ("grpo", "--eval-every 0", "--eval-every 0: ", "must be greater than or equal to 1"),
    ("grpo", "--prompts-per-step 0", "--prompts-per-step 0: ", "must be greater than or equal to 1"),
    ("grpo", "--max-new-tokens 0", "--max-new-tokens 0: ", "must be greater than or equal to 1"),
    ("grpo", "--epochs 0", "--epochs 0: ", "must be greater than or equal to 1"),
    ("grpo", "--minibatches 0", "--minibatches 0: ", "must be greater than or equal to 1"),
    ("grpo", "--num-engines 0", "--num-engines 0: ", "must be greater than or equal to 1"),
    ("grpo", "--num-trainers 0", "--num-trainers 0: ", "must be greater than or equal to 1"),
    ("flash_reinforce", "--num-trainers 0", "--num-trainers 0: ", "must be greater than or equal to 1"),
    ("sft", "--num-trainers 0", "--num-trainers 0: ", "must be greater than or equal to 1"),
    ("grpo", "--max-in-flight 0", "--max-in-flight 0: ", "must be greater than or equal to 1"),
    ("grpo", "--micro-batch-tokens 0", "--micro-batch-tokens 0: ", "must be greater than or equal to 1"),
    ("grpo", "--env-workers 0", "--env-workers 0: ", "must be greater than or equal to 1"),
    ("grpo", "--eval-size 0", "--eval-size 0: ", "must be greater than or equal to 1"),
    ("sft", "--batch-size 0", "--batch-size 0: ", "must be greater than or equal to 1"),
    ("grpo", "--max-staleness -1", "--max-staleness -1: ", "must be greater than or equal to 0"),
    ("grpo", "--save-every -1", "--save-every -1: ", "must be greater than or equal to 0"),
    ("grpo", "--samples-per-step -1", "--samples-per-step -1: ", "must be greater than or equal to 0"),
    ("grpo", "--profile-steps -1", "--profile-steps -1: ", "must be greater than or equal to 0"),
    ("grpo", "--eval-samples -1", "--eval-samples -1: ", "must be greater than or equal to 0"),
    ("grpo", "--lr -0.001", "--lr -0.001: ", "must be greater than or equal to 0"),
    ("sft", "--lr nan", "--lr nan: ", "must be greater than or equal to 0"),
    ("grpo", "--kl-coef -0.5", "--kl-coef -0.5: ", "must be greater than or equal to 0"),
    ("grpo", "--weight-decay -0.5", "--weight-decay -0.5: ", "must be greater than or equal to 0"),
    ("grpo", "--temperature 0", "--temperature 0.0: ", "must be greater than 0"),
    ("grpo", "--temperature -1", "--temperature -1.0: ", "must be greater than 0"),
    ("flash_reinforce", "--temperature nan", "--temperature nan: ", "must be less than inf"),
    ("grpo", "--temperature inf", "--temperature inf: ", "must be less than inf"),
    ("grpo", "--max-grad-norm 0", "--max-grad-norm 0.0: ", "must be greater than 0"),
    ("grpo", "--clip-low 0", "--clip-low 0.0: ", "must be greater than 0"),
    ("grpo", "--clip-low 1.5", "--clip-low 1.5: ", "must be less than or equal to 1"),
    ("grpo", "--correction-cap 0.9", "--correction-cap 0.9: ", "must be at least 1"),
    ("grpo", "--correction icepop --correction-cap 0.9", "--correction-cap 0.9: icepop's ratio", "use 1 or more"),
    ("grpo", "--correction clip --correction-cap 0.9", "--correction-cap 0.9: clip's ratio", "use 1 or more"),
    ("grpo", "--correction seq-mask --correction-cap 0.9", "--correction-cap 0.9: seq-mask's ratio", "use 1 or more"),
    ("ppo", "--correction tis --correction-cap 0.9", "--correction-cap 0.9: tis's ratio", "use 1 or more"),
    ("ppo", "--correction seq-mask --correction-cap 0.9", "--correction-cap 0.9: seq-mask's ratio", "use 1 or more"),
    ("grpo", "--correction kl-gate --correction-cap 0", "--correction-cap 0.0: kl-gate's KL", "use 5e-3"),
    ("grpo", "--correction kl-gate --correction-cap -1", "--correction-cap -1.0: kl-gate's KL", "use 5e-3"),
    ("ppo", "--correction kl-gate --correction-cap 0", "--correction-cap 0.0: kl-gate's KL", "use 5e-3"),
    ("ppo", "--correction kl-gate --correction-cap nan", "--correction-cap nan: kl-gate's KL", "use 5e-3"),
    ("grpo", "--correction-cap nan", "--correction-cap nan: tis's ratio", "use 1 or more"),
    ("grpo", "--gpu-memory-utilization 0", "--gpu-memory-utilization 0.0: ", "must be greater than 0"),
    ("grpo", "--gpu-memory-utilization 1.5", "--gpu-memory-utilization 1.5: ", "must be less than or equal to 1"),
    ("grpo", "--kv-cache-gb 0", "--kv-cache-gb 0.0: ", "must be greater than 0"),
    ("grpo", "--env-timeout-s 0", "--env-timeout-s 0.0: ", "must be greater than 0"),
    ("grpo", "--start-timeout-s 0", "--start-timeout-s 0.0: ", "must be greater than 0"),
    ("grpo", "--rollout-timeout-s -5", "--rollout-timeout-s -5.0: ", "must be greater than 0"),
    ("grpo", "--step-timeout-s nan", "--step-timeout-s nan: ", "must be less than"),
    ("sft", "--refit-timeout-s 0", "--refit-timeout-s 0.0: ", "must be greater than 0"),
    # numbers that do not fit together
    ("grpo", "--minibatches 3", "--minibatches 3 ", "use --minibatches 2 or 4"),
    ("grpo", "--prompts-per-step 2 --group-size 2 --num-trainers 5", "--num-trainers 5: ", "1 to 4"),
    ("flash_reinforce", "--prompts-per-step 4 --num-trainers 5", "--num-trainers 5: ", "1 to 4"),
    ("grpo", "--num-engines 2", "--num-engines 2 and --num-trainers 1 need 3 GPUs, there are 2; ", "lower"),
    ("grpo", "--max-new-tokens 512", "--max-new-tokens 512 ", "lower --max-new-tokens to 511 or raise"),
    # the 600 (100) characters of the prompt are a token each, and the chat template adds 8
    ("grpo", "--env envs.py:TooLong", "--max-new-tokens 16 + 608 prompt", "raise --max-model-len to 624"),
    (
        "grpo", "--env envs.py:Fits --max-model-len 120", "--max-new-tokens 16 + 108 prompt tokens = 124",
        "lower --max-new-tokens to 12 or raise --max-model-len to 124",
    ),
    ("grpo", "--eval-env envs.py:TooLong", "--max-new-tokens 16 + 608 ", "raise --max-model-len to 624"),
    # the model
    ("grpo", "--model tini", "--model tini: ", "use tiny, tiny-moe, tiny-vlm, smollm2, a directory that exists, or a Hub id"),
    ("sft", "--model tini", "--model tini: ", "use tiny, tiny-moe, tiny-vlm, smollm2, a directory that exists, or a Hub id"),
    ("grpo", "--model=", "--model : ", "use tiny, tiny-moe, tiny-vlm, smollm2, a directory that exists, or a Hub id"),
    ("grpo", "--model ./models/mine", "--model ./models/mine: ", "a directory that exists"),
    ("grpo", "--model nobody/nothing-1b", "--model nobody/nothing-1b: ", "give the folder of a downloaded model"),
    ("sft", "--model nobody/nothing-1b", "--model nobody/nothing-1b: ", "give the folder of a downloaded model"),
    ("grpo", "--model nothing", "--model nothing: has no config.json; ", "name the folder that has it"),
    ("sft", "--model nothing", "--model nothing: has no config.json; ", "name the folder that has it"),
    (
        "grpo", "--model picky --system-prompt Hi --env envs.py:Good", "--model picky: its chat template ",
        "refuses a prompt of --env envs.py:Good; change the prompts or the model: no role system",
    ),
    (
        "flash_reinforce", "--model picky --env jsonl:roles.jsonl", "--model picky: its chat template ",
        "refuses a prompt of --env jsonl:roles.jsonl; change the prompts or the model: no role usre",
    ),
    (
        "grpo", "--env envs.py:Ids --system-prompt Hi", "--model tiny: it cannot take a prompt of --env envs.py:Ids; ",
        "no --system-prompt can go before a prompt of ids; leave it out",
    ),
    (
        "grpo", "--env envs.py:OtherIds", "--model tiny: it cannot take a prompt of --env envs.py:OtherIds; ",
        "change the prompts or the model: token id 5000: the tokenizer has ",
    ),
    (
        "grpo", "--env envs.py:Ids --max-model-len 24", "--max-new-tokens 16 + 20 prompt tokens = 36",
        "lower --max-new-tokens to 4 or raise --max-model-len to 36",
    ),
    # the teacher
    ("distill", "", "--teacher : ", "use tiny, tiny-moe, tiny-vlm, smollm2, a directory that exists, or a Hub id"),
    ("distill_topk", "--teacher tini", "--teacher tini: ", "use tiny, tiny-moe, tiny-vlm, smollm2, a directory that exists, or"),
    ("distill", "--teacher nothing", "--teacher nothing: has no config.json; ", "name the folder that has it"),
    (
        "distill", "--teacher other", "--teacher other: to it the ids of --model tiny are other tokens, or none; ",
        "use a teacher with the same tokenizer",
    ),
    (
        "distill_topk", "--model other --teacher tiny", "--teacher tiny: to it the ids of --model other are other ",
        "use a teacher with the same tokenizer",
    ),
    ("distill", "--teacher capped", "--teacher capped: it changes its logits after the head", "use another model"),
    ("distill_topk", "--teacher tiny --teacher-top-k 0", "--teacher-top-k 0: ", "must be greater than or equal to 1"),
    # LoRA
    ("grpo", "--lora-rank 8 --model sparse", "--lora-rank 8: sparse has experts, ", "use 0"),
    ("ppo", "--lora-rank 8 --num-trainers 2 --trainer-tp 2", "--trainer-tp 2 with --lora-rank 8: ", "use 1"),
    ("grpo", "--lora-rank 8 --compile", "--compile with --lora-rank 8: ", "leave it out"),
    ("grpo", "--lora-rank 8 --lora-alpha 0", "--lora-alpha 0.0: ", "must be greater than 0"),
    ("sft", "--lora-rank 8 --init-from picky", "--init-from with --lora-rank 8: ", "--model; give it there"),
    ("grpo", "--lora-rank 8 --init-from picky", "--init-from with --lora-rank 8: ", "--model; give it there"),
    ("distill_topk", "--teacher tiny --num-trainers 2 --trainer-tp 2", "--trainer-tp 2: ", "use 1"),
    ("grpo", "--chat-template-args nojson", "--chat-template-args nojson: ", "not a JSON object; write one like '{\"key"),
    ("grpo", "--chat-template-args [1]", "--chat-template-args [1]: ", "not a JSON object; write one like '{\"key"),
    # the environment
    ("grpo", "--env revers", "--env revers: ", "use reverse, shapes, gym:DATASET, jsonl:FILE or path/to/"),
    ("grpo", "--eval-env revers", "--eval-env revers: ", "use reverse, shapes, gym:DATASET, jsonl:FILE or path/to"),
    ("grpo", "--env envs.py", "--env envs.py: ", "path/to/file.py:Class"),
    ("grpo", "--env none.py:Good", "--env none.py:Good: ", "there is no file none.py"),
    ("grpo", "--env envs.py:Goood", "--env envs.py:Goood: ", "envs.py has no class Goood"),
    ("grpo", "--env raises.py:Good", "--env raises.py:Good: ", "RuntimeError: licence server is down"),
    ("grpo", "--env syntax.py:Good", "--env syntax.py:Good: ", "invalid syntax (syntax.py, line 1)"),
    ("grpo", "--env envs.py:NoStep", "--env envs.py:NoStep: ", "abstract method step"),
    ("grpo", "--env envs.py:TasksRaise", "--env envs.py:TasksRaise: ", "words.txt is not here"),
    ("grpo", "--env envs.py:ResetRaises", "--env envs.py:ResetRaises: ", "KeyError: 'question'"),
    (
        "grpo", "--eval-env envs.py:ResetGivesNothing", "--eval-env envs.py:ResetGivesNothing: ",
        "reset() returned None, not a string or chat messages",
    ),
    (
        "flash_reinforce", "--env envs.py:NoTasks", "--env envs.py:NoTasks: tasks('eval') is empty",
        "give it at least one task",
    ),
    ("grpo", "--env jsonl:none.jsonl", "--env jsonl:none.jsonl: ", "give the path of a JSONL file"),
    ("grpo", "--env jsonl:line2.jsonl", "--env jsonl:line2.jsonl: ", "line2.jsonl, line 2: not JSON"),
    ("grpo", "--env jsonl:keys.jsonl", "--env jsonl:keys.jsonl: ", "['answer', 'question']; add it"),
    ("grpo", "--env jsonl:keys.jsonl", "--env jsonl:keys.jsonl: ", "name one of these with --prompt-key"),
    (
        "grpo", "--env jsonl:good.jsonl --answer-key gold", "--env jsonl:good.jsonl: ",
        "no key 'gold' among ['answer', 'prompt']; add it or rename one, or name one of these with --answer",
    ),
    ("grpo", "--env jsonl:split.jsonl", "--env jsonl:split.jsonl: ", "add some or drop the key"),
    ("grpo", "--env jsonl:empty.jsonl", "--env jsonl:empty.jsonl: ", "write one JSON object a line"),
    ("grpo", "--env gym:chain_summ", "--env gym:chain_summ: ", "use chain_sum, "),
    ("grpo", "--env gym:chain_sum,min_term=2", "--env gym:chain_sum,min_term=2: ", "use min_terms, "),
    # folders and packages
    ("grpo", "--output-dir held", "--output-dir held: holds a run; ", "use another --output-dir, or --re"),
    ("sft", "--output-dir held", "--output-dir held: holds a run; ", "use another --output-dir, or --re"),
    ("grpo", "--output-dir file", "--output-dir file: is a file; ", "use another --output-dir"),
    ("grpo", "--resume", "--output-dir out: holds no run; ", "leave out --resume, or name the run's"),
    ("grpo", "--resume --output-dir held", "--resume: held ", "--save-every writes them; without --resume, "),
    ("sft", "--resume --output-dir held", "--resume: held ", "--save-every writes them; without --resume, "),
    (
        "grpo", "--resume --output-dir ended --max-steps 5", "--max-steps 5: ended is at step 5; ",
        "ask for more steps",
    ),
    ("grpo", "--init-from none", "--init-from none: there is no such path; ", "relative paths start in /"),
    ("sft", "--init-from none", "--init-from none: there is no such path; ", "relative paths start in /"),
    ("grpo", "--init-from ended", "--init-from ended: has no config.json; ", "name the folder that has it"),
    ("grpo", "--replay-rollouts none", "--replay-rollouts none: there is no such path; ", "paths start in /"),
    (
        "grpo", "--replay-rollouts nothing", "--replay-rollouts nothing: has no step_000000.jsonl; ",
        "name the folder that has it",
    ),
    (
        "grpo", "--replay-rollouts three --max-steps 4", "--replay-rollouts three: has 3 of 4 steps; ",
        "use --max-steps 3",
    ),
    (  # 62 training tasks, 16 a step
        "grpo", "--replay-rollouts three --data-epochs 1 --env envs.py:Many",
        "--replay-rollouts three: has 3 of 4 steps; ", "use --max-steps 3",
    ),
    ("ppo", "--replay-rollouts three", "--replay-rollouts three: has 3 of 120 steps; ", "use --max-steps 3"),
    (
        "grpo", "--replay-rollouts three --dry-run", "--replay-rollouts three: has 3 of 120 steps; ",
        "use --max-steps 3",
    ),
    (
        "grpo", "--replay-rollouts recorded --num-trainers 2", "--replay-rollouts recorded: one process; ",
        "leave out --num-trainers",
    ),
    (
        "grpo", "--eval-only --resume --output-dir ended", "--eval-only --resume: ",
        "give the checkpoint's folder as --model",
    ),
    ("grpo", "--wandb-project p", "--wandb-project p: wandb is missing; ", "pip install wandb"),
    ("sft", "--trackio-project p", "--trackio-project p: trackio is missing; ", "pip install trackio"),
    # conversations
    ("sft", "--data none.jsonl", "--data none.jsonl: there is no such file; ", "use reverse or the path of"),
    ("sft", "--data line2.jsonl", "--data line2.jsonl:1: neither `messages` nor ", "add them or rename"),
    ("sft", "--data chats3.jsonl", "--data chats3.jsonl:3: neither `messages` nor ", "add them or rename"),
    ("sft", "--data chats.jsonl --max-length 1", "--max-length 1: ", "must be greater than or equal to 2"),
    (
        "sft", "--data chats.jsonl --max-length 5", "--data chats.jsonl: 4 of 4 ",
        "are longer than --max-length 5 and left out; give 2 conversations or more",
    ),
    ("sft", "--data empty.jsonl", "--data empty.jsonl: ", "give 2 conversations or more"),
]  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with FILES and the models `picky`, `other` (its tokens), `capped` (its logits) and `sparse`."""
    folder = tmp_path_factory.mktemp("workplace")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copytree(resolve_model("tiny"), folder / "picky", dirs_exist_ok=True)
    (folder / "picky" / "chat_template.jinja").write_text(PICKY)
    for name in ("other", "capped", "sparse"):
        shutil.copytree(resolve_model("tiny"), folder / name)
    text = (folder / "other" / "tokenizer.json").read_text()  # two tokens change places
    (folder / "other" / "tokenizer.json").write_text(
        text.replace('"a":', '"swap":').replace('"b":', '"a":').replace('"swap":', '"b":')
    )
    config = json.loads((folder / "capped" / "config.json").read_text()) | {"final_logit_softcapping": 30.0}
    (folder / "capped" / "config.json").write_text(json.dumps(config))
    config = json.loads((folder / "sparse" / "config.json").read_text()) | {"num_experts": 4}
    (folder / "sparse" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def command(workplace, monkeypatch, capsys):
    """Runs a command line in `workplace` in this process. Returns (exit code, stdout, stderr)."""

    def no_ray(*_, **__):
        raise AssertionError("Ray was started")

    def without_trackers(name, *rest):
        return None if name in ("wandb", "trackio") else find_spec(name, *rest)

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", without_trackers)
    monkeypatch.setattr(ray, "init", no_ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(workplace)

    def run(algorithm: str, flags: str) -> tuple[int, str, str]:
        argv = flags.split()
        argv += [] if "--output-dir" in argv else ["--output-dir", "out"]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 if "--num-engines 2" in flags else 0)
        before = files(workplace)
        with pytest.raises(SystemExit) as stopped:
            checks.run(MAINS[algorithm].main, tyro.cli(MAINS[algorithm].Args, args=argv))
        assert files(workplace) == before
        assert not ray.is_initialized()
        return stopped.value.code, *capsys.readouterr()

    return run


def files(folder: Path) -> dict[Path, str | None]:
    """Every file below a folder with its text, and the folders. Python's own cache does not count."""
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path: path.read_text(errors="replace") if path.is_file() else None for path in paths}


@pytest.mark.parametrize("algorithm, flags, begins, fix", REFUSED, ids=[f"{a} {f}" for a, f, _, _ in REFUSED])
def test_it_is_refused_in_one_line_with_flag_value_and_fix_before_anything_starts(
    command, algorithm, flags, begins, fix
):
    code, out, err = command(algorithm, flags)
    assert code == 2 and out == ""
    assert err.startswith(f"error: {begins}") and fix in err
    assert err.endswith("\n") and err.count("\n") == 1


def test_the_same_flags_with_good_values_pass(command, workplace, capsys):
    """Else every row above could be refused for a reason of its surroundings."""
    good = (
        "--env envs.py:Good --eval-env jsonl:good.jsonl --group-size 2 --max-staleness 0 --temperature 0.5 "
        "--minibatches 4 --max-new-tokens 12 --max-model-len 120 --chat-template-args {} --init-from picky "
        "--output-dir out --num-trainers 1 --kl-coef 0 --correction-cap 1 --clip-low 1"
    )
    for env in ("Good", "Ids"):
        flags = [*good.replace("Good", env).split(), "--dry-run"]
        checks.run(grpo.main, tyro.cli(grpo.Args, args=flags))
        assert "a step: 16 prompts x 2 = 32 rollouts" in capsys.readouterr().out
    assert not (workplace / "out").exists()


def test_the_plan_of_a_run_that_ends_with_the_data(command, workplace, capsys):
    (workplace / "data.jsonl").write_text('{"prompt": "1", "answer": "2"}\n' * 40)  # 36 of them are trained
    flags = (
        "--print-plan --env jsonl:data.jsonl --prompts-per-step 8 --group-size 4 --minibatches 2 --epochs 3"
    )
    for passes, steps in ((0, 120), (1, 5), (2, 9), (40, 120)):
        checks.run(grpo.main, tyro.cli(grpo.Args, args=[*flags.split(), "--data-epochs", str(passes)]))
        plan = capsys.readouterr().out
        assert "a step: 8 prompts x 4 = 32 rollouts" in plan
        assert f"2 minibatches of 16 rollouts = 6 a step, {6 * steps} in {steps} steps" in plan
        assert f"data: {8 * steps} prompts, {8 * steps / 36:.3g} passes over 36 training tasks" in plan


# what the parser itself refuses: the flags, and what its message must have
UNREADABLE = [
    ("grpo", "--max-stepz 3", ["--max-stepz", "Perhaps you meant", "--max-steps INT"]),
    ("grpo", "--max-staleness two", ["--max-staleness", "two", "--max-staleness INT"]),
    ("grpo", "--order arival", ["--order", "arival", "'arrival'", "'ticket'"]),
    ("grpo", "--env jsonl:good.jsonl --grader fuzzy", ["--grader", "fuzzy", "'exact'", "'math'"]),
    ("grpo", "--lr", ["--lr", "Missing value"]),
    ("sft", "--batchsize 3", ["--batchsize", "Perhaps you meant", "--batch-size INT"]),
]


@pytest.mark.parametrize("algorithm, flags, parts", UNREADABLE, ids=[flags for _, flags, _ in UNREADABLE])
def test_what_cannot_be_read_ends_with_2_and_a_hint(command, algorithm, flags, parts):
    code, out, err = command(algorithm, flags)
    text = " ".join(err.split())
    assert code == 2 and out == ""
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("algorithm", ["grpo", "flash_reinforce", "ppo"])
def test_truncated_sampling_is_refused_with_the_reason(algorithm, workplace, monkeypatch, capsys):
    """Through the foot of the file, as a program's own command line."""
    monkeypatch.chdir(workplace)
    before = files(workplace)
    given = {
        "--top-p 0.9": "--top-p", "--top-p=1.0": "--top-p", "--top_p 0.9": "--top-p", "--top-k 20": "--top-k",
        "--top_k=20": "--top-k", "--min-p 0.1": "--min-p", "--lr 1 --help --min_p 0.1": "--min-p",
    }  # fmt: skip
    for flags, named in given.items():
        monkeypatch.setattr(sys, "argv", [f"{algorithm}.py", *flags.split()])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(ROOT / "algos" / f"{algorithm}.py", run_name="__main__")
        out, err = capsys.readouterr()
        assert (stopped.value.code, out, err.count("\n")) == (2, "", 1), flags
        assert err.startswith(f"error: {named}: the trainer's log-probs are over all tokens"), flags
        assert err.endswith("use --temperature\n"), flags
    assert files(workplace) == before


def test_a_value_that_only_looks_like_truncated_sampling_is_read(command, capsys):
    flags = ["--system-prompt", "say --top-p 0.9", "--chat-template-args", '{"top-p": 1}', "--dry-run"]
    checks.run(grpo.main, checks.parse(grpo.Args, flags))
    assert "a step: 16 prompts" in capsys.readouterr().out


def program(folder: Path, *command: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip


@pytest.mark.parametrize(
    "module, flags, line",
    [
        (
            "algos.grpo",
            "--group-size 1",
            "error: --group-size 1: a group baseline needs at least 2 rollouts of each prompt; use "
            "--group-size 2 or more, or algos/flash_reinforce.py, which needs no group",
        ),
        (
            "algos.flash_reinforce",
            "--env envs.py:NoTasks",
            "error: --env envs.py:NoTasks: tasks('eval') is empty; give it at least one task",
        ),
        (
            "algos.sft",
            "--data chats3.jsonl",
            "error: --data chats3.jsonl:3: neither `messages` nor `prompt` and `response` among ['prompt']; "
            "add them or rename what is there",
        ),
    ],
)
def test_a_program_that_is_refused_says_so_alone(workplace, module, flags, line):
    before = files(workplace)
    done = program(workplace, module, *flags.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line + "\n")
    assert files(workplace) == before


def test_weights_of_another_architecture_end_the_run_and_are_named(workplace, tmp_path):
    other = make_tiny(tmp_path / "other", moe=True)
    flags = ["--replay-rollouts", "recorded", "--max-steps", "1", "--init-from", other]
    done = program(workplace, "algos.grpo", *flags, "--output-dir", str(tmp_path / "run"))
    assert done.returncode == 1
    assert f"run ended: ValueError: {other}: its parameters are not those" in done.stdout.replace("\n", " ")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["flags"]["save"]["init_from"] == other
