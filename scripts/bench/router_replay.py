"""What router replay (R3) costs, and what it does to a run of a mixture of experts.

    python scripts/bench/router_replay.py cost                          bytes and tokens/s, with and without
    python scripts/bench/router_replay.py runs                          curves: 3 seeds with and without
    python scripts/bench/router_replay.py runs --model moe32 --out docs/router_replay_gpu \
        --flags --num-engines 2 --num-trainers 2 --trainer-ep 2         two GPUs, experts over both

tiny-moe: 2 layers, 16 experts, 2 a token. moe32: 8 layers, 32 experts, 4 a token, 0.4B parameters, warmed up as
the tiny one is. The engine is in bf16; on a CPU, where scripts/cpu_routes makes vLLM record experts, the trainer
is in fp32. Runs that are done are not repeated (runs/router_replay/).
"""

import asyncio
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "cpu_routes")]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
SHOWN = ("mismatch/abs_mean", "mismatch/k3", "mismatch/abs_max", "mismatch/crossed_abs_mean", "is/ess")
SHOWN += ("moe/route_mismatch", "moe/load_entropy", "moe/max_load", "perf/rollout_tokens_per_s", "time/train")


@dataclass
class Args:
    what: Annotated[Literal["cost", "runs"], tyro.conf.Positional]
    model: str = "tiny-moe"
    """tiny-moe, moe32, or as in algos/grpo.py."""
    seeds: tuple[int, ...] = (1, 2, 3)
    steps: int = 120
    """Of a run."""
    lr: float = 1e-3
    out: str = "docs/router_replay"
    """Of runs: the result, .json and .png."""
    rounds: int = 5
    """Of cost: of each kind, in turns; the median counts."""
    flags: Annotated[tuple[str, ...], tyro.conf.arg(metavar="...")] = field(default_factory=tuple)
    """Further flags of algos/grpo.py."""


