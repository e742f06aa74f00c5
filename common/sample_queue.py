"""The queue between rollout and training: tickets, admission, order, versions, health.

Every prompt group has a ticket k = 0, 1, 2, ... A group may start when, counted without the dropped ones, it
belongs to one of the `max_staleness + 1` steps from the current policy version on. So work is bounded where
it begins, and nothing that was finished is thrown away for being ahead. `SampleQueue` is a plain asyncio
class; `main` wraps it with `ray.remote`.
"""

import asyncio
import pickle
import time
from collections import deque

import ray

from common.sample import RecordError, Rollout

PIECE_BYTES = 64 << 10  # Ray sends arguments below 100 KiB with the call, others through its object store
INLINE_BYTES = 256 << 10  # a larger group is put there once, and a reference goes through the queue


class QueueClosed(RuntimeError):
    """The run is over; the message says why."""


def pack_group(group: list[Rollout]) -> list:
    """A group as `put_and_next` takes it: the newest version that sampled one of its tokens, and the pieces
    in which it goes through the queue, which never opens them. Both ends are processes of this run."""
    newest = max(int(segment.versions.max()) for rollout in group for segment in rollout.segments)
    data = pickle.dumps(group, protocol=5)
    if len(data) > INLINE_BYTES:
        return [newest, [ray.put(data)]]  # in a list: Ray would fetch a bare reference for the queue
    return [newest, *(data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))]


def unpack_group(pieces: tuple[bytes | list[ray.ObjectRef], ...], fetch=ray.get) -> list[Rollout]:
    """`fetch` gets what is behind a reference."""
    by_reference = isinstance(pieces[0], list)
    return pickle.loads(fetch(pieces[0][0]) if by_reference else b"".join(pieces))


