"""The simulator of the queue beside arithmetic, and beside the real SampleQueue on a clock that jumps."""

import asyncio
import importlib.util
import selectors
import sys
from pathlib import Path

import numpy as np
import pytest

from common.sample_queue import QueueClosed, SampleQueue

PATH = Path(__file__).parents[1] / "scripts" / "bench" / "queue_simulation.py"
spec = importlib.util.spec_from_file_location("queue_simulation", PATH)
queue_simulation = importlib.util.module_from_spec(spec)
sys.modules["queue_simulation"] = queue_simulation
spec.loader.exec_module(queue_simulation)
simulate, measures = queue_simulation.simulate, queue_simulation.measures


def even(bound: int, order: str, group_s=1.0, train_s=1.0, in_flight=4, steps=50) -> dict:
    sizes = {"prompts_per_step": 4, "in_flight": in_flight, "steps": steps}
    return measures(
        simulate(lambda k: group_s, lambda s: train_s, bound=bound, order=order, **sizes), bound, 2
    )


@pytest.mark.parametrize("order", ["arrival", "ticket"])
def test_even_rollouts_by_hand(order):
    # bound 0: a second of rollout, then three of training, in turn; 4 groups x 2 rollouts in 4 seconds
    found = even(0, order, train_s=3.0)
    assert found == pytest.approx(
        {"idle": 0.25, "lag_mean": 0, "lag_max": 0, "late": 0, "rollouts_per_s": 2.0}
    )
    # bound 1: all of the rollout is hidden behind the training
    found = even(1, order, train_s=3.0)
    assert found == pytest.approx(
        {"idle": 0, "lag_mean": 1, "lag_max": 1, "late": 0, "rollouts_per_s": 8 / 3}
    )
    # two slots for four groups, so rollout takes two seconds a step, and training one: it waits half the time
    found = even(8, order, in_flight=2)
    assert found["idle"] == pytest.approx(0.5) and found["rollouts_per_s"] == pytest.approx(4.0)


def test_a_straggler_holds_ticket_order_up_and_is_late_in_arrival_order():
    # group 0 takes 10 s, the others 1; bound 2, training takes 2 s
    group_s = lambda k: 10.0 if k == 0 else 1.0  # noqa: E731
    sizes = {"prompts_per_step": 2, "in_flight": 2, "bound": 2, "steps": 12}
    by_ticket = simulate(group_s, lambda s: 2.0, order="ticket", **sizes)
    assert by_ticket[0]["wait_s"] == 10.0 and by_ticket[0]["tickets"] == [0, 1]
    assert max(max(step["lags"]) for step in by_ticket) <= 2
    by_arrival = simulate(group_s, lambda s: 2.0, order="arrival", **sizes)
    assert by_arrival[0]["tickets"] == [1, 2] and by_arrival[0]["wait_s"] == 2.0  # one slot is left: 1 s each
    (at,) = [number for number, step in enumerate(by_arrival) if 0 in step["tickets"]]
    assert by_arrival[at]["lags"][0] == at > 2  # sampled by version 0


def test_littles_law_holds():
    # groups that run at a time = groups a second x seconds of a group
    longest = queue_simulation.draw("lognormal", 1.0, np.random.default_rng(0), (40_000, 2)).max(1)
    sizes = {"prompts_per_step": 16, "in_flight": 48, "bound": 4, "order": "arrival", "steps": 2000}
    at_a_time = []
    for train_s in (0.1, 1.0):
        log = simulate(lambda k: longest[k], lambda s: train_s, **sizes)
        tickets = [ticket for step in log for ticket in step["tickets"]]
        at_a_time.append(len(tickets) / log[-1]["end"] * longest[tickets].mean())
    assert at_a_time[0] == pytest.approx(48, rel=0.02), "rollout is the slower side: all slots are busy"
    assert at_a_time[1] == pytest.approx(16 * longest.mean(), rel=0.02) and at_a_time[1] < 40  # training is


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer as soon as nothing else is to do."""

    def __init__(self):
        loop = self
        self.now = 0.0

        class Selector(selectors.SelectSelector):
            def select(self, timeout=None):
                loop.now += timeout or 0.0
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.now


async def real_queue(longest, train_s, *, prompts_per_step, in_flight, bound, order, steps) -> list[dict]:
    """The same run with the real queue: what each step trained, with the lags of its groups, and its wait."""
    queue = SampleQueue(prompts_per_step, bound, order)
    clock, log = asyncio.get_running_loop(), []
    await queue.set_version(0)

    async def produce() -> None:
        while True:
            ticket = await queue.next_ticket()
            version = queue.version
            await asyncio.sleep(longest[ticket])
            await queue.put(ticket, version, version)

    producers = [asyncio.ensure_future(produce()) for _ in range(in_flight)]
    for step in range(steps):
        start = clock.time()
        groups, _, _ = await queue.get(step)
        log.append({"tickets": [ticket for ticket, _ in groups], "lags": [step - v for _, v in groups]})
        log[-1] |= {"wait_s": clock.time() - start}
        await asyncio.sleep(train_s + 0.1 * (step % 3))
        log[-1] |= {"end": clock.time()}
        await queue.set_version(step + 1)
    await queue.close("the end")
    ends = await asyncio.gather(*producers, return_exceptions=True)
    assert all(isinstance(end, QueueClosed) for end in ends), ends
    return log


@pytest.mark.parametrize("order", ["arrival", "ticket"])
@pytest.mark.parametrize("kind", ["lognormal", "straggler"])
@pytest.mark.parametrize("bound, in_flight", [(0, 8), (1, 4), (2, 8), (4, 8), (8, 24)])
def test_the_simulator_trains_what_the_real_queue_trains_at_the_same_times(kind, order, bound, in_flight):
    longest = queue_simulation.draw(kind, 1.0, np.random.default_rng(bound), (2000, 2)).max(1)
    how = {"prompts_per_step": 8, "in_flight": in_flight, "bound": bound, "order": order, "steps": 60}
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        real = runner.run(real_queue(longest, 1.5, **how))
    simulated = simulate(lambda k: longest[k], lambda s: 1.5 + 0.1 * (s % 3), **how)
    assert [step["tickets"] for step in simulated] == [step["tickets"] for step in real]
    assert [step["lags"] for step in simulated] == [step["lags"] for step in real]
    for key in ("wait_s", "end"):
        assert [step[key] for step in simulated] == pytest.approx([step[key] for step in real], abs=1e-6)
