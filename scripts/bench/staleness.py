"""What staleness costs and buys on the toy task, measured, with the simulator's prediction beside it.

    .venv/bin/python scripts/bench/staleness.py bounds    bound x order x durations: docs/staleness.{json,png}
    .venv/bin/python scripts/bench/staleness.py stress    each correction: docs/corrections.{json,png}

One engine and one trainer (the classes of algos/grpo.py) serve all settings in turn: weights and optimizer
start again at each, and the queue is a new one. `bounds`: every setting gets the same seconds; answers are
graded by a tool that is slow in three ways, whose mean is such that the longest of a group takes 0.15 s on
average. The simulator draws the seconds of steps, and what groups take beyond their tool, from the measured
ones. `stress`: bound 8, 4 minibatches at the learning rate of one, so far off-policy; three seeds for each
correction, the same number of steps.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import matplotlib
import numpy as np
import ray

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]
os.environ.setdefault("INSTAR_SLOW_TOOL", f"{tempfile.gettempdir()}/slow_tool_{os.getpid()}.json")
os.environ["RAY_worker_niceness"] = "0"  # beside other programs, engine and trainer are not to come last
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # of the actors, whose classes are here
import queue_simulation
from queue_simulation import BOUNDS, ORDERS

from algos import grpo
from common import checks, cluster
from common.checkpoint import load_weights
from common.logger import Logger
from common.metrics import training_metrics
from common.models import resolve_model
from common.sample_queue import QueueClosed, SampleQueue, unpack_group

DURATIONS = ("even", "lognormal", "straggler")
SECONDS, LONGEST_S = 8.0, 0.15  # of a setting; of the longest tool call of a group, on average
CORRECTIONS, SEEDS, STRESS_STEPS = ("none", "tis", "icepop", "clip", "seq-mask", "kl-gate"), (1, 2, 3), 80
STRESS = {"bound": 8, "order": "arrival", "minibatches": 4, "lr": 1e-3}


class Worker(grpo.RolloutWorker):
    async def restart(self, seed: int) -> None:
        self.args.seed, self.epoch, self.overheads = seed, None, []

    async def produce(self, queue) -> None:
        """Until the queue is closed, and everything in flight has come to its end."""
        groups = [self.produce_groups(queue) for _ in range(self.args.engine.max_in_flight)]
        ends = await asyncio.gather(*groups, return_exceptions=True)
        for end in ends:
            if not isinstance(end, QueueClosed):
                raise end

    async def produce_group(self, ticket: int):
        start = time.monotonic()
        group, drop = await super().produce_group(ticket)
        slept = max(rollout.info.get("slept", 0.0) for rollout in group)
        self.overheads.append(time.monotonic() - start - slept)
        return group, drop

    async def overhead_s(self) -> list[float]:
        return self.overheads[2 * self.args.engine.max_in_flight :] or self.overheads  # after the start


class Trainer(grpo.Trainer):
    def restart(self, weights: str, correction: str, lr: float) -> None:
        self.args.correction, self.args.correction_cap = correction, checks.correction_cap(correction, None)
        self.args.lr, self.args.lr_end_ratio, self.trained = lr, 1.0, 0
        load_weights(weights, self.model, self.rank)
        self.optimizer.state.clear()


class Bench:
    def __init__(self, args: grpo.Args, log: Logger, run: cluster.Run):
        self.args, self.version, self.queues, self.run = args, 0, [], run
        self.weights, new = resolve_model(args.model), {"step": 0, "queue": None, "rollouts": []}
        grpo.start_run(args, log, Worker, Trainer, None, new, run)

    def setting(
        self, *, bound: int, order: str, seed=1, correction="tis", kind="even", mean_s=0.0, minibatches=1,
        lr=1e-3, seconds=1e9, steps=10**9,
    ) -> dict:  # fmt: skip
        """Trains from the start for so many seconds or steps. Returns what it measured."""
        run, args, self.version = self.run, self.args, self.version + 1
        args.seed, args.minibatches = seed, minibatches
        Path(os.environ["INSTAR_SLOW_TOOL"]).write_text(json.dumps({"kind": kind, "mean_s": mean_s}))
        plan = (args.prompts_per_step, bound, order, self.version)
        (run.queue,) = run.spawn("queue", SampleQueue, [plan], [{"max_concurrency": 10_000}])
        self.queues.append(run.queue)  # the last one may still be watched
        if len(self.queues) > 2:
            ray.kill(self.queues.pop(0))
        restarts = run.ask(run.workers, "restart", seed)
        run.get(restarts + run.ask(run.trainers, "restart", self.weights, correction, lr), "restart")
        grpo.refit(run, self.version, 60)
        producing = run.workers[0].produce.remote(run.queue)
        first, rows, lags, start = self.version, [], [], time.monotonic()
        while time.monotonic() - start < seconds and self.version < first + steps:
            began, step = time.monotonic(), self.version
            batch, _, _ = run.get(run.queue.get.remote(step), f"rollouts of step {step}", 120)
            got = time.monotonic()
            rollouts = [rollout for _, packed in batch for rollout in unpack_group(packed, run.get)]
            step_lags, _ = grpo.mark_late(rollouts, step, bound, "keep")
            lags.append(step_lags)
            shares = grpo.make_minibatches(grpo.make_rows(rollouts, args)[0], args, step - first)
            trained = run.get(run.ask_each(run.trainers, "train_step", shares, None), "training")
            grpo.refit(run, step + 1, 60)
            self.version += 1
            valid = [rollout.reward for rollout in rollouts if not rollout.invalid]
            row = {"wait_s": got - began, "work_s": time.monotonic() - got, "reward": float(np.mean(valid))}
            metrics = training_metrics(trained)
            keys = (
                "grad_norm",
                "is/ess",
                "is/max_weight",
                "is/dropped_frac",
                "mismatch/abs_mean",
                "loss/entropy",
            )
            rows.append(row | {key: metrics[key] for key in keys if key in metrics})
        took = time.monotonic() - start
        run.get(run.queue.close.remote("the next setting"), "closing")
        ray.get(producing, timeout=120)
        (scores,) = run.get(run.ask(run.workers, "evaluate"), "evaluation")
        (overhead_s,) = run.get(run.ask(run.workers, "overhead_s"), "overhead")
        counted, every = rows[len(rows) // 10 :], np.concatenate(lags[len(rows) // 10 :])
        seconds_counted = sum(row["wait_s"] + row["work_s"] for row in counted)
        rollouts = args.prompts_per_step * args.group_size * len(counted)
        return {
            "load": os.getloadavg()[0], "steps": len(rows), "seconds": took,
            "score": float(np.mean([greedy for greedy, *_ in scores])),
            "idle": sum(row["wait_s"] for row in counted) / seconds_counted,
            "lag_mean": float(every.mean()), "lag_max": int(every.max()),
            "late": float((every > bound).mean()),
            "rollouts_per_s": rollouts / seconds_counted, "overhead_s": overhead_s,
            "work_s": [row["work_s"] for row in counted], "rows": rows,
        }  # fmt: skip


def predict(measured: dict, args: grpo.Args, kind: str, mean_s: float, bound: int, order: str) -> dict:
    """The simulator on steps and groups that take what some of the measured ones took; the mean of five."""
    P, G, results = args.prompts_per_step, args.group_size, []
    for seed in range(5):
        rng, groups = np.random.default_rng(seed), P * (measured["steps"] + bound + 3)
        group_s = queue_simulation.draw(kind, mean_s, rng, (groups, G)).max(1)
        group_s += rng.choice(measured["overhead_s"], groups)
        step_s = rng.choice(measured["work_s"], measured["steps"])
        log = queue_simulation.simulate(
            group_s.__getitem__, step_s.__getitem__, prompts_per_step=P,
            in_flight=args.engine.max_in_flight, bound=bound, order=order, steps=measured["steps"],
        )  # fmt: skip
        results.append(queue_simulation.measures(log, bound, G))
    return {key: float(np.mean([result[key] for result in results])) for key in results[0]}


def bounds(bench: Bench) -> None:
    results = []
    bench.setting(bound=2, order="arrival", kind="even", mean_s=LONGEST_S, seconds=3.0)  # warms all up
    print("| durations | order | bound | trainer waits | (simulated) | rollouts/s | (simulated) | lag, mean |"
          " (simulated) | max | late tokens | score |\n|" + "---|" * 12)  # fmt: skip
    for kind in DURATIONS:
        mean_s = LONGEST_S / queue_simulation.group_mean(kind, 1.0, bench.args.group_size)
        for order in ORDERS:
            for bound in BOUNDS:
                found = bench.setting(bound=bound, order=order, kind=kind, mean_s=mean_s, seconds=SECONDS)
                found.pop("rows")
                told = predict(found, bench.args, kind, mean_s, bound, order)
                found |= {key: float(np.mean(found[key])) for key in ("work_s", "overhead_s")}
                results.append(
                    {"durations": kind, "order": order, "bound": bound} | found | {"simulated": told}
                )
                cells = [kind, order, bound, f"{found['idle']:.0%}", f"{told['idle']:.0%}"]
                cells += [f"{found['rollouts_per_s']:.0f}", f"{told['rollouts_per_s']:.0f}"]
                cells += [f"{found['lag_mean']:.2f}", f"{told['lag_mean']:.2f}", found["lag_max"]]
                cells += [f"{found['late']:.1%}", f"{found['score']:.2f}"]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
                (ROOT / "docs" / "staleness.json").write_text(json.dumps(results, indent=1) + "\n")
    draw_bounds(results)


def draw_bounds(results: list[dict]) -> None:
    kinds = [kind for kind in DURATIONS if any(each["durations"] == kind for each in results)]
    rows = {"rollouts_per_s": "rollouts a second", "idle": "trainer waits", "lag_mean": "lag, mean"}
    rows |= {"lag_max": "lag, max", "late": "late tokens", "score": f"greedy exact after {SECONDS:.0f} s"}
    size = {"figsize": (3.6 * len(kinds), 14), "dpi": 110, "layout": "constrained"}
    figure, axes = plt.subplots(len(rows), len(kinds), sharex=True, sharey="row", squeeze=False, **size)
    for column, kind in enumerate(kinds):
        axes[0][column].set_title(kind)
        for line, (key, label) in enumerate(rows.items()):
            axis = axes[line][column]
            for color, order in zip(("C0", "C1"), ORDERS):
                own = [each for each in results if (each["durations"], each["order"]) == (kind, order)]
                at = [BOUNDS.index(each["bound"]) for each in own]
                axis.plot(at, [each[key] for each in own], f"{color}o-", label=f"{order}, measured")
                if key != "score":
                    told = [each["simulated"][key] for each in own]
                    axis.plot(at, told, f"{color}x--", alpha=0.6, label=f"{order}, simulated")
            axis.grid(alpha=0.3)
            axis.set_xticks(range(len(BOUNDS)), BOUNDS)
            if column == 0:
                axis.set_ylabel(label)
        axes[-1][column].set_xlabel("--max-staleness")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(ROOT / "docs" / "staleness.png")


def stress(bench: Bench) -> None:
    told = {}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), dpi=110, layout="constrained")
    print("| correction | greedy exact at the end | reward, last 10 steps | dropped | largest weight | lag |")
    print("|---|---|---|---|---|---|", flush=True)
    for color, correction in enumerate(CORRECTIONS):
        runs = [
            bench.setting(**STRESS, seed=seed, correction=correction, steps=STRESS_STEPS) for seed in SEEDS
        ]
        last = [np.mean([row["reward"] for row in run["rows"][-10:]]) for run in runs]
        dropped = np.mean([row["is/dropped_frac"] for run in runs for row in run["rows"]])
        heaviest = max(row["is/max_weight"] for run in runs for row in run["rows"])
        cells = [correction, ", ".join(f"{run['score']:.2f}" for run in runs)]
        cells += [", ".join(f"{value:.2f}" for value in last), f"{dropped:.0%}", f"{heaviest:.3g}"]
        print("| " + " | ".join(cells) + f" | {np.mean([run['lag_mean'] for run in runs]):.1f} |", flush=True)
        for axis, key in ((left, "reward"), (right, "loss/entropy")):
            curves = np.array([[row[key] for row in run["rows"]] for run in runs])
            smooth = np.array([np.convolve(curve, np.ones(5) / 5, "valid") for curve in curves])
            at = np.arange(smooth.shape[1]) + 4
            axis.plot(at, smooth.mean(0), color=f"C{color}", label=correction)
            axis.fill_between(at, smooth.min(0), smooth.max(0), color=f"C{color}", alpha=0.12)
        kept = ("score", "lag_mean", "lag_max", "load")
        told[correction] = [
            {key: run[key] for key in kept}
            | {key: [round(row[key], 4) for row in run["rows"]] for key in ("reward", "loss/entropy")}
            for run in runs
        ]
        (ROOT / "docs" / "corrections.json").write_text(json.dumps(told, indent=1) + "\n")
    left.set(
        xlabel="step", ylabel="reward", title="bound 8, 4 minibatches, lr 1e-3; mean and range of 3 seeds"
    )
    right.set(xlabel="step", ylabel="entropy (nats a token)")
    left.legend(frameon=False, fontsize=8)
    figure.savefig(ROOT / "docs" / "corrections.png")


def main(what: str) -> None:
    args = grpo.Args(env="scripts/examples/slow_tool.py:SlowReverse", prompts_per_step=16, group_size=4)
    args.data.env_workers, args.engine.max_in_flight = 160, 32
    args.debug.eval_only, args.log.tensorboard = True, False
    args.log.output_dir = tempfile.mkdtemp()
    grpo.check_flags(args)
    args.lr = 1e-3
    with Logger(args.log.output_dir, {}, 1, ("reward/mean",)) as log, cluster.Run(1800) as run:
        {"bounds": bounds, "stress": stress}[what](Bench(args, log, run))


if __name__ == "__main__":
    main(sys.argv[1])
