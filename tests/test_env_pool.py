"""Real environments in real processes: whatever one of them does costs its own rollout, with a reason."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

import common.env
import common.envs.pool
from algos.grpo import Args, RolloutWorker, epoch_order, make_rows
from common.env import EnvFlags
from common.envs.pool import EnvError, EnvPool
from common.evaluate import evaluate
from common.metrics import rollout_metrics
from common.rollout import rollout_group
from common.sample import Rollout
from tests.fakes import ScriptedEngine, reply

ROOT = Path(__file__).parents[1]

# The environments: a step does what the answer asks for.
USER = '''
from __future__ import annotations

import asyncio, ctypes, math, os, signal, subprocess, sys, threading, time
from dataclasses import dataclass

import numpy as np

from common.env import Env, Step

VALUES = {
    "NaN": math.nan, "inf": math.inf, "-inf": -math.inf, "text": "1.0", "None": None, "list": [1.0],
    "dict": {}, "huge": 10**400, "True": True, "False": False, "np.float32": np.float32(0.5),
    "np.int64": np.int64(-3),
    "np.bool_": np.bool_(True), "np.float64": np.float64(0.25), "array": np.array([1.0, 2.0]),
    "np.nan": np.float32("nan"),
}
CALLS, LEFT = [], []


@dataclass
class Mine(Step):
    extra: str = "of the user"


def do(action):
    CALLS.append(action)
    if action == "raise":
        raise KeyError("the user's mistake")
    if action == "segfault":
        ctypes.string_at(0)
    if action == "os._exit":
        os._exit(1)
    if action == "sys.exit":
        sys.exit(1)
    if action == "abort":
        os.abort()
    if action == "interrupt":
        raise KeyboardInterrupt
    if action == "hang":
        time.sleep(1000)
    if action == "hang in a child":
        child = subprocess.Popen(["sleep", "1000"])
        open(os.environ["CHILD_FILE"], "w").write(str(child.pid))
        child.wait()
    if action.startswith("slow"):
        time.sleep(0.8)
        return Step(reward=55.0)
    if action == "a number":
        return 1.0
    if action == "nothing":
        return None
    if action == "a dict":
        return {"reward": 1.0}
    if action == "an object":
        return Step(reward=1.0, info={"what": object()})
    if action == "a number as observation":
        return Step(reward=1.0, observation=5)
    if action == "a list as info":
        return Step(reward=1.0, info=["x"])
    if action == "a subclass":
        return Mine(reward=0.75)
    if action == "a surrogate":
        return Step(reward=1.0, observation="\\ud800")
    if action == "score":
        info = {"note": "a\\nb", "count": np.int64(3), "nan": math.nan}
        return Step(reward=0.2, score=np.float32(0.75), info=info)
    if action == "alarm":
        def wake(*_):
            raise InterruptedError("as a grader's own time limit does")
        signal.signal(signal.SIGALRM, wake)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(30)
        except InterruptedError:
            return Step(reward=0.625)
    if action == "main thread":
        return Step(reward=float(threading.current_thread() is threading.main_thread()))
    if action == "no torch":
        return Step(reward=float("torch" not in sys.modules))
    if action == "prints":
        print("x" * 100_000)
        print("y" * 100_000, file=sys.stderr)
        os.write(1, b'{"reward": 9.0}\\n')
        sys.stdout.flush()
        return Step(reward=0.5)
    if action == "stdin":
        return Step(reward=len(sys.stdin.read()) + 0.5)
    if action == "children":
        return Step(reward=subprocess.run([sys.executable, "-c", "exit(3)"]).returncode)
    if action in VALUES:
        return Step(reward=VALUES[action])
    return Step(reward=float(action), info={"pid": os.getpid(), "calls": len(CALLS)})


class Single(Env):
    def tasks(self, split):
        return [{"number": n} for n in range(4 if split == "train" else 3)]

    def reset(self, task):
        self.number = task["number"]
        return f"task {self.number}"

    def step(self, action):
        return do(action.replace("NUMBER", str(self.number)))


class Two(Single):
    """Two turns: the first action is done, and the second one is worth a hundred times the first."""

    max_turns = 2

    def reset(self, task):
        self.first = None
        return super().reset(task)

    def step(self, action):
        if self.first is not None:
            return Step(reward=100 * self.first, info={"pid": os.getpid()})
        step = do(action)
        if isinstance(step, Step) and step.observation is None:
            step.observation = "go on"
            self.first = step.reward
        return step


class Prompts(Single):
    """Each task has a prompt of its own kind."""

    PROMPTS = [
        [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}],
        [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), "abc")],
        "\\u65e5\\u672c \\U0001f600 \\u2028 \\x00 {{ x }}",
        None, [], [1, "x"], [{"role": "user"}], 5, {"role": "user", "content": "q"}, ["content"], "raise",
    ]

    def tasks(self, split):
        return [{"prompt": n} for n in range(len(self.PROMPTS))]

    def reset(self, task):
        self.number, prompt = 0, self.PROMPTS[task["prompt"]]
        if prompt == "raise":
            raise LookupError("no such prompt")
        return prompt


class Child(Single):
    """Its tasks come from another program."""

    def tasks(self, split):
        return [{"number": subprocess.run([sys.executable, "-c", "exit(3)"]).returncode}]


class Talk(Single):
    """Says what it is told to as the next turn, and then takes an answer."""

    max_turns = 2
    turn = 0
    TEXTS = {"big": "0123456789" * 500_000, "empty": ""}
    TEXTS["unicode"] = "\\u65e5\\u672c \\U0001f600 \\u2028\\x00\\x85 \\"\\\\"

    def step(self, action):
        self.turn += 1
        if self.turn == 1:
            return Step(reward=0.0, observation=self.TEXTS[action])
        return Step(reward=float(action == "seen"))


class Async(Single):
    """A task of reset's event loop says what step waits for; what the policy said has its ids at hand."""

    async def say(self, queue):
        while True:
            await asyncio.sleep(0)
            await queue.put(self.number)

    async def reset(self, task):
        self.number, self.loop, self.queue = task["number"], asyncio.get_running_loop(), asyncio.Queue(1)
        LEFT.append(asyncio.create_task(self.say(self.queue)))
        return f"task {self.number}"

    async def step(self, action):
        if action == "hang":
            await asyncio.sleep(1000)
        if action == "raise":
            raise KeyError("the user's mistake")
        said, same = await self.queue.get(), asyncio.get_running_loop() is self.loop
        done, left = sum(task.cancelled() for task in LEFT), len(LEFT)
        info = {"same": same, "done": done, "left": left, "ids": str(self.action_ids)}
        return Step(reward=said + 1, observation="go on", info=info)


