"""Environments in worker processes: what a user's environment does wrong stays there.

    RolloutWorker (asyncio)  --control: a socket for each worker-->  zygote (environment imported, tasks read)
          |                                                             | fork
          '--JSON lines: reset, step, grade--------------------------> worker (runs them on its main thread)

A fork is cheap (a few ms) and shares the tasks' memory, so a worker in which anything went wrong is killed
and replaced. Nothing is pickled.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import inspect
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from numbers import Integral
from pathlib import Path

from common.env import EnvFlags, Step
from common.envs import load_env

LINE_BYTES = 256 << 20  # longest message
QUICK_S, QUICK_CALLS = 0.05, 32  # so many calls in a row within this time make an environment a quick one
LEASES = 1_000  # a worker is replaced after so many, and with it whatever it has leaked


class EnvError(Exception):
    """An environment did something wrong; `reason` is why its rollout is invalid."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


class Worker:
    """The client's end of one worker process."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float
    ):
        self.pid, self.reader, self.writer, self.timeout_s = pid, reader, writer, timeout_s
        self.leases, self.alive = 0, True

    async def call(self, method: str, **values) -> dict:
        self.send(method, [values])
        return await self.receive(method, self.timeout_s)

    def send(self, method: str, requests: list[dict]) -> None:
        lines = [json.dumps({"method": method} | request) + "\n" for request in requests]
        self.writer.write("".join(lines).encode())

    async def receive(self, method: str, timeout_s: float | None) -> dict:
        """The answer to the next request. Raises EnvError: env_error (it raised), env_timeout, env_died.

        After any error the process is gone: the answer of a cancelled call would pass for that of the next.
        """
        try:
            async with asyncio.timeout(timeout_s):
                line = await self.reader.readline()
            answer = json.loads(line) if line.endswith(b"\n") else None
        except TimeoutError:
            self.kill()
            raise EnvError("env_timeout", f"{method}() was not over after {timeout_s} s") from None
        except OSError:  # the socket broke
            answer = None
        except BaseException:
            self.kill()
            raise
        if answer is None or "error" in answer:
            self.kill()
            reason = "env_error" if answer else "env_died"
            raise EnvError(reason, answer["error"] if answer else f"its process died in {method}()")
        return answer

    def kill(self) -> None:
        self.alive = False
        self.writer.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # and what the environment has started


class EnvPool:
    """The environments of one engine. Await `start`; then `reset` and `grade`, or an `episode`.

    `num_tasks` has the number of tasks by split.
    """

    async def start(self, spec: str, flags: EnvFlags, episodes: int) -> None:
        """`episodes`: how many of several turns may be played at a time. Raises EnvError if the import
        fails."""
        self.control, theirs = socket.socketpair()
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        own = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "RAY_"))}
        for name, other in (("NO_PROXY", "no_proxy"), ("no_proxy", "NO_PROXY")):
            hosts = os.environ.get(name) or os.environ.get(other, "")  # "*" is all hosts, on its own only
            own[name] = hosts if hosts == "*" else f"{hosts},127.0.0.1,localhost".strip(",")
        self.zygote = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "common.envs.pool", str(theirs.fileno()), spec, json.dumps(asdict(flags)),
            pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0"} | own | {"PYTHONPATH": path},  # sets in one order everywhere
        )  # fmt: skip
        theirs.close()
        self.timeout_s, self.quick_calls = flags.env_timeout_s, 0
        worker = await self._fork()
        about = await worker.call("about")
        self.num_tasks, self.max_turns, self.parsers = (
            about["num_tasks"],
            about["max_turns"],
            about["parsers"],
        )
        self.free: asyncio.LifoQueue = asyncio.LifoQueue()  # workers, above places for workers to come
        for _ in range(1, flags.env_workers if self.max_turns == 1 else episodes):
            self.free.put_nowait(None)
        self.free.put_nowait(worker)

    async def _fork(self) -> Worker:
        ours, theirs = socket.socketpair()
        socket.send_fds(self.control, [b"\n"], [theirs.fileno()])
        theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LINE_BYTES)
        try:
            pid = await reader.readline()
        except BaseException:  # its rollout is given up
            writer.close()
            raise
        if not pid:
            raise EnvError("env_died", "the environment could not be loaded; its log says why")
        return Worker(int(pid), reader, writer, self.timeout_s)

    @contextlib.asynccontextmanager
    async def worker(self):
        """A worker of one's own. One that was killed meanwhile, or has served long enough, is replaced."""
        worker = await self.free.get()
        try:
            worker = worker or await self._fork()
            worker.leases += 1
            yield worker
        finally:
            if worker and worker.alive and worker.leases == LEASES:
                worker.kill()
            self.free.put_nowait(worker if worker and worker.alive else None)

    async def reset(self, split: str, index: int) -> str | list[dict] | list[int]:
        """The prompt of a task."""
        async with self.worker() as worker:
            return (await worker.call("reset", split=split, index=index))["prompt"]

    async def grade(self, split: str, index: int, actions: list[dict]) -> list[Step | EnvError]:
        """What each action (its text and `ids`) brought as the only one of an episode. One worker grades them
        one by one; if it fails at one, the rest go to others."""
        outcomes: list[Step | EnvError] = []
        async with self.worker() as worker:
            start = time.monotonic()
            worker.send("grade", [{"split": split, "index": index, **action} for action in actions])
            try:
                for _ in actions:
                    outcomes.append(Step(**await worker.receive("grade", self.timeout_s)))
                quick = time.monotonic() - start <= QUICK_S * len(actions)
            except EnvError as error:
                outcomes.append(error)
                quick = False
            self.quick_calls = self.quick_calls + 1 if quick else 0
        alone = [self.grade(split, index, [action]) for action in actions[len(outcomes) :]]
        return outcomes + [outcome for (outcome,) in await asyncio.gather(*alone)]

    def grader(self, split: str, index: int):
        """A `step` for the episodes of a group. While the environment answers quickly and without errors,
        what is asked for at the same time goes to a worker together: a message costs more than the grading.
        """
        asked: list[tuple[dict, asyncio.Future]] = []

        async def together(action: dict) -> Step | EnvError:
            future = asyncio.get_running_loop().create_future()
            asked.append((action, future))
            if len(asked) == 1:
                await asyncio.sleep(0)  # the others of the group ask in this round of the loop
                batch = asked.copy()
                asked.clear()
                outcomes = await self.grade(split, index, [action for action, _ in batch])
                for (_, waiting), outcome in zip(batch, outcomes, strict=True):
                    waiting.set_result(outcome)
            return await future

        async def step(text: str, ids: Sequence[int] = ()) -> Step:
            action = {"action": text, "ids": ids}
            if self.quick_calls < QUICK_CALLS:
                (outcome,) = await self.grade(split, index, [action])
            else:
                outcome = await together(action)
            if isinstance(outcome, EnvError):
                raise outcome
            return outcome

        return step

    @contextlib.asynccontextmanager
    async def episode(self, split: str, index: int):
        """An environment in a worker of its own: yields (its prompt, its `step`)."""
        async with self.worker() as worker:
            answer = await worker.call("reset", split=split, index=index)

            async def step(action: str, ids: Sequence[int] = ()) -> Step:
                return Step(**await worker.call("step", action=action, ids=ids))

            yield answer["prompt"], step

    async def run_agent(self, split: str, index: int, access: dict) -> Step:
        """A ChatAgent's whole episode in a worker of its own. Its deadline is the caller's."""
        async with self.worker() as worker:
            worker.send("run", [{"split": split, "index": index, "access": access}])
            return Step(**await worker.receive("run", None))

    def close(self) -> None:
        self.control.close()  # the zygote ends, and with it its workers


