"""The queue: who may start, what a step trains, and that nothing is lost, repeated, late or stuck."""

import asyncio
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import common.sample_queue
from algos.grpo import mark_late
from common.sample import RecordError, Rollout, Segment
from common.sample_queue import QueueClosed, SampleQueue, pack_group, unpack_group


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def tickets_without_waiting(queue: SampleQueue, most: int = 1000) -> list[int]:
    """All tickets that the queue gives before it makes the caller wait."""
    tickets = []
    while len(tickets) < most:
        task = asyncio.ensure_future(queue.next_ticket())
        await settle()
        if not task.done():
            task.cancel()
            break
        tickets.append(task.result())
    return tickets


async def finish(queue: SampleQueue, tickets, version: int = 0) -> None:
    for ticket in tickets:
        await queue.put(ticket, f"group {ticket}", version)


async def trained(queue: SampleQueue, step: int) -> list[int]:
    groups, _, _ = await asyncio.wait_for(queue.get(step), 5)
    assert all(group in (f"group {ticket}", (f"group {ticket}",)) for ticket, group in groups)
    return [ticket for ticket, _ in groups]


async def progress_of(queue: SampleQueue) -> dict:
    """What a checkpoint would have, with the newest batch trained."""
    progress, _ = await queue.snapshot(10**9)
    return progress


# --- Admission


def test_bound_zero_admits_one_step_at_a_time():
    async def scenario():
        queue = SampleQueue(4, 0, "arrival")
        assert await tickets_without_waiting(queue) == [], "nothing may start before the first refit"
        await queue.set_version(0)
        assert await tickets_without_waiting(queue) == [0, 1, 2, 3]
        await finish(queue, [0, 1, 2, 3])
        assert await trained(queue, 0) == [0, 1, 2, 3]
        assert await tickets_without_waiting(queue) == [], "training makes no room, the new version does"
        await queue.set_version(1)
        assert await tickets_without_waiting(queue) == [4, 5, 6, 7]

    asyncio.run(scenario())


def test_bound_two_admits_two_steps_ahead():
    async def scenario():
        queue = SampleQueue(4, 2, "arrival")
        for version in range(6):
            await queue.set_version(version)
        # ticket 31 belongs to step 7 = 5 + 2, ticket 32 to step 8
        assert await tickets_without_waiting(queue) == list(range(32))

    asyncio.run(scenario())


def test_a_repeated_refit_adds_no_allowance_and_a_version_cannot_jump_or_fall():
    async def scenario():
        queue = SampleQueue(4, 0, "arrival")
        await queue.set_version(0)
        await queue.set_version(0)
        assert await tickets_without_waiting(queue) == [0, 1, 2, 3]
        await queue.set_version(1)
        for version in (0, 3):
            with pytest.raises(RuntimeError, match=f"version 1 cannot become {version}"):
                await queue.set_version(version)

    asyncio.run(scenario())


def test_a_group_from_a_version_that_does_not_exist_is_an_error():
    async def scenario():
        queue = SampleQueue(1, 1, "arrival")
        await queue.set_version(0)
        ticket = await queue.next_ticket()
        with pytest.raises(RecordError, match="ticket 0.*version 1.*newest is 0"):
            await queue.put(ticket, "group", 1)

    asyncio.run(scenario())


def test_a_step_that_starts_before_its_refit_is_an_error():
    async def scenario():
        queue = SampleQueue(1, 1, "arrival")
        await queue.set_version(0)
        with pytest.raises(RuntimeError, match="step 1.*version 0.*refit is missing"):
            await queue.get(1)

    asyncio.run(scenario())


def test_closing_releases_every_waiting_and_every_later_call_with_the_first_reason():
    async def scenario():
        queue = SampleQueue(2, 0, "arrival")
        await queue.set_version(0)
        await tickets_without_waiting(queue)
        calls = queue.next_ticket(), queue.next_ticket(), queue.get(0)
        waiting = [asyncio.ensure_future(call) for call in calls]
        await settle()
        await queue.close("engine 1 died")
        await queue.close("later")
        for call in (*waiting, queue.next_ticket(), queue.get(0)):
            with pytest.raises(QueueClosed, match="engine 1 died"):
                await asyncio.wait_for(call, 5)

    asyncio.run(scenario())