class SampleQueue:
    """Tickets out, finished groups in.

    `order` "arrival" trains the P oldest finished groups, "ticket" the next P tickets that were not dropped.
    A resumed run gives the version that it starts with and the progress of the queue before it: tickets
    that were not trained are handed out again. Nothing is admitted before the first refit.
    """

    def __init__(self, groups_per_step: int, max_staleness: int, order: str, first_version=0, progress=None):
        progress = progress or {"next_ticket": 0, "again": []}
        self.groups_per_step, self.max_staleness, self.order = groups_per_step, max_staleness, order
        self.version, self.first_version = first_version - 1, first_version  # none before the first refit
        self.next_ticket_number, self.again = progress["next_ticket"], deque(progress["again"])
        self.admitted = 0  # tickets handed out here and not dropped
        self.finished: dict[int, object] = {}
        self.taken: tuple[int, dict] = (-1, {})  # the newest batch: its step, its groups by ticket
        self.drops_in_a_row = 0
        self.drops: dict[str, tuple[int, str]] = {}  # by reason: how many, the last one's detail
        self.running: dict[int, float] = {}  # ticket -> start time
        self.closed: str | None = None
        self.changed = asyncio.Event()

    def _may_start(self) -> bool:
        """`k // P <= version + max_staleness` for the next ticket, k counted without the dropped ones."""
        step = self.first_version + self.admitted // self.groups_per_step
        return self.version >= self.first_version and step <= self.version + self.max_staleness

    async def _wait_until(self, condition) -> None:
        while self.closed is None and not condition():
            self.changed.clear()
            await self.changed.wait()
        if self.closed is not None:
            raise QueueClosed(self.closed)

    async def next_ticket(self) -> int:
        """The next ticket, as soon as admission allows its group to start. Raises QueueClosed at the run's
        end."""
        await self._wait_until(self._may_start)
        ticket = self.again.popleft() if self.again else self.next_ticket_number
        self.next_ticket_number = max(self.next_ticket_number, ticket + 1)
        self.admitted += 1
        self.running[ticket] = time.monotonic()
        return ticket

    async def put(self, ticket: int, group, max_version: int) -> None:
        """A finished group. `max_version` is the newest version that sampled one of its tokens."""
        if max_version > self.version:
            raise RecordError(f"ticket {ticket}: sampled by version {max_version}, newest is {self.version}")
        self.running.pop(ticket, None)
        self.finished[ticket] = group
        self.drops_in_a_row = 0
        self.changed.set()

    async def put_and_next(self, ticket: int, max_version: int, *pieces) -> int:
        """`put` and then `next_ticket`, so that a group costs one call."""
        await self.put(ticket, pieces, max_version)
        return await self.next_ticket()

    async def drop(self, ticket: int, reason: str, detail: str = "") -> None:
        """A group that will not be trained. It hands its allowance back, else the loop would run dry.

        Three steps' worth of them without a good one between them close the queue: training would never
        start.
        """
        self.running.pop(ticket, None)
        self.drops[reason] = (self.drops.get(reason, (0, ""))[0] + 1, detail)
        self.admitted -= 1
        self.drops_in_a_row += 1
        if self.drops_in_a_row == 3 * self.groups_per_step:
            last = f"{reason}: {detail.strip().splitlines()[-1]}" if detail.strip() else reason
            await self.close(f"{self.drops_in_a_row} groups in a row were dropped, the last for {last}")
        self.changed.set()

    def _next_batch(self) -> list[int]:
        """The tickets of the next step, as many of them as are known."""
        known = self.finished if self.order == "arrival" else [*self.finished, *self.running, *self.again]
        return sorted(known)[: self.groups_per_step]

    async def get(self, step: int) -> tuple[list, dict[str, tuple[int, str]], float]:
        """The groups that step `step` trains, [(ticket, group)]; the dropped ones since the last call by
        reason: how many, and the last one's detail; and the seconds that it waited for its slowest group
        while enough others were finished: what --order ticket costs.

        Raises RuntimeError if the engines do not hold the weights of `step`: a refit is missing.
        """
        if self.version != step:
            raise RuntimeError(f"step {step} at version {self.version}: a refit is missing")
        await self._wait_until(lambda: len(self.finished) >= self.groups_per_step)
        enough = time.monotonic()
        await self._wait_until(lambda: self.finished.keys() >= set(self._next_batch()))
        straggler_s = time.monotonic() - enough
        self.taken = step, {ticket: self.finished.pop(ticket) for ticket in self._next_batch()}
        drops, self.drops = self.drops, {}
        return list(self.taken[1].items()), drops, straggler_s

    async def set_version(self, version: int) -> None:
        """The engines now hold `version`; admission moves on. A repeat of the same version adds nothing."""
        if version not in (self.version, self.version + 1):
            raise RuntimeError(f"version {self.version} cannot become {version}")
        self.version = version
        self.changed.set()

    async def close(self, reason: str) -> None:
        """Every waiting and every later call raises QueueClosed: nothing hangs on a run that has ended."""
        self.closed = self.closed or reason
        self.changed.set()

    async def state(self) -> str:
        """What the run waits for, for messages."""
        waited = [time.monotonic() - start for start in self.running.values()]
        oldest = f", the oldest for {max(waited):.0f} s" if waited else ""
        return f"{len(self.running)} groups are running{oldest}; {len(self.finished)} are finished"

    async def snapshot(self, trained: int) -> tuple[dict, list]:
        """Where the data stands when `trained` steps are, also if the newest batch is not, for
        `SampleQueue(progress=...)`; and the finished groups."""
        if self.taken[0] >= trained:
            self.finished |= self.taken[1]
        again = sorted([*self.running, *self.finished, *self.again])
        return {"next_ticket": self.next_ticket_number, "again": again}, list(self.finished.values())

    async def restore(self, ticket: int, *pieces) -> None:
        """A finished group of the run before. Where admission would not let it start, it is sampled again."""
        before = sum(other < ticket for other in [*self.again, *self.finished])
        if before < self.groups_per_step * (self.max_staleness + 1):
            self.again.remove(ticket)
            self.finished[ticket] = pieces
            self.admitted += 1
