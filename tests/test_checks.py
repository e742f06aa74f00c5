"""Every refusal names the flag, the value it got and what to do instead."""

import math
from dataclasses import dataclass

import pytest
import tyro

from common import checks

# (call, what the message must contain: flag and value, then the fix)
REFUSALS = [
    (lambda: checks.check_at_least("--max-steps", 0, 1), ["--max-steps 0", "use --max-steps 1 or more"]),
    (lambda: checks.check_at_least("--lr", math.nan, 0), ["--lr nan", "at least 0"]),
    (
        lambda: checks.check_choice("--order", "arival", ("arrival", "ticket")),
        ["--order arival", "did you mean --order arrival?", "ticket"],
    ),
    (lambda: checks.check_choice("--late", "zzz", ("keep", "mask")), ["--late zzz", "Use one of keep, mask"]),
    (lambda: checks.check_path("--model", "no/where"), ["--model no/where", "relative paths start in /"]),
    (lambda: checks.check_group_size(1), ["--group-size 1", "use --group-size 2", "flash_reinforce.py"]),
    (lambda: checks.check_temperature(0.0), ["--temperature 0.0", "use --temperature 1.0"]),
    (lambda: checks.check_temperature(-1.0), ["--temperature -1.0", "use --temperature 1.0"]),
    (lambda: checks.check_temperature(math.nan), ["--temperature nan", "use --temperature 1.0"]),
    (lambda: checks.check_temperature(math.inf), ["--temperature inf", "use --temperature 1.0"]),
    (lambda: checks.check_kl(-0.1), ["--kl-coef -0.1", "use --kl-coef 0"]),
    (lambda: checks.check_kl(math.nan), ["--kl-coef nan", "use --kl-coef 0"]),
    (
        lambda: checks.check_minibatches(16, 3),
        ["--minibatches 3", "--prompts-per-step 16", "use --minibatches 2 or 4"],
    ),
    (lambda: checks.check_minibatches(16, 0), ["--minibatches 0", "use --minibatches 1 or 2"]),
    (lambda: checks.check_minibatches(4, 99), ["--minibatches 99", "use --minibatches 2 or 4"]),
    (lambda: checks.check_ranks(9, 8), ["--num-trainers 9", "8 rollouts", "--num-trainers 1 to 8"]),
    (lambda: checks.check_ranks(0, 8), ["--num-trainers 0", "--num-trainers 1 to 8"]),
    (
        lambda: checks.check_gpu_split(3, 2, gpus_available=4),
        ["--num-engines 3", "--num-trainers 2", "3 + 2 = 5 GPUs, there are 4", "lower --num-engines"],
    ),
    (
        lambda: checks.check_gpu_split(2, 1, gpus_available=4, gpus_per_engine=2),
        ["--num-engines 2 (x 2 GPU)", "4 + 1 = 5 GPUs, there are 4"],
    ),
    (lambda: checks.check_gpu_split(1, 3, 2, shared=True), ["max(1, 3) = 3 GPUs, there are 2"]),
    (
        lambda: checks.check_context(200, 400, 512),
        ["--max-new-tokens 400", "lower --max-new-tokens to 312", "raise --max-model-len to 600"],
    ),
    (lambda: checks.check_context(600, 10, 512), ["--max-model-len 512", "raise --max-model-len to 610"]),
]


@pytest.mark.parametrize("call, parts", REFUSALS, ids=[parts[0] for _, parts in REFUSALS])
def test_refusal(call, parts):
    with pytest.raises(checks.FlagError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_a_fix_that_cannot_work_is_not_offered():
    with pytest.raises(checks.FlagError) as caught:
        checks.check_context(600, 10, 512)
    assert "lower" not in str(caught.value)


def test_what_works_passes(tmp_path):
    checks.check_at_least("--max-staleness", 0, 0)
    checks.check_choice("--order", "ticket", ("arrival", "ticket"))
    checks.check_path("--init-from", str(tmp_path))
    checks.check_group_size(2)
    checks.check_temperature(0.01)
    checks.check_kl(0.0)
    checks.check_minibatches(16, 16)
    checks.check_ranks(8, 8)
    checks.check_gpu_split(2, 2, gpus_available=4)
    checks.check_gpu_split(4, 4, gpus_available=4, shared=True)
    checks.check_gpu_split(64, 64, gpus_available=0)
    checks.check_context(256, 256, 512)


def test_suggested_minibatches_work():
    for prompts in range(1, 40):
        for minibatches in range(-1, 45):
            try:
                checks.check_minibatches(prompts, minibatches)
            except checks.FlagError as error:
                suggestion = str(error).split("use --minibatches ")[1].split(",")[0]
                for count in suggestion.split(" or "):
                    checks.check_minibatches(prompts, int(count))


def test_output_dir(tmp_path):
    folder = tmp_path / "run"
    checks.check_output_dir(str(folder), resume=False)
    with pytest.raises(checks.FlagError, match=f"--output-dir {folder}: holds no run; leave out --res"):
        checks.check_output_dir(str(folder), resume=True)
    folder.mkdir()
    checks.check_output_dir(str(folder), resume=False)
    (folder / "metrics.jsonl").touch()
    checks.check_output_dir(str(folder), resume=True)
    with pytest.raises(checks.FlagError, match=f"--output-dir {folder}: holds a run; use .* --resume"):
        checks.check_output_dir(str(folder), resume=False)
    with pytest.raises(checks.FlagError, match="is a file; use another --output-dir"):
        checks.check_output_dir(str(folder / "metrics.jsonl"), resume=False)


def test_refuse_prints_one_line_and_exits_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        checks.refuse(checks.FlagError("--lr -1:\n  use more"))
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: --lr -1: use more\n"


def test_run_refuses_flag_errors_and_nothing_else(capsys):
    ran = []
    checks.run(ran.append, "args")
    assert ran == ["args"]
    with pytest.raises(SystemExit) as caught:
        checks.run(lambda size: checks.check_group_size(size), 1)
    assert caught.value.code == 2 and capsys.readouterr().err.startswith("error: --group-size 1")
    with pytest.raises(ZeroDivisionError):
        checks.run(lambda size: 1 / size, 0)


def test_run_ends_with_130_on_ctrl_c():
    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        checks.run(interrupted, None)
    assert caught.value.code == 130


@dataclass
class Flags:
    group_size: int = 8
    """Rollouts of one prompt."""


def test_tyro_suggests_the_nearest_flag_and_exits_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        tyro.cli(Flags, args=["--group-sise", "4"])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert "--group-size" in printed.out + printed.err