def test_a_group_comes_back_at_once_and_the_next_ticket_when_admission_allows():
    async def scenario():
        queue = SampleQueue(2, 0, "arrival")
        await queue.set_version(0)
        assert await tickets_without_waiting(queue) == [0, 1]
        waiting = [asyncio.ensure_future(queue.put_and_next(ticket, 0, "a", "b")) for ticket in (1, 0)]
        groups, _, _ = await asyncio.wait_for(queue.get(0), 5)
        assert groups == [(0, ("a", "b")), (1, ("a", "b"))]
        await settle()
        assert not any(task.done() for task in waiting) and not queue.running, "step 0 is all handed out"
        await queue.set_version(1)
        assert sorted(await asyncio.gather(*waiting)) == sorted(queue.running) == [2, 3]

    asyncio.run(scenario())


def test_a_producer_that_is_cancelled_while_it_waits_leaves_its_group_and_takes_no_ticket():
    async def scenario():
        queue = SampleQueue(1, 0, "ticket")
        await queue.set_version(0)
        gone = asyncio.ensure_future(queue.put_and_next(await queue.next_ticket(), 0, "group"))
        await settle()
        gone.cancel()
        await settle()
        assert gone.cancelled() and await progress_of(queue) == {"next_ticket": 1, "again": [0]}
        assert (await queue.get(0))[0] == [(0, ("group",))]
        await queue.set_version(1)
        assert await tickets_without_waiting(queue) == [1], "nobody has taken it"

    asyncio.run(scenario())


def test_a_group_put_as_the_run_ends_is_kept_and_its_producer_is_told():
    async def scenario():
        queue = SampleQueue(2, 0, "arrival")
        await queue.set_version(0)
        await tickets_without_waiting(queue)
        waiting = asyncio.ensure_future(queue.put_and_next(0, 0, "group"))
        await settle()
        await queue.close("the run is over")
        for call in (waiting, queue.put_and_next(1, 0, "group")):
            with pytest.raises(QueueClosed, match="the run is over"):
                await asyncio.wait_for(call, 5)
        assert sorted(queue.finished) == [0, 1]

        queue = SampleQueue(2, 0, "arrival")
        await queue.set_version(0)
        with pytest.raises(RecordError, match="ticket 0.*version 1.*newest is 0"):
            await queue.put_and_next(await queue.next_ticket(), 1, "group")
        assert list(queue.running) == [0] and not queue.finished

    asyncio.run(scenario())


# --- Order


def at_version_five(order: str):
    """P = 4 and bound 2 at version 5, where tickets 0..19 are trained: the queue has given out 20..31."""

    async def build():
        queue = SampleQueue(4, 2, order)
        for step in range(5):
            await queue.set_version(step)
            await tickets_without_waiting(queue)
            await finish(queue, range(4 * step, 4 * step + 4), step)
            assert await trained(queue, step) == list(range(4 * step, 4 * step + 4))
        await queue.set_version(5)
        await tickets_without_waiting(queue)
        assert sorted(queue.running) == list(range(20, 32))
        return queue

    return build()


def test_ticket_order_trains_the_next_tickets_whatever_came_first():
    async def scenario():
        queue = await at_version_five("ticket")
        await finish(queue, [26, 21, 22, 30, 20], 5)
        step = asyncio.ensure_future(trained(queue, 5))
        await settle()
        assert not step.done(), "23 is not finished"
        await finish(queue, [23], 5)
        assert await step == [20, 21, 22, 23]

    asyncio.run(scenario())


def test_arrival_order_trains_the_oldest_finished():
    async def scenario():
        queue = await at_version_five("arrival")
        await finish(queue, [26, 21, 22, 30, 20], 5)
        groups, drops, _ = await queue.get(5)
        assert [ticket for ticket, _ in groups] == [20, 21, 22, 26]
        assert drops == {}
        assert (queue.version, list(queue.finished)) == (5, [30])
        assert list(queue.running) == [23, 24, 25, 27, 28, 29, 31]
        state = await queue.state()
        assert state.startswith("7 groups are running, the oldest for ") and "; 1 are finished" in state

    asyncio.run(scenario())


