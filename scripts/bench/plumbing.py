"""Samples per second through the queue alone: a fake engine and a fake trainer, real Ray, real records.

    .venv/bin/python scripts/bench/plumbing.py

Groups of 8 rollouts with 2,000 tokens each go from an actor through `SampleQueue` to this process and are
unpacked. Beside it, in turns: the same bytes through a `multiprocessing.Queue`, and returned by a bare Ray
call.
"""

import asyncio
import multiprocessing
import pickle
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import common  # noqa: E402, F401  sets Ray's authentication before Ray is imported

import ray  # noqa: E402

from common.sample import Rollout, Segment  # noqa: E402
from common.sample_queue import SampleQueue, pack_group, unpack_group  # noqa: E402

GROUP, TOKENS, GROUPS_PER_STEP, STEPS, ROUNDS, SLOTS = 8, 2000, 16, 60, 3, 16


def make_group(ticket: int) -> list[Rollout]:
    def segment() -> Segment:
        mask = np.arange(TOKENS) >= 100
        return Segment(
            np.arange(TOKENS, dtype=np.int32), mask, np.where(mask, -0.5, 0).astype(np.float32),
            np.where(mask, 0, -1).astype(np.int32), [TOKENS], "stop",
        )  # fmt: skip

    return [Rollout(f"{ticket}.{i}", f"g{ticket}", ticket, "p", [segment()], [1.0]) for i in range(GROUP)]


class FakeEngine:
    def __init__(self):
        self.group = make_group(0)

    async def produce(self, queue) -> None:
        async def slot() -> None:
            ticket = await queue.next_ticket.remote()
            while True:
                ticket = await queue.put_and_next.remote(ticket, *pack_group(self.group))

        await asyncio.gather(*(slot() for _ in range(SLOTS)))

    async def group_bytes(self) -> bytes:
        return pickle.dumps(self.group, protocol=5)


def through_the_queue() -> float:
    queue = ray.remote(SampleQueue).options(num_cpus=0, max_concurrency=1000)
    queue = queue.remote(GROUPS_PER_STEP, 2, "arrival")
    engine = ray.remote(FakeEngine).options(num_cpus=0).remote()
    ray.get(queue.set_version.remote(0))
    running = engine.produce.remote(queue)
    start = None
    for step in range(STEPS + 2):
        batch, _, _ = ray.get(queue.get.remote(step))
        rollouts = [rollout for _, packed in batch for rollout in unpack_group(packed)]
        assert len(rollouts) == GROUPS_PER_STEP * GROUP
        if step == 1:
            start = time.perf_counter()  # the first two are start-up
        ray.get(queue.set_version.remote(step + 1))
    seconds = time.perf_counter() - start
    for actor in (engine, queue):
        ray.kill(actor)
    del running
    return STEPS * GROUPS_PER_STEP * GROUP / seconds


def by_bare_calls() -> float:
    engine = ray.remote(FakeEngine).options(num_cpus=0).remote()
    ray.get(engine.group_bytes.remote())
    count, start = STEPS * GROUPS_PER_STEP, time.perf_counter()
    for _ in range(count // SLOTS):
        for data in ray.get([engine.group_bytes.remote() for _ in range(SLOTS)]):
            pickle.loads(data)
    seconds = time.perf_counter() - start
    ray.kill(engine)
    return count * GROUP / seconds


def fill(queue, count: int) -> None:
    group = make_group(0)
    for _ in range(count):
        queue.put(pickle.dumps(group, protocol=5))


def through_multiprocessing() -> float:
    count, queue = STEPS * GROUPS_PER_STEP, multiprocessing.get_context("spawn").Queue(SLOTS)
    process = multiprocessing.get_context("spawn").Process(target=fill, args=(queue, count))
    process.start()
    pickle.loads(queue.get())
    start = time.perf_counter()
    for _ in range(count - 1):
        pickle.loads(queue.get())
    seconds = time.perf_counter() - start
    process.join()
    return (count - 1) * GROUP / seconds


def main() -> None:
    from common import cluster

    with cluster.Run(0):
        ray.init(
            include_dashboard=False, logging_level="ERROR", log_to_driver=False, num_cpus=4,
            _node_ip_address=cluster.LOOPBACK, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )  # fmt: skip
        kinds = {
            "SampleQueue": through_the_queue,
            "bare Ray calls": by_bare_calls,
            "multiprocessing": through_multiprocessing,
        }
        rates = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for name, kind in kinds.items():
                rates[name].append(kind())
    print(f"groups of {GROUP} rollouts x {TOKENS} tokens, {SLOTS} in flight")
    for name, values in rates.items():
        print(f"{name:16} samples/s: {statistics.median(values):8.0f}   {[round(v) for v in values]}")


if __name__ == "__main__":
    main()