class AsyncTwo(Async):
    max_turns = 2


class Ids(Single):
    """Every prompt and observation is bytes as ids, as numpy has them."""

    max_turns = 3

    def reset(self, task):
        return list(np.frombuffer(b"<user>1<assistant>", np.uint8))

    async def step(self, action):
        over = self.action_ids[-1:] != [0]
        return Step(reward=1.0, observation=list(np.frombuffer(b"|", np.uint8)), terminated=over)
'''


@pytest.fixture(scope="module")
def user_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("user") / "envs.py"
    path.write_text(USER)
    return path


class ByteTokenizer:
    """A token is a byte; 0 ends a turn. The template's variables show in the prompt."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids) -> str:
        return bytes(ids).decode()

    def __len__(self) -> int:
        return 256

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **variables) -> str:
        assert not tokenize and add_generation_prompt
        shown = "".join(f"{{{key}={value}}}" for key, value in variables.items())
        return shown + "".join(f"<{m['role']}>{m['content']}\0" for m in messages) + "<assistant>"


class TalkingEngine(ScriptedEngine):
    """Says the next of `texts` where a first turn is asked for (greedily: of `greedy`), and then `later`."""

    greedy = iter(())

    def __init__(self, texts, later: str = "more", max_model_len: int = 2_000):
        super().__init__([], max_model_len)
        self.texts, self.later, self.prompts = iter(texts), later, []

    async def llm_generate(self, prompt, sampling, request_id):
        self.prompts.append(bytes(prompt["prompt_token_ids"]).decode())
        first = self.prompts[-1].count("<user>") == 1 or "<user>a\0" in self.prompts[-1]
        texts = self.texts if sampling["temperature"] else self.greedy
        texts = [next(texts) if first else self.later for _ in range(sampling["n"])]
        yield SimpleNamespace(outputs=[reply([*text.encode(), 0]) for text in texts])


def said(rollout: Rollout) -> str:
    """What the policy said in its first turn."""
    segment = rollout.segments[0]
    ids = segment.token_ids[: segment.turn_ends[0]][segment.action_mask[: segment.turn_ends[0]]]
    return bytes(ids.astype(np.uint8)).decode().removesuffix("\0")


async def play(pool, texts, *, index=0, later="more", engine=None, timeout_s=60.0, **prompt) -> list[Rollout]:
    """A group in which each rollout does one of `texts`."""
    prompt = {"system_prompt": None, "template_args": {}} | prompt
    return await rollout_group(
        engine or TalkingEngine(texts, later), ByteTokenizer(), pool, "train", index, ticket=3,
        group_size=len(texts), temperature=1.0, max_new_tokens=500, timeout_s=timeout_s, **prompt,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def opened(path: Path, name: str, episodes: int = 8, **flags):
    pool = EnvPool()
    await pool.start(f"{path}:{name}", EnvFlags(**flags), episodes)
    try:
        yield pool
    finally:
        pool.close()
        await asyncio.wait_for(pool.zygote.wait(), 10)


def with_pool(path: Path, name: str, body, **settings):
    """What `body(pool)` returns, with a pool of its own."""

    async def scenario():
        async with opened(path, name, **settings) as pool:
            return await body(pool)

    return asyncio.run(scenario())


def gone(pid: int) -> bool:
    """It has ended; one whose parent has died too may wait as a zombie for this machine's first process."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids, seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if not gone(pid)]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.02)


def below(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


class Session:
    """A pool that several tests use: `play` takes what the rollouts of a group do."""

    def __init__(self, path: Path, name: str):
        self.loop, self.pool = asyncio.new_event_loop(), EnvPool()
        self.run(self.pool.start(f"{path}:{name}", EnvFlags(env_timeout_s=30.0), 8))

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def play(self, *texts, **settings) -> list[Rollout]:
        return self.run(play(self.pool, texts, **settings))

    def close(self) -> None:
        self.pool.close()
        self.run(asyncio.wait_for(self.pool.zygote.wait(), 10))
        self.loop.close()


@pytest.fixture(scope="module", params=["Single", "Two"])
def session(request, user_file):
    """A pool of an environment of one turn, and of two."""
    session = Session(user_file, request.param)
    yield session
    session.close()


@pytest.fixture(scope="module")
def single(user_file):
    session = Session(user_file, "Single")
    yield session
    session.close()


# --- What goes wrong, and its reason

LINE = USER.splitlines().index('        raise KeyError("the user\'s mistake")') + 1
WRONG = {
    "raise": ("env_error", f'envs.py", line {LINE}, in do\n    raise KeyError("the user\'s mistake")'),
    "segfault": ("env_died", "its process died in "),
    "os._exit": ("env_died", ""),
    "sys.exit": ("env_died", ""),
    "abort": ("env_died", ""),
    "interrupt": ("env_died", ""),
    "NaN": ("bad_reward", "nan"),
    "np.nan": ("bad_reward", "nan"),
    "inf": ("bad_reward", "inf"),
    "-inf": ("bad_reward", "-inf"),
    "huge": ("bad_reward", ""),
    "text": ("bad_reward", "str"),
    "None": ("bad_reward", "NoneType"),
    "list": ("bad_reward", "list"),
    "array": ("bad_reward", "list"),
    "dict": ("bad_reward", "dict"),
    "a number": ("env_error", "float, not a Step"),
    "nothing": ("env_error", "NoneType, not a Step"),
    "a dict": ("env_error", "dict, not a Step"),
    "an object": ("env_error", "give plain values"),
    "a number as observation": ("env_error", "observation"),
    "a list as info": ("env_error", "info"),
    "a surrogate": ("env_error", "surrogates"),
    "no number": ("env_error", "could not convert string to float: 'no number'"),
}


@pytest.mark.parametrize("action", WRONG)
def test_what_a_step_does_wrong_makes_its_rollout_invalid_with_the_reason(session, action):
    reason, detail = WRONG[action]
    before, (rollout,), after = session.play("2"), session.play(action), session.play("3")
    assert rollout.invalid == reason
    assert detail in rollout.info["error"], rollout.info["error"]
    assert rollout.rewards == []
    assert rollout_metrics([rollout], [], 0, {}, {})["rollout/dropped/" + reason] == 1
    factor = 101 if session.pool.max_turns == 2 else 1
    for others, reward in ((before, 2.0), (after, 3.0)):
        assert [(other.invalid, other.reward) for other in others] == [(None, reward * factor)]


RIGHT = {"0": 0.0, "-0.5": -0.5, "True": 1.0, "False": 0.0, "np.float32": 0.5, "np.float64": 0.25,
         "np.int64": -3.0, "np.bool_": 1.0, "a subclass": 0.75, "alarm": 0.625, "main thread": 1.0,
         "no torch": 1.0, "prints": 0.5, "children": 3.0}  # fmt: skip


@pytest.mark.parametrize("action", RIGHT)
def test_what_is_a_reward(session, action):
    (rollout,) = session.play(action)
    assert rollout.invalid is None, rollout.info
    first, *second = rollout.rewards
    assert first == RIGHT[action] and type(first) is float
    assert second == ([100 * first] if session.pool.max_turns == 2 else [])


def test_a_score_and_what_else_a_step_tells_stay_with_the_rollout(single):
    (rollout,) = single.play("score")
    assert (rollout.reward, rollout.info["score"]) == (0.2, 0.75)
    assert rollout.info["note"] == "a\nb" and rollout.info["count"] == 3
    (rollout,) = single.play("0.5")
    assert rollout.info["score"] == 0.5, "without a score of its own it is the reward"


def test_an_environment_that_reads_from_stdin_gets_nothing_and_takes_nothing(user_file):
    read, write = os.pipe()
    os.write(write, b"for the driver\n")
    kept = os.dup(0)
    try:
        os.dup2(read, 0)
        (rollout,) = with_pool(user_file, "Single", lambda pool: play(pool, ["stdin"]), env_timeout_s=5.0)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert rollout.rewards == [0.5], rollout.info
    assert os.read(read, 100) == b"for the driver\n"
    os.close(read), os.close(write)


@pytest.mark.parametrize("name", ["Single", "Two"])
def test_a_step_that_does_not_end_is_killed_after_its_time(user_file, name):
    async def body(pool):
        (before,) = await play(pool, ["1"])
        start = time.monotonic()
        (hung,) = await play(pool, ["hang"])
        took = time.monotonic() - start
        wait_until_gone([before.info["pid"]])
        with pytest.raises(ProcessLookupError):
            os.kill(before.info["pid"], 0)
        (after,) = await play(pool, ["1"])
        return before, hung, after, took

    settings = {"episodes": 1, "env_workers": 1, "env_timeout_s": 1.0}
    before, hung, after, took = with_pool(user_file, name, body, **settings)
    assert hung.invalid == "env_timeout" and "() was not over after 1.0 s" in hung.info["error"]
    assert 1.0 <= took < 2.5
    assert after.invalid is None and after.rewards == before.rewards
    assert after.info["pid"] != before.info["pid"]


def test_what_a_hanging_step_has_started_is_killed_with_it(user_file, tmp_path, monkeypatch):
    child = tmp_path / "child"
    monkeypatch.setenv("CHILD_FILE", str(child))
    body = lambda pool: play(pool, ["hang in a child"])  # noqa: E731
    (rollout,) = with_pool(user_file, "Single", body, env_timeout_s=1.0)
    assert rollout.invalid == "env_timeout"
    wait_until_gone([int(child.read_text())])


@pytest.mark.parametrize("name, factor", [("Single", 1), ("Two", 101)])
def test_three_broken_rollouts_of_a_group_of_eight_cost_the_other_five_nothing(user_file, name, factor):
    actions = ["1", "segfault", "2", "hang", "3", "raise", "4", "5"]
    body = lambda pool: play(pool, actions)  # noqa: E731
    group = with_pool(user_file, name, body, env_timeout_s=2.0)
    reasons = {"segfault": "env_died", "hang": "env_timeout", "raise": "env_error"}
    assert sorted(map(said, group)) == sorted(actions)
    for rollout in group:
        action = said(rollout)
        assert rollout.invalid == reasons.get(action)
        if rollout.invalid is None:
            assert rollout.reward == factor * float(action)


def test_a_worker_is_replaced_after_its_leases_and_with_it_what_it_has_leaked(user_file, monkeypatch):
    monkeypatch.setattr(common.envs.pool, "LEASES", 3)

    async def body(pool):
        steps = [await pool.grader("train", 0)("1") for _ in range(7)]
        wait_until_gone([steps[0].info["pid"], steps[3].info["pid"]])
        return [(step.info["pid"], step.info["calls"]) for step in steps]

    seen = with_pool(user_file, "Single", body, env_workers=1)
    assert [calls for _, calls in seen] == [1, 2, 3, 1, 2, 3, 1]
    pids = [pid for pid, _ in seen]
    assert pids[:3] == [pids[0]] * 3 and pids[3:6] == [pids[3]] * 3 and len(set(pids)) == 3


def test_slow_environments_do_not_hold_up_the_event_loop(user_file, tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(
        "import time\nfrom common.env import Env, Step\n"
        "class Slow(Env):\n"
        "    def tasks(self, split):\n        return [{}]\n"
        "    def reset(self, task):\n        return 'q'\n"
        "    def step(self, action):\n        time.sleep(0.2)\n        return Step(reward=1.0)\n"
    )

    async def body(pool):
        late, calling = [], True

        async def tick():
            while calling:
                start = time.monotonic()
                await asyncio.sleep(0.01)
                late.append(time.monotonic() - start - 0.01)

        ticking = asyncio.ensure_future(tick())
        steps = await asyncio.gather(*(pool.grader("train", 0)("x") for _ in range(50)))
        calling = False
        await ticking
        return steps, late

    steps, late = with_pool(path, "Slow", body, env_workers=8)
    assert [step.reward for step in steps] == [1.0] * 50
    assert len(late) > 20 and max(late) < 0.2


@pytest.mark.parametrize("name, factor", [("Single", 1), ("Two", 101)])
def test_the_answer_of_a_cancelled_call_is_never_that_of_the_next(user_file, name, factor):
    async def body(pool):
        results = []
        for number in range(1, 4):
            results += await play(pool, ["slow"], timeout_s=0.3)
            results += await play(pool, [str(number)])
        return results

    slow, *results = with_pool(user_file, name, body, episodes=1, env_workers=1)
    assert [rollout.invalid for rollout in (slow, *results)] == ["timeout", None] * 3
    assert slow.info["error"] == "not over after 0.3 s"
    assert [rollout.reward for rollout in results[::2]] == [factor, 2 * factor, 3 * factor], "55 is late"


def test_calls_that_are_given_up_while_a_process_starts_leave_none_behind(user_file):
    async def body(pool):
        for _ in range(10):
            calls = asyncio.gather(*(pool.grader("train", 0)("slow") for _ in range(2)))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(calls, 0.003)
        steps = await asyncio.gather(*(pool.grader("train", 0)(str(n)) for n in (3, 4)))
        assert [step.reward for step in steps] == [3.0, 4.0]
        deadline = time.monotonic() + 10
        while len(left := below(pool.zygote.pid)) > 2:
            assert time.monotonic() < deadline, left
            await asyncio.sleep(0.02)

    with_pool(user_file, "Single", body, env_workers=2)


def test_a_quick_environment_is_graded_together_and_failures_still_stay_apart(single, monkeypatch):
    asked = []
    grade = EnvPool.grade

    def counted(self, split, index, actions):
        asked.append(len(actions))
        return grade(self, split, index, actions)

    monkeypatch.setattr(EnvPool, "grade", counted)
    single.pool.quick_calls = 0
    monkeypatch.setattr(common.envs.pool, "QUICK_CALLS", 2)
    monkeypatch.setattr(common.envs.pool, "QUICK_S", 5.0)
    group = single.play("1", "2", "3", "4", timeout_s=60.0)
    assert [rollout.reward for rollout in group] == [1.0, 2.0, 3.0, 4.0] and asked == [1, 1, 1, 1]
    asked.clear()
    group = single.play("1", "2", "segfault", "4", timeout_s=60.0)
    assert [rollout.invalid for rollout in group] == [None, None, "env_died", None]
    assert [rollout.reward for rollout in group if not rollout.invalid] == [1.0, 2.0, 4.0]
    assert asked == [4, 1], "all together, and after the crash the last one alone"
    asked.clear()
    single.play("1", "2", timeout_s=60.0)
    assert asked == [1, 1], "a failure ends the trust"


def test_rollouts_that_were_over_before_the_deadline_of_their_group_are_kept(single):
    group = single.play("1", "slow", "2", "slow", timeout_s=0.5)
    assert [rollout.invalid for rollout in group] == [None, "timeout", None, "timeout"]
    assert [rollout.reward for rollout in group[::2]] == [1.0, 2.0]


# --- The end of the processes


def test_the_end_of_the_first_process_is_an_error_and_no_hang(user_file):
    async def body(pool):
        workers = below(pool.zygote.pid)
        pool.zygote.kill()
        await pool.zygote.wait()
        wait_until_gone(workers)
        for _ in range(2):  # its worker is gone, and so is who could make another
            with pytest.raises((EnvError, OSError)):
                await asyncio.wait_for(pool.grader("train", 0)("1"), 10)

    with_pool(user_file, "Single", body, env_workers=1)


def test_closing_leaves_no_process(user_file):
    async def body(pool):
        running = asyncio.ensure_future(play(pool, ["hang", "1", "hang"]))
        while len(below(pool.zygote.pid)) < 3:
            await asyncio.sleep(0.02)
        pids = [pool.zygote.pid, *below(pool.zygote.pid)]
        pool.close()
        await asyncio.wait_for(pool.zygote.wait(), 10)
        wait_until_gone(pids)
        group = await asyncio.wait_for(running, 10)
        assert [rollout.invalid for rollout in group if said(rollout) == "hang"] == ["env_died"] * 2

    with_pool(user_file, "Two", body)


def test_a_killed_owner_leaves_no_process(user_file):
    script = (
        "import asyncio\n"
        "from common.env import EnvFlags\n"
        "from common.envs.pool import EnvPool\n"
        "async def main():\n"
        "    pool = EnvPool()\n"
        f"    await pool.start({f'{user_file}:Single'!r}, EnvFlags(env_timeout_s=1000), 1)\n"
        "    calls = [asyncio.ensure_future(pool.grader('train', 0)('hang')) for _ in range(3)]\n"
        "    while len(pool.free._queue) > 1:\n"
        "        await asyncio.sleep(0.01)\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.gather(*calls)\n"
        "asyncio.run(main())\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 10
        while len(pids := below(owner.pid)) < 4:  # the first process and three workers
            assert time.monotonic() < deadline, pids
            time.sleep(0.02)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    owner.stdout.close()
    wait_until_gone(pids)


def test_an_environment_that_cannot_be_imported_is_an_error(tmp_path, capfd):
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_this_name\n")

    async def scenario():
        pool = EnvPool()
        with pytest.raises(EnvError) as caught:
            await asyncio.wait_for(pool.start(f"{path}:Env", EnvFlags(), 1), 30)
        assert await asyncio.wait_for(pool.zygote.wait(), 10) != 0
        return caught.value

    error = asyncio.run(scenario())
    assert error.reason == "env_died" and "could not be loaded" in str(error)
    assert "No module named 'nothing_of_this_name'" in capfd.readouterr().err


# --- Prompts and observations


@pytest.fixture(scope="module")
def prompts(user_file):
    session = Session(user_file, "Prompts")
    yield session
    session.close()


def prompt_seen(session: Session, index: int, **prompt) -> str:
    engine = TalkingEngine(repeat("1"))
    (rollout,) = session.play("1", index=index, engine=engine, **prompt)
    assert rollout.invalid is None, rollout.info
    assert len(engine.prompts) == 1
    return engine.prompts[0]


def test_prompts_may_be_chat_messages_and_a_system_prompt_goes_before_those_without_one(prompts, single):
    other = "<user>a\0<assistant>b\0<user>c\0<assistant>"
    assert prompt_seen(prompts, 0) == "<system>own\0<user>q\0<assistant>"
    assert prompt_seen(prompts, 0, system_prompt="be brief") == "<system>own\0<user>q\0<assistant>"
    assert prompt_seen(prompts, 1) == other
    assert prompt_seen(prompts, 1, system_prompt="be brief") == "<system>be brief\0" + other
    assert prompt_seen(single, 2) == "<user>task 2\0<assistant>"
    assert prompt_seen(single, 2, system_prompt="be brief") == ("<system>be brief\0<user>task 2\0<assistant>")
    assert prompt_seen(prompts, 2) == "<user>\u65e5\u672c \U0001f600 \u2028 \x00 {{ x }}\0<assistant>"


def test_template_arguments_reach_the_template_in_every_turn(session):
    engine = TalkingEngine(["2"])
    template_args = {"enable_thinking": False, "style": "x"}
    (rollout,) = session.play("2", engine=engine, template_args=template_args)
    assert rollout.invalid is None and len(rollout.segments) == 1
    assert [p.startswith("{enable_thinking=False}{style=x}<user>") for p in engine.prompts] == [True] * len(
        engine.prompts
    )
    assert len(engine.prompts) == session.pool.max_turns == len(rollout.rewards)


@pytest.mark.parametrize("index", range(3, 11))
def test_what_is_no_prompt_makes_the_rollouts_invalid(prompts, index):
    group = prompts.play("1", "1", index=index)
    assert [rollout.invalid for rollout in group] == ["env_error"] * 2
    assert all(rollout.segments == [] for rollout in group)
    expected = "LookupError: no such prompt" if index == 10 else "not a string or chat messages"
    assert expected in group[0].info["error"]


def test_observations_come_through_whole(user_file):
    async def body(pool):
        texts = {"big": "0123456789" * 500_000, "empty": ""}
        texts["unicode"] = '\u65e5\u672c \U0001f600 \u2028\x00\x85 "\\'
        for action, text in texts.items():
            engine = TalkingEngine([action], "seen", max_model_len=6_000_000)
            (rollout,) = await play(pool, [action], engine=engine)
            assert rollout.invalid is None and rollout.rewards == [0.0, 1.0], rollout.info
            observation = engine.prompts[1].split("<user>")[2].removesuffix("\0<assistant>")
            assert len(observation) == len(text) and observation == text
        engine = TalkingEngine(["big"], "seen", max_model_len=100)
        (rollout,) = await play(pool, ["big"], engine=engine)
        assert rollout.invalid is None and rollout.rewards == [0.0] and rollout.truncated

    with_pool(user_file, "Talk", body, episodes=1)


@pytest.mark.parametrize("name, turns", [("Async", 1), ("AsyncTwo", 2)])
def test_an_environment_may_be_async_and_an_episode_has_one_loop(user_file, name, turns):
    async def body(pool):
        for episode in range(1, 4):
            (rollout,) = await play(pool, ["3"], index=2)
            assert rollout.invalid is None and rollout.rewards == [3.0] * turns, rollout.info
            assert rollout.info["same"], "a client made in reset() serves step()"
            assert rollout.info["ids"] == str([*(b"more" if turns == 2 else b"3"), 0])
            if turns == 2:
                assert (rollout.info["done"], rollout.info["left"]) == (episode - 1, episode), "it ended"
        broken = await play(pool, ["1", "raise", "hang", "2"], index=0)
        assert [rollout.invalid for rollout in broken] == [None, "env_error", "env_timeout", None]
        assert 'KeyError: "the user\'s mistake"' in broken[1].info["error"]

    with_pool(user_file, name, body, episodes=1, env_workers=1, env_timeout_s=3.0)


def test_ids_go_from_the_environment_to_the_engine_and_back_as_they_are(user_file):
    async def body(pool):
        engine = TalkingEngine(repeat("a"), max_model_len=100)
        (rollout,) = await play(pool, ["a"], engine=engine)
        assert engine.prompts == [
            "<user>1<assistant>",
            "<user>1<assistant>a\0|",
            "<user>1<assistant>a\0|a\0|",
        ]
        assert rollout.rewards == [1.0] * 3 and rollout.truncated, "the limit of turns is one"
        (rollout,) = await play(pool, ["a"], system_prompt="be brief")
        assert rollout.invalid == "bad_prompt" and "--system-prompt" in rollout.info["error"]

    with_pool(user_file, "Ids", body, episodes=1)


def test_the_example_in_the_documentation_of_environments_plays(tmp_path):
    example = common.env.__doc__.partition("in place of text:\n\n")[2].partition("\n\nIds reach")[0]
    assert "class Guess(Env):" in example and len(example.splitlines()) <= 20
    tokenizer = (
        "class AutoTokenizer:\n"
        "    def from_pretrained(name):\n        return AutoTokenizer()\n"
        "    def encode(self, text):\n        return list(text.encode())\n"
    )
    head = f"from common.env import Env, Step\n\nMODEL = 'bytes'\n{tokenizer}\n"
    (tmp_path / "guess.py").write_text(head + textwrap.dedent(example))
    said = iter(["50", "nonsense", "7", "7"])

    class Guesser(TalkingEngine):
        async def llm_generate(self, prompt, sampling, request_id):
            self.prompts.append(bytes(prompt["prompt_token_ids"]).decode())
            yield SimpleNamespace(outputs=[reply([*next(said).encode(), 0])])

    async def body(pool):
        engine = Guesser([])
        (rollout,) = await play(pool, [""], index=7, engine=engine)
        assert rollout.invalid is None and rollout.rewards == [-0.1, -0.1, 1.0], rollout.info
        context = "Guess my number, 0 to 99.\n> 50\0\nlower\n> nonsense\0\nlower\n> "
        assert engine.prompts[-1] == context and len(rollout.segments) == 1 and not rollout.truncated

    with_pool(tmp_path / "guess.py", "Guess", body, episodes=1)


def test_every_task_is_its_own_and_the_number_of_tasks_is_known(single):
    assert single.pool.num_tasks == {"train": 4, "eval": 3} and single.pool.max_turns == 1
    for index in range(4):
        (rollout,) = single.play("NUMBER", index=index)
        assert rollout.reward == index and rollout.prompt_id == str(index)


def test_tasks_may_be_made_by_a_child_whose_exit_code_is_seen(user_file):
    body = lambda pool: play(pool, ["NUMBER"])  # noqa: E731
    (rollout,) = with_pool(user_file, "Child", body)
    assert rollout.reward == 3.0


# --- What becomes of invalid rollouts


@pytest.mark.parametrize(
    "broken, reason", [("raise", "env_error"), ("os._exit", "env_died"), ("NaN", "bad_reward")]
)
def test_an_invalid_rollout_is_in_no_baseline_no_loss_and_no_average(session, broken, reason):
    # rewards 1, 0, -, 0: mean 1/3, squared deviations 2/3 over 2, std .5773503; a zero there would give 1.5
    group = session.play("1", "0", broken, "0")
    by_action = {said(rollout): rollout for rollout in group}
    assert by_action[broken].invalid == reason
    rows, advantages = make_rows(group, Args())
    assert len(rows) == 3 and by_action[broken].rollout_id not in advantages
    assert advantages[by_action["1"].rollout_id] == pytest.approx(1.1547005, abs=1e-6)
    assert sorted(advantages.values())[:2] == pytest.approx([-0.5773503] * 2, abs=1e-6)
    row = rollout_metrics(group, [], 0, {}, advantages)
    factor = 101 if session.pool.max_turns == 2 else 1
    assert row["reward/mean"] == pytest.approx(factor / 3, abs=1e-9) and row["reward/invalid_frac"] == 0.25
    assert row[f"rollout/dropped/{reason}"] == 1


def rollout_worker(session: Session, texts) -> RolloutWorker:
    worker = RolloutWorker()
    worker.args, worker.epoch, worker.order = Args(group_size=4), -1, None
    worker.envs = worker.eval_envs = session.pool
    worker.tokenizer, worker.engine = ByteTokenizer(), TalkingEngine(texts)
    worker.settings = {"max_new_tokens": 50, "timeout_s": 60.0, "system_prompt": None, "template_args": {}}
    return worker


def test_a_group_with_one_valid_rollout_is_dropped_and_the_reason_is_told(session):
    worker = rollout_worker(session, ["raise", "1", "raise", "raise"])
    group, drop = session.run(worker.produce_group(0))
    assert sum(not rollout.invalid for rollout in group) == 1
    reason, detail = drop
    assert reason == "env_error" and "the user's mistake" in detail


def test_a_group_with_two_valid_rollouts_is_trained_and_zeros_are_valid(session):
    worker = rollout_worker(session, ["0", "raise", "0", "os._exit"])
    group, drop = session.run(worker.produce_group(5))
    assert drop is None
    assert [rollout.reward for rollout in group if not rollout.invalid] == [0.0, 0.0]
    # ticket 5 is prompt 1 of the second epoch over four tasks
    assert {rollout.prompt_id for rollout in group} == {str(epoch_order(1, 1, 4, True)[1])}


def test_a_ticket_of_another_epoch_gets_the_prompt_of_that_epoch(single):
    worker = rollout_worker(single, repeat("NUMBER"))
    orders = [epoch_order(1, epoch, 4, True).tolist() for epoch in range(3)]
    assert len(set(map(tuple, orders))) > 1, "else it would not show"
    for ticket in (0, 9, 5, 2, 4, 11, 3):  # as they are handed out again by a run that goes on
        group, _ = single.run(worker.produce_group(ticket))
        assert {rollout.prompt_id for rollout in group} == {str(orders[ticket // 4][ticket % 4])}
        assert {rollout.reward for rollout in group} == {float(orders[ticket // 4][ticket % 4])}


def test_a_crashed_answer_is_a_wrong_one_in_an_evaluation(single):
    engine = TalkingEngine(iter(["1", "0", "score", "os._exit", "1", "1"]))
    engine.greedy = iter(["1", "raise", "0"])
    settings = {"max_new_tokens": 50, "timeout_s": 60.0, "system_prompt": None, "template_args": {}}
    scores = single.run(evaluate(
        engine, ByteTokenizer(), single.pool, range(0, 3), samples=2, temperature=0.8, **settings
    ))  # fmt: skip
    assert sorted(map(len, scores)) == [3, 3, 3] and json.loads(json.dumps(scores)) == scores
    assert sorted(greedy for greedy, *_ in scores) == [0.0, 0.0, 1.0]
    assert sorted(sorted(sampled) for _, *sampled in scores) == [[0.0, 0.75], [0.0, 1.0], [1.0, 1.0]]