def test_in_ticket_order_the_next_ticket_takes_the_place_of_a_dropped_one():
    async def scenario():
        queue = await at_version_five("ticket")
        await queue.drop(21, "constant", "all rewards are 1")
        await finish(queue, [20, 22, 23, 24], 5)
        groups, drops, _ = await queue.get(5)
        assert [ticket for ticket, _ in groups] == [20, 22, 23, 24]
        assert drops == {"constant": (1, "all rewards are 1")}
        assert await tickets_without_waiting(queue) == [32], "the dropped one hands its allowance back"
        await queue.set_version(6)
        await finish(queue, [25, 26, 27, 28], 6)
        groups, drops, _ = await queue.get(6)
        assert [ticket for ticket, _ in groups] == [25, 26, 27, 28]
        assert drops == {}, "a drop is counted once"

    asyncio.run(scenario())


def test_a_step_whose_groups_are_all_dropped_gets_new_ones():
    async def scenario():
        for order in ("arrival", "ticket"):
            queue = SampleQueue(2, 0, order)
            await queue.set_version(0)
            for first in (0, 2):
                assert await tickets_without_waiting(queue) == [first, first + 1]
                await queue.drop(first, "invalid")
                await queue.drop(first + 1, "invalid")
            assert await tickets_without_waiting(queue) == [4, 5]
            await finish(queue, [5])
            await queue.drop(4, "invalid")
            assert await tickets_without_waiting(queue) == [6]
            await finish(queue, [6])
            assert await trained(queue, 0) == [5, 6]

    asyncio.run(scenario())


def test_drops_are_counted_by_reason_with_the_last_detail():
    async def scenario():
        queue = SampleQueue(4, 1, "arrival")
        await queue.set_version(0)
        await tickets_without_waiting(queue)
        await queue.drop(0, "env_error", "first")
        await queue.drop(1, "timeout", "slow")
        await queue.drop(2, "env_error", "last")
        await finish(queue, range(3, 8))
        assert (await queue.get(0))[1] == {"env_error": (2, "last"), "timeout": (1, "slow")}

    asyncio.run(scenario())


def test_three_steps_of_drops_without_a_good_group_between_them_close_the_queue():
    async def scenario():
        queue = SampleQueue(2, 2, "arrival")
        await queue.set_version(0)
        await tickets_without_waiting(queue)
        for ticket in range(5):
            await queue.drop(ticket, "env_died")
        await finish(queue, [5])  # a good one: the count starts anew
        await tickets_without_waiting(queue)
        for ticket in range(6, 11):
            await queue.drop(ticket, "env_died")
        (ticket,) = await tickets_without_waiting(queue, 1)
        waiting = asyncio.ensure_future(queue.get(0))
        await settle()
        assert not waiting.done() and ticket == 11
        await queue.drop(ticket, "env_error", "Traceback\n  line 7\nKeyError: 'answer'\n")
        for call in (waiting, queue.next_ticket()):
            with pytest.raises(QueueClosed, match="^6 groups in a row were dropped.*env_error.*KeyError"):
                await asyncio.wait_for(call, 5)

    asyncio.run(scenario())


# --- Going on after the run has ended


@pytest.mark.parametrize("bound, handed_out", [(2, 13), (1, 12), (0, 8)])
@pytest.mark.parametrize("order", ["arrival", "ticket"])
def test_a_resumed_run_trains_exactly_what_was_not_trained(order, bound, handed_out):
    """P = 4, killed after two steps: 0..7 are trained, the others of `handed_out` ran or were done."""

    async def scenario():
        queue = SampleQueue(4, bound, order)
        for step in (0, 1):
            await queue.set_version(step)
            while queue.next_ticket_number < handed_out and await tickets_without_waiting(queue, 1):
                pass
            await finish(queue, [t for t in range(4 * step, 4 * step + 4)], step)
            assert await trained(queue, step) == list(range(4 * step, 4 * step + 4))
        assert queue.next_ticket_number == handed_out
        await finish(queue, [t for t in (9, 11) if t in queue.running], 1)
        progress = json.loads(json.dumps(await progress_of(queue)))

        queue = SampleQueue(4, bound, order, 2, progress)
        with pytest.raises(RuntimeError):
            await queue.set_version(0)
        assert await tickets_without_waiting(queue) == [], "nothing may start before the first refit"
        await queue.set_version(2)
        for step in (2, 3, 4):
            given = await tickets_without_waiting(queue)
            seen.extend(given)
            await finish(queue, given, step)
            tickets.extend(await trained(queue, step))
            await queue.set_version(step + 1)
        assert tickets == list(range(8, 20)), "each once: nothing lost, nothing again"
        assert seen == list(range(8, 8 + 4 * (3 + bound)))

    tickets, seen = [], []
    asyncio.run(scenario())


