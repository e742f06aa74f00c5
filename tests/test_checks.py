"""Every refusal names the flag, the value it got and what to do instead."""

import functools
import json
import math
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro

from algos.grpo import Args
from common import checks, cluster
from common.env import EnvFlags
from common.logger import LogFlags
from common.models import make_tiny, random_tiny_vlm, save_vlm
from common.parallel import ParallelFlags
from common.rollout import EngineFlags


def ranges(**flags):
    return lambda: checks.check_ranges(Args(**flags))


# (call, what the message must contain: flag and value, then the fix)
REFUSALS = [
    (ranges(max_steps=0), ["--max-steps 0", "must be greater than or equal to 1"]),
    (ranges(lr=math.nan), ["--lr nan", "greater than or equal to 0"]),
    (ranges(engine=EngineFlags(max_in_flight=0)), ["--max-in-flight 0", "greater than or equal to 1"]),
    (ranges(engine=EngineFlags(kv_cache_gb=0.0)), ["--kv-cache-gb 0.0", "greater than 0"]),
    (
        ranges(engine=EngineFlags(gpu_memory_utilization=1.5)),
        ["--gpu-memory-utilization 1.5", "less than or equal to 1"],
    ),
    (ranges(data=EnvFlags(env_timeout_s=-1.0)), ["--env-timeout-s -1.0", "greater than 0"]),
    (ranges(log=LogFlags(samples_per_step=-1)), ["--samples-per-step -1", "greater than or equal to 0"]),
    (
        lambda: checks.check_json_object("--chat-template-args", "{'a': 1}"),
        ["--chat-template-args {'a': 1}", "not a JSON object", "write one like '{\"key\": true}'"],
    ),
    (lambda: checks.check_json_object("--chat-template-args", "[1]"), ["--chat-template-args [1]"]),
    (lambda: checks.check_path("--model", "no/where"), ["--model no/where", "relative paths start in /"]),
    (lambda: checks.check_group_size(1), ["--group-size 1", "use --group-size 2", "flash_reinforce.py"]),
    (ranges(temperature=0.0), ["--temperature 0.0", "greater than 0"]),
    (ranges(temperature=-1.0), ["--temperature -1.0", "greater than 0"]),
    (ranges(temperature=math.nan), ["--temperature nan", "less than inf"]),
    (ranges(temperature=math.inf), ["--temperature inf", "less than inf"]),
    (ranges(kl_coef=-0.1), ["--kl-coef -0.1", "greater than or equal to 0"]),
    (ranges(kl_coef=math.nan), ["--kl-coef nan", "less than inf"]),
    (ranges(kl_coef=math.inf), ["--kl-coef inf", "less than inf"]),
    (
        lambda: checks.check_minibatches(16, 3),
        ["--minibatches 3", "--prompts-per-step 16", "use --minibatches 2 or 4"],
    ),
    (lambda: checks.check_minibatches(16, 0), ["--minibatches 0", "use --minibatches 1 or 2"]),
    (lambda: checks.check_minibatches(4, 99), ["--minibatches 99", "use --minibatches 2 or 4"]),
    (lambda: checks.check_ranks(9, 1, 8), ["--num-trainers 9", "8 rollouts", "--num-trainers 1 to 8"]),
    (lambda: checks.check_ranks(18, 2, 8), ["--num-trainers 18", "--num-trainers 1 to 16"]),
    (lambda: checks.check_ranks(0, 1, 8), ["--num-trainers 0", "--num-trainers 1 to 8"]),
    (
        lambda: checks.check_gpu_split(3, 1, 2, gpus=4),
        ["--num-engines 3", "--num-trainers 2", "need 5 GPUs, there are 4", "lower --num-engines"],
    ),
    (lambda: checks.check_gpu_split(1, 1, 2, gpus=2), ["need 3 GPUs, there are 2", "2 of each"]),
    (lambda: checks.check_gpu_split(2, 1, 1, gpus=1), ["--num-engines 2", "need 3 GPUs, there are 1"]),
    (lambda: checks.check_gpu_split(1, 2, 1, gpus=1), ["--engine-tp 2", "need 3 GPUs, there are 1"]),
    (
        lambda: checks.check_gpu_split(2, 4, 1, gpus=8),
        ["--num-engines 2 x --engine-tp 4 and --num-trainers 1 need 9 GPUs, there are 8"],
    ),
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
    checks.check_ranges(Args(max_staleness=0, temperature=0.01, kl_coef=0.0, lr=None, eval_samples=0))
    checks.check_json_object("--chat-template-args", '{"enable_thinking": false}')
    checks.check_path("--init-from", str(tmp_path))
    checks.check_group_size(2)
    checks.check_minibatches(16, 16)
    checks.check_ranks(8, 1, 8)
    checks.check_ranks(16, 2, 8)  # two ranks share a model
    checks.check_gpu_split(2, 1, 2, gpus=4)
    checks.check_gpu_split(1, 2, 2, gpus=4)
    checks.check_gpu_split(1, 1, 1, gpus=1)  # both share it
    checks.check_gpu_split(2, 1, 2, gpus=2)
    checks.check_gpu_split(1, 2, 2, gpus=2)
    checks.check_gpu_split(64, 1, 64, gpus=0)
    checks.check_context(256, 256, 512)


ENVS = """
from common.env import Env, Step

class Good(Env):
    def tasks(self, split):
        return [{"number": n} for n in range(100 if split == "train" else 3)]
    def reset(self, task):
        return f"number {task['number']}"
    def step(self, action):
        return Step(reward=0.0)

class NoTasks(Good):
    def tasks(self, split):
        return [] if split == "eval" else super().tasks(split)

class BadReset(Good):
    def reset(self, task):
        return task["nothing"]
"""


def test_an_environment_gives_its_number_of_tasks_and_some_prompts_of_both_splits(tmp_path):
    path = tmp_path / "envs.py"
    path.write_text(ENVS)
    num_tasks, prompts = checks.check_env("--env", f"{path}:Good", EnvFlags())
    assert num_tasks == 100
    assert prompts == [f"number {n}" for n in (*range(64), *range(3))]


@pytest.mark.parametrize(
    "name, parts",
    [
        ("NoTasks", ["tasks('eval') is empty", "at least one task"]),
        ("BadReset", ["KeyError", "nothing"]),
        ("Missing", ["has no class Missing"]),
    ],
)
def test_an_environment_that_cannot_work_is_refused(tmp_path, name, parts):
    path = tmp_path / "envs.py"
    path.write_text(ENVS)
    with pytest.raises(checks.FlagError) as caught:
        checks.check_env("--eval-env", f"{path}:{name}", EnvFlags())
    for part in (f"--eval-env {path}:{name}: ", *parts):
        assert part in str(caught.value)


AGENT = """
from common.agent import ChatAgent

class Fine(ChatAgent):
    def tasks(self, split):
        return [{}]
    def run(self, ctx):
        return 0.0

class Turns(Fine):
    max_turns = 4
"""


@pytest.mark.parametrize(
    "name, flags, parts",
    [
        ("Turns", {}, ["max_turns is 4", "leave max_turns out"]),
        ("Fine", {"refit_mode": "abort"}, ["--refit-mode abort", "use keep or wait"]),
        ("Fine", {"record_top_k": 5}, ["--record-top-k 5", "use 0"]),
    ],
)
def test_what_an_agent_cannot_be_played_with_is_refused(tmp_path, name, flags, parts):
    path = tmp_path / "agents.py"
    path.write_text(AGENT)
    assert checks.check_env("--env", f"{path}:Fine", EnvFlags(), EngineFlags())[0] == 1
    with pytest.raises(checks.FlagError) as caught:
        checks.check_env("--env", f"{path}:{name}", EnvFlags(), EngineFlags(**flags))
    for part in (f"--env {path}:{name}", *parts):
        assert part in str(caught.value)


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


def test_run_starts_again_within_its_budget_and_ends_with_what_died(capsys):
    args, ran = SimpleNamespace(save=SimpleNamespace(fault_budget=2, resume=False)), []

    def loses_an_engine(args, then=None):
        ran.append((args.save.fault_budget, args.save.resume))
        if len(ran) > 1 and then:
            raise then
        raise cluster.RunError("engine died")

    with pytest.raises(SystemExit) as caught:
        checks.run(loses_an_engine, args)
    assert caught.value.code == 1 and ran == [(2, False), (1, True), (0, True)]
    assert capsys.readouterr().err == "", "the logger has named it"
    args.save, ran[:] = SimpleNamespace(fault_budget=2, resume=False), []
    nothing = checks.FlagError("--resume: no checkpoint to go on from")
    with pytest.raises(SystemExit) as caught:
        checks.run(functools.partial(loses_an_engine, then=nothing), args)
    told = "error: --resume: no checkpoint to go on from (to start again after: engine died)\n"
    assert caught.value.code == 1 and len(ran) == 2 and capsys.readouterr().err == told


def test_run_ends_with_the_signal_though_a_process_died_with_it(monkeypatch):
    def both(_):
        raise cluster.RunError("engine died")

    monkeypatch.setattr(cluster, "signals", [signal.SIGTERM])
    with pytest.raises(SystemExit) as caught:
        checks.run(both, None)
    assert caught.value.code == 128 + signal.SIGTERM


# --- The parser's part


@dataclass
class Flags:
    group_size: int = 8
    """Rollouts of one prompt."""


@pytest.mark.parametrize(
    "flag, value, parts",
    [("--order", "arival", ["'arrival'", "'ticket'"]), ("--late", "zzz", ["'keep'", "'mask'", "'drop'"])],
)
def test_a_value_that_is_no_choice_is_refused_with_the_choices(capsys, flag, value, parts):
    with pytest.raises(SystemExit) as caught:
        tyro.cli(Args, args=[flag, value])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    for part in (flag, value, *parts):
        assert part in printed.out + printed.err


def test_tyro_suggests_the_nearest_flag_and_exits_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        tyro.cli(Flags, args=["--group-sise", "4"])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert "--group-size" in printed.out + printed.err


@pytest.mark.parametrize(
    "flags, parts",
    [
        ({"trainer_tp": 2}, ["--trainer-tp 2", "--num-trainers 1", "divisor"]),
        ({"num_trainers": 4, "trainer_ep": 3}, ["--trainer-ep 3", "--num-trainers 4"]),
        (
            {"num_trainers": 2, "trainer_tp": 2, "trainer_ep": 2},
            ["--trainer-tp", "--trainer-ep", "one of them"],
        ),
        ({"optimizer": "muon"}, ["--optimizer muon", "dion", "adamw"]),
    ],
)
def test_a_trainer_that_cannot_be_spread_so_is_refused(flags, parts):
    with pytest.raises(checks.FlagError) as caught:
        checks.check_parallel(ParallelFlags(**flags))
    assert all(part in str(caught.value) for part in parts)


def layout(model: str, **flags) -> str:
    """What --packing becomes."""
    parallel = ParallelFlags(**flags)
    checks.check_layout(model, parallel)
    return parallel.packing


def test_router_replay_is_for_mixtures_of_experts_whose_engine_records_them(tmp_path, monkeypatch):
    dense, sparse = make_tiny(tmp_path / "dense"), make_tiny(tmp_path / "moe", moe=True, tied=False)

    def check(model: str, asked: str, **flags) -> None:
        checks.check_layout(model, ParallelFlags(**flags), EngineFlags(router_replay=asked))

    said = "--router-replay on: needs a text model with experts, no --compile, and GPUs"
    for plugin in (False, True):
        if plugin:  # what makes vLLM record experts on a CPU
            monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts" / "cpu_routes"))
        for model, flags in ((dense, {}), (sparse, {"compile": True}), (sparse, {})):
            check(model, "off", **flags)
            if plugin and model == sparse and not flags:
                check(model, "on")
                continue
            with pytest.raises(checks.FlagError, match=said):
                check(model, "on", **flags)


ENGINES = [
    ("dense", {"quantization": "fp8"}, {}, "--quantization fp8: .*not float32; use --rollout-dtype bfloat16"),
    (
        "moe",
        {"quantization": "fp8", "rollout_dtype": "bfloat16"},
        {},
        "fp8: a CPU has no FP8 experts; use none",
    ),
    ("dense", {"quantization": "fp8"}, {"lora_rank": 8}, "--quantization fp8: not tried with --lora-rank"),
    ("vlm", {"quantization": "fp8"}, {}, "--quantization fp8: not tried with .* images"),
    (
        "dense",
        {"speculative_tokens": 3},
        {"lora_rank": 8},
        "--speculative-tokens 3: not tried with --lora-rank",
    ),
    ("vlm", {"speculative_tokens": 3}, {}, "--speculative-tokens 3: not tried with .* images"),
    ("dense", {"speculative_tokens": 3, "speculative_model": "mtp"}, {}, "no heads that guess; use ngram"),
    ("dense", {"speculative_tokens": 3, "speculative_model": "no/where"}, {}, "--speculative-model no/where"),
    (
        "dense",
        {"engine_ep": True, "engine_tp": 2},
        {},
        "--engine-ep: needs experts, .* leave it out",
    ),
    ("moe", {"engine_ep": True, "engine_tp": 2}, {}, "--engine-ep: needs .* GPUs .* leave it out"),
]


@pytest.mark.parametrize("model, engine, flags, said", ENGINES)
def test_an_engine_that_cannot_sample_so_is_refused(model, engine, flags, said, tmp_path):
    if model == "vlm":
        path = save_vlm(*random_tiny_vlm(seed=0), tmp_path / model)
    else:
        path = make_tiny(tmp_path / model, moe=model == "moe", tied=model == "dense")
    with pytest.raises(checks.FlagError, match=said):
        checks.check_layout(path, ParallelFlags(**flags), EngineFlags(**engine))


def test_an_engine_that_can_sample_so_is_not(tmp_path, monkeypatch):
    dense, sparse = make_tiny(tmp_path / "dense"), make_tiny(tmp_path / "moe", moe=True, tied=False)
    for guesser in ("ngram", dense):
        engine = EngineFlags(speculative_tokens=3, speculative_model=guesser)
        checks.check_layout(dense, ParallelFlags(), engine)
    fp8 = EngineFlags(quantization="fp8", rollout_dtype="bfloat16")
    checks.check_layout(dense, ParallelFlags(), fp8)
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # so there may be GPUs
    checks.check_layout(sparse, ParallelFlags(), EngineFlags(engine_ep=True, engine_tp=2, quantization="fp8"))
    with pytest.raises(checks.FlagError, match="--engine-ep: needs .* --engine-tp; leave it out"):
        checks.check_layout(sparse, ParallelFlags(), EngineFlags(engine_ep=True))
    checks.check_layout(
        dense, ParallelFlags(lora_rank=8), EngineFlags(speculative_model="mtp")
    )  # without use


def test_packing_is_refused_for_models_whose_rows_it_would_mix(tmp_path):
    dense, sparse = make_tiny(tmp_path / "dense"), make_tiny(tmp_path / "moe", moe=True, tied=False)
    assert layout(dense, packing="on") == "on" and layout(dense, packing="off") == "off"
    assert layout(dense) == "off", "without a GPU"
    assert layout(sparse) == layout(sparse, packing="off") == "off"
    with pytest.raises(checks.FlagError, match="--packing on: .* mixture of experts; use --packing off"):
        layout(sparse, packing="on")
    config = json.loads(Path(dense, "config.json").read_text())
    for key, value in (("conv_L_cache", 3), ("attn_logit_softcapping", 50.0), ("layer_types", ["conv"] * 2)):
        Path(dense, "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(checks.FlagError, match="use --packing off"):
            layout(dense, packing="on")


def test_experts_that_are_not_there_cannot_be_spread(tmp_path):
    dense, sparse = make_tiny(tmp_path / "dense"), make_tiny(tmp_path / "moe", moe=True, tied=False)
    assert layout(sparse, num_trainers=2, trainer_ep=2) == "off"
    with pytest.raises(checks.FlagError, match="--trainer-ep 2: .* has no experts; use 1"):
        layout(dense, num_trainers=2, trainer_ep=2)


@pytest.mark.parametrize(
    "change", [{"logits_scaling": 8.0}, {"logit_scale": 0.06}, {"final_logit_softcapping": 30.0}]
)
def test_a_model_that_changes_its_logits_after_the_head_is_refused(change, tmp_path):
    path = make_tiny(tmp_path / "model")
    config = json.loads(Path(path, "config.json").read_text())
    neutral = {"logits_scaling": 1.0, "logit_scale": None, "final_logit_softcapping": None}
    Path(path, "config.json").write_text(json.dumps(config | neutral))
    assert layout(path) == "off"
    Path(path, "config.json").write_text(json.dumps(config | neutral | change))
    with pytest.raises(checks.FlagError, match=rf"--model .*after the head \({next(iter(change))}\)"):
        layout(path)
