"""Kills processes of one run, again and again, in every phase, and looks at what is left of it.

    python scripts/kill_table.py runs/kills --kills 30 --out docs/kills.json
    python scripts/kill_table.py runs/kills --kills 30 --minutes 10      does a part; the same command goes on

One run of GRPO with --fault-budget is killed in its waits for rollouts, training, refits, saves, start-up and
evaluation: SIGKILL to the driver (then it is started again with --resume), a trainer, a rollout worker or the
engine's own process, drawn by a seed. A kill comes as soon as the run has saved once more than after the one
before. The table has the stall of each (seconds from the kill to the next trained step) and what it cost.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PHASES = {
    "start-up": "start-up", "rollout": "rollouts of", "train": "training step", "refit": "refit to version",
    "save": "saving", "evaluation": "evaluation",
}  # fmt: skip
VICTIMS = {
    "driver": "", "trainer": "ray::Trainer", "worker": "ray::RolloutWorker", "engine": "VLLM::EngineCore"
}  # fmt: skip
FLAGS = ("--save-every", "3", "--eval-every", "4", "--samples-per-step", "0", "--fault-budget", "1000")


def plan(kills: int, seed: int) -> list[tuple[str, str]]:
    """(phase, victim) of each kill: all phases equally often, and within a phase all victims."""
    dice, phases, victims = random.Random(seed), list(PHASES), list(VICTIMS)
    drawn = [(phases[i % len(phases)], victims[(i // len(phases)) % len(victims)]) for i in range(kills)]
    dice.shuffle(drawn)
    return drawn


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(path: Path, event: dict) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(event | {"time": time.time()}) + "\n")


# --- Inside the run


def child(folder: Path, kills: int, seed: int, flags: list[str]) -> None:
    """The run itself, which kills one of its own processes where the plan says so."""
    import psutil

    from algos import grpo
    from common import checks, cluster, logger
    from common.sample_queue import SampleQueue

    events, dice = (folder / "events.jsonl").absolute(), random.Random(time.time())
    get, log_step, init = cluster.Run.get, logger.Logger.log_step, cluster.Run.__init__

    class RecordingQueue(SampleQueue):
        """Which tickets are dropped, and between which checkpoints."""

        async def drop(self, ticket, *why):
            await super().drop(ticket, *why)
            write(events, {"dropped": ticket})

        async def snapshot(self, trained):
            write(events, {"snapshot": trained})
            return await super().snapshot(trained)

    saves = due = 0

    def fire(number: int, phase: str, victim: str, delay_s: float) -> None:
        time.sleep(delay_s)
        processes = psutil.Process().children(recursive=True)
        titles = [(" ".join(process.cmdline()), process) for process in processes]
        chosen = [process for title, process in titles if VICTIMS[victim] and VICTIMS[victim] in title]
        pid = chosen[0].pid if chosen else os.getpid()  # at start-up it may not be there yet
        named = victim if chosen else "driver"
        write(events, {"kill": number, "phase": phase, "victim": named, "delay_s": delay_s})
        os.kill(pid, signal.SIGKILL)

    def watched_get(run, refs, what="a result", timeout_s=None):
        nonlocal saves
        last = int(flags[flags.index("--max-steps") + 1]) - 2
        done = sum("kill" in event for event in read(events))
        if done < kills:
            phase, victim = plan(kills, seed)[done]
            armed = saves >= 1 or phase == "start-up"
            if armed and what.startswith(PHASES[phase]) and not run.ending and due < last:
                saves = -1000  # until the next start
                longest = {"start-up": 8.0, "rollout": 0.05, "evaluation": 0.2}.get(phase, 0.03)
                arguments = (done, phase, victim, dice.random() * longest)
                threading.Thread(target=fire, args=arguments, daemon=True).start()
        result = get(run, refs, what, timeout_s)
        saves += what == "saving"
        return result

    def watched_log_step(log, row):
        nonlocal due
        log_step(log, row)
        due = row["step"] + 1
        write(events, {"step": row["step"]})

    def watched_init(run, *values):
        nonlocal saves
        saves = 0
        init(run, *values)
        write(events, {"start": run.saved})

    cluster.Run.get, cluster.Run.__init__ = watched_get, watched_init
    logger.Logger.log_step, grpo.SampleQueue = watched_log_step, RecordingQueue
    checks.run(grpo.main, checks.parse(grpo.Args, flags))


# --- Outside of it


def table(events: list[dict]) -> list[dict]:
    """For each kill: phase, victim, the step that was due, steps trained again, and the stall in seconds."""
    rows, due, started = [], 0, True
    for event in events:
        if "kill" in event:
            rows.append(event | {"step": due, "stall_s": None, "again": None})
            started = False
        elif "start" in event:
            started = True
        elif "step" in event:  # those before the new start ended while the victim was not missed yet
            for row in rows:
                if started and row["stall_s"] is None:  # several, where the run died again at its start
                    row["stall_s"] = round(event["time"] - row["time"], 1)
                    row["again"] = max(row["step"] - event["step"], 0)
            due = event["step"] + 1
            for row in rows:
                row["step"] = due if row["stall_s"] is None else row["step"]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def dropped(events: list[dict]) -> set[int]:
    """The tickets that were dropped and are not given out again: a start forgets those since its
    checkpoint."""
    tickets, known = [], {}
    for event in events:
        if "dropped" in event:
            tickets.append(event["dropped"])
        elif "snapshot" in event:
            known[event["snapshot"]] = len(tickets)
        elif "start" in event:
            tickets = tickets[: known.get(event["start"], 0)]
    return set(tickets)


def lineage(folder: Path, steps: int) -> dict:
    """Whether every ticket was trained once, or still waits in the last checkpoint, or was dropped."""
    tickets, drops = [], dropped(read(folder / "events.jsonl"))
    for step in range(steps):
        trained = [record["ticket"] for record in read(folder / "dump" / f"step_{step:06}.jsonl")]
        tickets += dict.fromkeys(trained)
    queue = json.loads((folder / "run/checkpoints" / f"step_{steps}" / "progress.json").read_text())["queue"]
    missing = set(range(queue["next_ticket"])) - set(tickets) - set(queue["again"]) - drops
    twice = len(tickets) - len(set(tickets)) + len(set(tickets) & {*queue["again"], *drops})
    return {"trained": len(tickets), "trained_twice": twice, "dropped": len(drops), "lost": len(missing)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1, help="of the plan, and of the run")
    parser.add_argument("--minutes", type=float, default=1e9, help="of this call")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.child:
        return child(args.folder, args.kills, args.seed, [*flags, "--seed", str(args.seed)])
    args.folder.mkdir(parents=True, exist_ok=True)
    run, deadline, code = args.folder / "run", time.monotonic() + 60 * args.minutes, None
    command = [sys.executable, __file__, str(args.folder), "--kills", str(args.kills), "--child"]
    command += ["--seed", str(args.seed), "--max-steps", str(args.steps), *FLAGS, *flags]
    command += ["--output-dir", str(run), "--dump-rollouts", str(args.folder / "dump")]
    while code != 0:
        whole = list(run.glob("checkpoints/step_*[0-9]/trainer"))
        if not whole:
            (run / "metrics.jsonl").unlink(missing_ok=True)  # nothing to go on from: it starts again
        with open(args.folder / "output.txt", "ab") as output:
            more = ["--resume"] if whole else []
            process = subprocess.Popen([*command, *more], cwd=ROOT, stdout=output, stderr=output)
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
        if process.poll() is None:  # it saves, and the next call goes on
            process.terminate()
            process.wait(60)
            break
        code = process.returncode
        if code not in (0, -signal.SIGKILL) and any(run.glob("checkpoints/step_*[0-9]/trainer")):
            sys.exit(f"the run ended with {code}; see {args.folder}/output.txt")
    rows = table(read(args.folder / "events.jsonl"))
    result = {"command": "python scripts/kill_table.py " + " ".join(sys.argv[1:]), "kills": rows}
    stalls = [row["stall_s"] for row in rows if row["stall_s"] is not None]
    result |= {"longest_stall_s": max(stalls, default=None), "finished": code == 0}
    if code == 0:
        summary = json.loads((run / "summary.json").read_text())
        score = {key: value for key, value in summary.items() if key.startswith("eval/")}
        result |= lineage(args.folder, args.steps) | {"score": score}
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