@pytest.mark.parametrize("order", ["arrival", "ticket"])
def test_a_resumed_run_does_not_repeat_what_was_dropped(order):
    """Bound 2 and P = 4: 0..7 but 2 and 5 are trained, 10 is dropped, 11 and 12 are done, the rest ran."""

    async def scenario():
        queue = SampleQueue(4, 2, order)
        await queue.set_version(0)
        assert await tickets_without_waiting(queue) == list(range(12))
        for ticket in (2, 5, 10):
            await queue.drop(ticket, "env_error")
        assert await tickets_without_waiting(queue) == [12, 13, 14]
        await finish(queue, [0, 1, 3, 4, 6, 7, 8, 9])
        assert await trained(queue, 0) == [0, 1, 3, 4]
        await queue.set_version(1)
        assert await trained(queue, 1) == [6, 7, 8, 9]
        await finish(queue, [12, 11], 1)
        progress = json.loads(json.dumps(await progress_of(queue)))

        queue = SampleQueue(4, 2, order, 2, progress)
        await queue.set_version(2)
        assert await tickets_without_waiting(queue) == list(range(11, 23))
        await queue.drop(13, "env_error")
        assert await tickets_without_waiting(queue) == [23]
        await finish(queue, [16, 15, 14, 12, 11], 2)
        assert await trained(queue, 2) == [11, 12, 14, 15]
        await queue.set_version(3)
        again = await progress_of(queue)
        await finish(queue, range(17, 24), 3)
        assert await trained(queue, 3) == [16, 17, 18, 19]

        queue = SampleQueue(4, 0, order, 3, again)  # killed again, before that step
        await queue.set_version(3)
        assert await tickets_without_waiting(queue) == [16, 17, 18, 19]
        await finish(queue, [16, 17, 18, 19], 3)
        assert await trained(queue, 3) == [16, 17, 18, 19]

    asyncio.run(scenario())


@pytest.mark.parametrize("order", ["arrival", "ticket"])
def test_a_run_that_is_killed_again_before_it_has_caught_up_loses_nothing(order):
    async def scenario():
        queue = SampleQueue(4, 2, order)
        await queue.set_version(0)
        assert await tickets_without_waiting(queue) == list(range(12))
        for first in (0, 4, 8):  # each run goes on with a bound of 0 and is killed a step later
            step = first // 4
            await finish(queue, range(first, first + 4), step)
            assert await trained(queue, step) == list(range(first, first + 4))
            queue = SampleQueue(4, 0, order, step + 1, json.loads(json.dumps(await progress_of(queue))))
            await queue.set_version(step + 1)
            assert await tickets_without_waiting(queue) == list(range(first + 4, first + 8))

    asyncio.run(scenario())


async def killed_with_5_6_and_9_done(order: str, trained_steps: int) -> SampleQueue:
    """P = 4, bound 2: a run that is killed after step 0's batch, 0..3, was taken; then it goes on."""
    queue = SampleQueue(4, 2, order)
    await queue.set_version(0)
    assert await tickets_without_waiting(queue) == list(range(12))
    await finish(queue, [0, 1, 2, 3, 9, 5, 6])
    assert await trained(queue, 0) == [0, 1, 2, 3]
    progress, groups = await queue.snapshot(trained_steps)
    first = 4 * trained_steps  # without the update, the batch is still to be trained
    assert progress == {"next_ticket": 12, "again": list(range(first, 12))}
    done = [*range(first, 4), 5, 6, 9]
    assert sorted(groups) == [f"group {ticket}" for ticket in done]

    queue = SampleQueue(4, 2, order, trained_steps, json.loads(json.dumps(progress)))
    for ticket in done:
        await queue.restore(ticket, f"group {ticket}")
    await queue.set_version(trained_steps)
    given = await tickets_without_waiting(queue)
    expected = [ticket for ticket in range(first, 16) if ticket not in done]
    assert given == expected[: 12 - len(done)], "those that are done count for admission"
    return queue