def config32(tokenizer):
    """The configuration of moe32."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=1024, intermediate_size=2048, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, max_position_embeddings=2048,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, num_experts=32,
        num_experts_per_tok=4, moe_intermediate_size=512, norm_topk_prob=True,
    )  # fmt: skip


def build_moe32(directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from common import models

    tokenizer = models.char_tokenizer()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config32(tokenizer), dtype=torch.float32)
    models.warm_up(model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer, lr=3e-4)
    models.save(model.cpu(), tokenizer, directory)


def resolve(name: str) -> str:
    from common import models

    if name == "moe32":
        return models.cached(name, [config32, build_moe32, models.warm_up], build_moe32)
    return models.resolve_model(name)


# --- Runs


def run(args: Args, path: str, replay: str, seed: int) -> list[dict]:
    folder = ROOT / "runs" / "router_replay" / f"{args.model.replace('/', '_')}-{replay}-{seed}"
    if not (folder / "summary.json").exists():
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        command = [
            sys.executable,
            "-m",
            "algos.grpo",
            "--model",
            path,
            "--env",
            "reverse",
            "--lr",
            str(args.lr),
        ]
        command += ["--max-steps", str(args.steps), "--seed", str(seed), "--rollout-dtype", "bfloat16"]
        command += ["--router-replay", replay, "--output-dir", str(folder), *args.flags]
        subprocess.run(command, cwd=ROOT, check=True, timeout=3600, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def runs(args: Args) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path, result = resolve(args.model), {}
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), dpi=130)
    for color, replay in (("C0", "on"), ("C1", "off")):
        rows = {seed: run(args, path, replay, seed) for seed in args.seeds}
        scores = {}
        for seed, each in rows.items():
            points = [(row["step"], row["eval/reverse/mean"]) for row in each if "eval/reverse/mean" in row]
            scores[seed] = [*points, (len(each), each[-1]["eval_end/reverse/mean"])]
            axes[0].plot(*zip(*scores[seed]), color=color, label=f"replay {replay}" * (seed == args.seeds[0]))
            for axis, name in zip(axes[1:], ("mismatch/k3", "reward/mean")):
                axis.plot([row[name] for row in each], color=color, linewidth=0.7)
        means = {}
        for name in SHOWN:
            values = [row[name] for each in rows.values() for row in each if row.get(name) is not None]
            means |= {name: statistics.mean(values)} if values else {}
        first = {name: statistics.mean(each[0][name] for each in rows.values()) for name in SHOWN[:3]}
        result[replay] = {"score": scores, "mean over steps": means, "step 0, equal weights": first}
        print(
            f"replay {replay}: score {[scores[seed][-1][1] for seed in args.seeds]}, step 0 {first}, {means}"
        )
    for axis, name in zip(axes, ("greedy exact", "k3 of engine and trainer", "mean reward")):
        axis.set(xlabel="step", ylabel=name)
    axes[1].set_yscale("log")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(ROOT / f"{args.out}.png")
    (ROOT / f"{args.out}.json").write_text(json.dumps(result, indent=1) + "\n")


# --- Cost


async def engine_rate(path: str, replay: str, on_gpu: bool, rounds: int) -> tuple[list[float], float]:
    """Tokens/s of each round, and the bytes of routes for a token that was read."""
    from common.rollout import Engine, EngineFlags

    engine = Engine(path, "bfloat16", 0, EngineFlags(router_replay=replay), gpus=0.4 * on_gpu)
    await engine.start([2])
    engine.make_sampling = functools.partial(engine.make_sampling, ignore_eos=True)
    engine.stop_token_ids, rates, size = [], [], 0.0
    for number in range(rounds + 1):
        start, before = time.perf_counter(), engine.sampled_tokens
        prompts = [[5 + number, 6 + index, 7, 8, 9, 10, 11, 12] for index in range(64)]
        groups = await asyncio.gather(*(engine.generate(ids, 8, 1.0, 64) for ids in prompts))
        rates += [(engine.sampled_tokens - before) / (time.perf_counter() - start)] * (number > 0)
        if replay == "on":
            size = groups[0][0].routes.nbytes / len(groups[0][0].routes)
    engine.llm.shutdown()
    engine.llm = None
    return rates, size


def trainer_rates(path: str, on_gpu: bool, rounds: int) -> dict[str, list[float]]:
    """Tokens/s of forward and backward on one rank, with and without routes, in turns."""
    import torch

    from common.logprobs import LogprobHead
    from common.parallel import build_model, join_world, make_optimizer, ParallelFlags
    from common.refit import open_store

    device = torch.device("cuda" if on_gpu else "cpu")
    join_world(0, 1, open_store("127.0.0.1", 60), device, 600)
    model = build_model(path, device)
    make_optimizer(model, 0.0, ParallelFlags())
    head, config = LogprobHead(model), model.config
    ids = torch.randint(5, 100, (64, 129), device=device)
    lengths, shape = torch.full((64,), 128), (*ids.shape, config.num_hidden_layers, config.num_experts)
    routes = torch.rand(shape).argsort(-1)[..., : config.num_experts_per_tok].to(torch.uint8).to(device)
    rates: dict[str, list[float]] = {"off": [], "on": []}
    for number in range(rounds + 1):
        for kind, given in (("off", None), ("on", routes)):
            start = time.perf_counter()
            for _ in range(3):
                head(model, ids[:, :-1], ids[:, 1:], 1.0, lengths, given)[0].sum().backward()
            if on_gpu:
                torch.cuda.synchronize()
            rates[kind] += [3 * 64 * 128 / (time.perf_counter() - start)] * (number > 0)
    return rates


def cost(args: Args) -> None:
    import torch

    path, on_gpu = resolve(args.model), torch.cuda.is_available()
    for replay in ("off", "on", "off", "on"):
        rates, size = asyncio.run(engine_rate(path, replay, on_gpu, args.rounds))
        print(f"engine, replay {replay}: {statistics.median(rates):.0f} tokens/s, {size:.0f} bytes a token")
    for kind, values in trainer_rates(path, on_gpu, args.rounds).items():
        print(f"trainer, replay {kind}: {statistics.median(values):.0f} tokens/s")


if __name__ == "__main__":
    given = sys.argv[1:]
    split = given.index("--flags") if "--flags" in given else len(given)
    parsed = tyro.cli(Args, args=given[:split])
    parsed = dataclasses.replace(parsed, flags=tuple(given[split + 1 :]))
    runs(parsed) if parsed.what == "runs" else cost(parsed)