# --- The other side


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def plain(value):
    """For json: numpy and torch numbers as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r} is a {type(value).__name__}: give plain values (JSON)")


def is_ids(value) -> bool:
    """Whether `value` is a list of token ids; an empty one is."""
    numbers = isinstance(value, list) and all(isinstance(i, Integral) for i in value)
    return numbers and all(i >= 0 and not isinstance(i, bool) for i in value)


async def within(awaitable):
    return await awaitable  # a Runner takes coroutines only


class Server:
    """What a worker does on request: one environment at a time."""

    def __init__(self, make_env: Callable, tasks: dict):  # which makes an Env or a ChatAgent
        self.make_env, self.tasks, self.env = make_env, tasks, None
        self.runner = asyncio.Runner()  # makes its event loop when something is async

    def about(self) -> dict:
        num_tasks = {split: len(tasks) for split, tasks in self.tasks.items()}
        env = self.make_env()
        parsers = None if env.max_turns else [env.tool_parser, env.reasoning_parser]
        return {"num_tasks": num_tasks, "max_turns": env.max_turns, "parsers": parsers}

    def reset(self, split: str, index: int) -> dict:
        self.runner.close()  # and what an episode before has left running
        self.runner, self.env = asyncio.Runner(), self.make_env()
        prompt = self.value(self.env.reset(self.tasks[split][index]))
        self.in_ids = is_ids(prompt)
        return {"prompt": prompt}

    def value(self, outcome):
        return self.runner.run(within(outcome)) if inspect.isawaitable(outcome) else outcome

    def run(self, split: str, index: int, access: dict) -> dict:
        from common.agent import ChatContext  # it imports this module

        with contextlib.closing(asyncio.Runner()) as self.runner:
            outcome = self.value(self.make_env().run(ChatContext(self.tasks[split][index], **access)))
        return self.checked("run", outcome if isinstance(outcome, Step) else Step(reward=outcome))

    def step(self, action: str, ids: list[int]) -> dict:
        self.env.action_ids = ids
        step = self.checked("step", self.value(self.env.step(action)))
        if self.in_ids and step["observation"] is not None and not is_ids(step["observation"]):
            raise TypeError("step() gave text after token ids: no template can join them; give ids")
        self.in_ids = self.in_ids or is_ids(step["observation"])
        return step

    def checked(self, method: str, step: Step) -> dict:
        if not isinstance(step, Step):
            raise TypeError(f"{method}() returned a {type(step).__name__}, not a Step")
        seen = step.observation
        parts = isinstance(seen, list) and all(isinstance(part, dict) and "type" in part for part in seen)
        if not isinstance(seen, str | None) and not is_ids(seen) and not parts:
            what = "no text and no list of token ids, nor of parts of a message"
            raise TypeError(f"{method}() returned an observation that is {what}")
        if not isinstance(step.info, dict):
            raise TypeError(f"{method}() returned an info that is no dict")
        return {name: getattr(step, name) for name in Step.__dataclass_fields__}

    def grade(self, split: str, index: int, action: str, ids: list[int]) -> dict:
        self.reset(split, index)
        return self.step(action, ids)


def serve(connection: socket.socket, server: Server) -> None:
    with connection.makefile("rwb") as stream:
        stream.write(b"%d\n" % os.getpid())
        stream.flush()
        for line in stream:
            request = json.loads(line)
            try:
                answer = getattr(server, request.pop("method"))(**request)
                line = json.dumps(answer, default=plain, ensure_ascii=False).encode()  # no lone surrogates
            except Exception as error:  # the user's code may raise anything
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f" ({os.path.basename(frame.filename)}:{frame.lineno})"
                line = json.dumps({"error": traceback.format_exc(limit=-4).rstrip() + where}).encode()
            stream.write(line + b"\n")
            stream.flush()


def main(control: socket.socket, spec: str, flags: EnvFlags) -> None:
    """The zygote: forks a worker for every socket that comes, until its parent is gone."""
    faulthandler.enable()
    die_with_parent()
    make_env = load_env(spec, flags)
    env = make_env()
    server = Server(make_env, {split: env.tasks(split) for split in ("train", "eval")})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies; before that, tasks() may wait for children
    while fds := socket.recv_fds(control, 1, 1)[1]:
        if os.fork() == 0:
            die_with_parent()
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the environment may have children
            control.close()
            with contextlib.suppress(BrokenPipeError):  # nobody waits any more
                serve(socket.socket(fileno=fds[0]), server)
            os._exit(0)
        os.close(fds[0])


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], EnvFlags(**json.loads(sys.argv[3])))