@pytest.mark.parametrize("order, batch", [("arrival", [4, 5, 6, 9]), ("ticket", [4, 5, 6, 7])])
def test_groups_that_were_finished_before_a_checkpoint_are_trained_after_it(order, batch):
    async def scenario():
        queue = await killed_with_5_6_and_9_done(order, 1)
        await finish(queue, [4, 7] if order == "ticket" else [4], 1)
        assert await trained(queue, 1) == batch

    asyncio.run(scenario())


@pytest.mark.parametrize("order", ["arrival", "ticket"])
def test_a_batch_that_was_taken_and_not_trained_is_in_the_checkpoint(order):
    async def scenario():
        queue = await killed_with_5_6_and_9_done(order, 0)
        assert await trained(queue, 0) == [0, 1, 2, 3]

    asyncio.run(scenario())


def test_in_ticket_order_restored_groups_wait_for_the_tickets_before_them():
    """P = 2: 3 and 4 are done when the run dies, 2 is not. It goes on with 2 and 3, also with a bound of 0."""

    async def scenario(bound: int):
        queue = SampleQueue(2, bound, "ticket", 1, {"next_ticket": 6, "again": [2, 3, 4, 5]})
        for ticket in (3, 4):
            await queue.restore(ticket, f"group {ticket}")
        await queue.set_version(1)
        batch = asyncio.ensure_future(queue.get(1))
        await settle()
        assert not batch.done() and batch.cancel()
        given = await tickets_without_waiting(queue)
        assert given == ([2] if bound == 0 else [2, 5])
        assert set(queue.finished) == ({3} if bound == 0 else {3, 4}), "past admission: it is sampled again"
        await finish(queue, [2], 1)
        assert await trained(queue, 1) == [2, 3]
        await queue.set_version(2)
        more = await tickets_without_waiting(queue)
        assert more == ([4, 5] if bound == 0 else [6, 7])

    for bound in (0, 1):
        asyncio.run(scenario(bound))


@pytest.mark.parametrize("before, after", [("arrival", "ticket"), ("ticket", "arrival")])
def test_the_order_may_change_when_a_run_goes_on(before, after):
    """Arrival order trained 0, 2 and 3, 4 while 1 ran: in ticket order it is 1 that comes next."""

    async def scenario():
        queue = SampleQueue(2, 2, before)
        await queue.set_version(0)
        await tickets_without_waiting(queue)
        first, second = ([0, 2], [3, 4]) if before == "arrival" else ([0, 1], [2, 3])
        await finish(queue, first)
        assert await trained(queue, 0) == first
        await queue.set_version(1)
        await finish(queue, second)
        assert await trained(queue, 1) == second
        left = [ticket for ticket in range(12) if ticket not in first + second]

        queue = SampleQueue(2, 0, after, 2, await progress_of(queue))
        await queue.set_version(2)
        given = await tickets_without_waiting(queue)
        assert given == left[:2]
        await finish(queue, given, 2)
        assert await trained(queue, 2) == left[:2]
        await queue.set_version(3)
        given = await tickets_without_waiting(queue)
        await finish(queue, given, 3)
        assert await trained(queue, 3) == left[2:4]

    asyncio.run(scenario())


# --- Late tokens


def crossing_rollout() -> Rollout:
    """Two context tokens, three sampled at version 3, a refit in mid-rollout, two sampled at version 4."""
    segment = Segment(
        token_ids=np.arange(7, dtype=np.int32),
        action_mask=np.array([0, 0, 1, 1, 1, 1, 1], bool),
        logprobs=np.array([0, 0, -0.1, -0.2, -0.3, -0.4, -0.5], np.float32),
        versions=np.array([-1, -1, 3, 3, 3, 4, 4], np.int32),
        turn_ends=[7],
        finish_reason="stop",
    )
    return Rollout("0.0", "g0", 0, "0", [segment], [1.0])


@pytest.mark.parametrize(
    "late, mask, invalid",
    [("keep", [1, 1, 1, 1, 1], None), ("mask", [0, 0, 0, 1, 1], None), ("drop", [1, 1, 1, 1, 1], "late")],
)
def test_what_happens_to_tokens_past_the_bound(late, mask, invalid):
    rollout = crossing_rollout()
    lags, num_late = mark_late([rollout], 5, 1, late)
    assert lags == [2, 2, 2, 1, 1] and num_late == 3
    assert rollout.segments[0].action_mask.astype(int).tolist() == [0, 0, *mask]
    assert rollout.invalid == invalid


@pytest.mark.parametrize("late", ["keep", "mask", "drop"])
def test_tokens_within_the_bound_are_left_alone(late):
    rollout = crossing_rollout()
    assert mark_late([rollout], 5, 2, late) == ([2, 2, 2, 1, 1], 0)
    assert rollout.segments[0].action_mask.sum() == 5 and rollout.invalid is None


def test_a_late_rollout_that_was_invalid_already_keeps_its_reason():
    rollout = crossing_rollout()
    rollout.invalid = "timeout"
    mark_late([rollout], 5, 1, "drop")
    assert rollout.invalid == "timeout"


# --- The way through the queue


@pytest.mark.parametrize(
    "inline_bytes, piece_bytes", [(1 << 20, 1 << 20), (1 << 20, 100), (10, 100)],
    ids=["in one piece", "in pieces", "by reference"],
)  # fmt: skip
def test_a_group_comes_out_of_the_queue_as_it_went_in(inline_bytes, piece_bytes, monkeypatch):
    store = {}

    def put(data) -> str:
        store["reference"] = data
        return "reference"

    fake_ray = SimpleNamespace(put=put, get=store.__getitem__)
    monkeypatch.setattr(common.sample_queue, "ray", fake_ray)
    monkeypatch.setattr(common.sample_queue, "INLINE_BYTES", inline_bytes)
    monkeypatch.setattr(common.sample_queue, "PIECE_BYTES", piece_bytes)
    sent = [crossing_rollout(), crossing_rollout()]
    sent[1].invalid, sent[1].info = "timeout", {"error": "late", "score": 0.5}
    newest, *pieces = pack_group(sent)
    assert newest == 4
    assert bool(store) == (pieces == [["reference"]]) == (inline_bytes == 10)
    assert store or (len(pieces) > 1) == (piece_bytes == 100) and max(map(len, pieces)) <= piece_bytes

    async def through_the_queue():
        queue = SampleQueue(1, 0, "arrival")
        await queue.set_version(0)
        ticket = await queue.next_ticket()
        queue.version = newest  # the four refits in between
        following = asyncio.ensure_future(queue.put_and_next(ticket, newest, *pieces))
        ((_, packed),), _, _ = await queue.get(newest)
        assert await following == 1
        return packed

    got = unpack_group(asyncio.run(through_the_queue()), common.sample_queue.ray.get)
    for before, after in zip(sent, got, strict=True):
        for name in ("token_ids", "action_mask", "logprobs", "versions"):
            one, two = getattr(before.segments[0], name), getattr(after.segments[0], name)
            assert one.dtype == two.dtype and one.tolist() == two.tolist()
        assert after.segments[0].turn_ends == [7] and after.segments[0].finish_reason == "stop"
        del before.segments, after.segments
        assert vars(before) == vars(after)


# --- Whole runs


async def simulated_run(order: str, bound: int, seed: int, dropped: set[int]):
    """Ten steps of P = 4, workers and trainer of random speed: tickets and max lag of each step."""
    queue, dice = SampleQueue(4, bound, order), random.Random(seed)
    sampled_by: dict[int, list[int]] = {}

    async def worker():
        ticket = await queue.next_ticket()
        while True:
            sampled_by[ticket] = []
            for _ in range(dice.choice([1, 2, 3, 5, 40])):  # token by token: a refit may come in between
                sampled_by[ticket].append(queue.version)
                await asyncio.sleep(0)
            if ticket in dropped:
                await queue.drop(ticket, "constant")
                ticket = await queue.next_ticket()
            else:
                ticket = await queue.put_and_next(ticket, max(sampled_by[ticket]), f"group {ticket}")

    await queue.set_version(0)
    workers = [asyncio.ensure_future(worker()) for _ in range(6)]
    steps, max_lags = [], []
    for step in range(10):
        steps.append(await trained(queue, step))
        max_lags.append(max(step - version for ticket in steps[-1] for version in sampled_by[ticket]))
        for _ in range(dice.randrange(30)):
            await asyncio.sleep(0)
        await queue.set_version(step + 1)
    await queue.close("the run is over")
    ends = await asyncio.wait_for(asyncio.gather(*workers, return_exceptions=True), 5)
    assert all(isinstance(end, QueueClosed) for end in ends), ends
    return steps, max_lags


@pytest.mark.parametrize("order", ["arrival", "ticket"])
@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("dropped", [set(), {21}, {0, 1, 2, 3, 5, 21, 22, 40}], ids=["none", "one", "many"])
def test_a_run_ends_and_trains_no_ticket_twice(order, bound, dropped):
    for seed in range(4):
        steps, max_lags = asyncio.run(simulated_run(order, bound, seed, dropped))
        tickets = sum(steps, [])
        assert len(tickets) == 40 == len(set(tickets)) and not dropped & set(tickets)
        if order == "ticket":
            expected = [ticket for ticket in range(60) if ticket not in dropped][:40]
            assert tickets == expected
        if order == "ticket" or bound == 0:
            assert max(max_lags) <= bound


MOVES = st.sampled_from(["start", "start", "put", "put", "drop", "train"])


@settings(max_examples=100, deadline=None)
@given(
    order=st.sampled_from(["arrival", "ticket"]),
    bound=st.integers(0, 3),
    per_step=st.integers(1, 4),
    first_ticket=st.integers(0, 5),
    moves=st.lists(st.tuples(MOVES, st.integers(0, 99)), max_size=120),
)
def test_any_interleaving_keeps_the_bound_and_loses_nothing(order, bound, per_step, first_ticket, moves):
    async def scenario():
        queue = SampleQueue(per_step, bound, order, 0, {"next_ticket": first_ticket, "again": []})
        await queue.set_version(0)
        version, running, finished, given_out, trained_steps, dropped = 0, [], [], [], [], set()
        drops_in_a_row = 0
        for move, pick in moves:
            if move == "start":
                # k, counted without the dropped ones, belongs to step k // P
                allowed = (len(given_out) - len(dropped)) // per_step <= version + bound
                tickets = await tickets_without_waiting(queue, 1)
                assert bool(tickets) == allowed
                assert tickets in ([], [first_ticket + len(given_out)])
                given_out += tickets
                running += tickets
            elif move in ("put", "drop") and running:
                ticket = running.pop(pick % len(running))
                if move == "put":
                    await queue.put(ticket, f"group {ticket}", version)
                    finished.append(ticket)
                    drops_in_a_row = 0
                else:
                    await queue.drop(ticket, "constant")
                    dropped.add(ticket)
                    drops_in_a_row += 1
                assert (queue.closed is not None) == (drops_in_a_row == 3 * per_step)
                if queue.closed:
                    break
            elif move == "train":
                kept = [t for t in given_out if t not in dropped and t not in sum(trained_steps, [])]
                expected = sorted(finished) if order == "arrival" else kept
                ready = len(expected) >= per_step and set(expected[:per_step]) <= set(finished)
                task = asyncio.ensure_future(queue.get(version))
                await settle()
                assert task.done() == ready
                if not ready:
                    task.cancel()
                    continue
                tickets = [ticket for ticket, _ in task.result()[0]]
                assert tickets == expected[:per_step]
                finished = [ticket for ticket in finished if ticket not in tickets]
                trained_steps.append(tickets)
                version += 1
                await queue.set_version(version)
        # nothing is lost: what was given out is running, waiting, trained or dropped, and once only
        everything = [*running, *finished, *dropped, *sum(trained_steps, [])]
        assert sorted(everything) == given_out
        assert sorted(queue.running) == sorted(running) and sorted(queue.finished) == sorted(finished)

    asyncio.run(scenario())


@pytest.mark.parametrize("order, waits", [("ticket", True), ("arrival", False)])
def test_what_a_batch_waits_for_its_slowest_group_is_told(order, waits):
    async def scenario():
        queue = await at_version_five(order)
        await finish(queue, [21, 22, 23, 24], 5)  # four are enough, but 20 is the oldest
        batch = asyncio.create_task(queue.get(5))
        await asyncio.sleep(0.05)
        assert batch.done() != waits
        await finish(queue, [20], 5)
        groups, _, straggler_s = await batch
        assert [ticket for ticket, _ in groups] == ([20, 21, 22, 23] if waits else [21, 22, 23, 24])
        assert (straggler_s >= 0.05) == waits

    asyncio.run(scenario())
