"""`ChatAgent`s as a run plays them: in worker processes, against the server in the engine's process."""

import asyncio
import json
import os
import time
from pathlib import Path

import httpx
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from common.env import EnvFlags
from common.envs.pool import EnvPool
from common.rollout import rollout_group
from common.sample import Rollout
from tests.chat import random_engine

EXAMPLES = "scripts/examples/"


def play(served, spec: str, group_size: int = 2, temperature: float = 1.0, timeout_s: float = 60,
         max_new_tokens: int = 12, index: int = 0, flags: EnvFlags | None = None) -> list[Rollout]:  # fmt: skip
    async def group():
        envs = EnvPool()
        await envs.start(spec, flags or EnvFlags(), episodes=group_size)
        try:
            return await rollout_group(
                served.engine, served.tokenizer, envs, "train", index, ticket=5, group_size=group_size,
                temperature=temperature, max_new_tokens=max_new_tokens, timeout_s=timeout_s, system_prompt=None,
                template_args={},
            )  # fmt: skip
        finally:
            envs.close()

    return served.call(group())


def agent_file(tmp_path, body: str, head: str = "") -> str:
    """A file with the agent A whose run() is `body`."""
    lines = "\n".join("        " + line for line in body.splitlines())
    (tmp_path / "agent.py").write_text(
        "import asyncio, os, sys, time\nfrom openai import AsyncOpenAI, OpenAI\n"
        "from common.agent import ChatAgent\nfrom common.env import Step\n"
        f"class A(ChatAgent):\n    {head}\n    def tasks(self, split):\n        return [{{'n': 1}}]\n"
        f"    async def run(self, ctx):\n        client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)\n"
        "        async def say(*texts):\n"
        "            messages = [{'role': ('user', 'assistant')[i % 2], 'content': t} for i, t in enumerate(texts)]\n"
        "            reply = await client.chat.completions.create(model=ctx.model, messages=messages)\n"
        "            return reply.choices[0].message.content\n"
        f"{lines}\n"
    )
    return f"{tmp_path / 'agent.py'}:A"


# --- The examples


def test_calculator(served):
    for rollout in play(served, EXAMPLES + "calculator.py:Calculator", group_size=4):
        assert rollout.invalid is None and len(rollout.rewards) == 1
        assert rollout.num_actions == rollout.num_sampled > 0 and 0 <= rollout.info["score"] <= 1


def test_two_interleaved_sub_agents_are_two_segments_linear_in_their_turns(served):
    for rollout in play(served, EXAMPLES + "sub_agents.py:SubAgents", max_new_tokens=6):
        assert rollout.invalid is None
        assert len(rollout.segments) == 2 and [len(s.turn_ends) for s in rollout.segments] == [4, 4]
        assert all(len(segment.token_ids) < 4 * 40 for segment in rollout.segments)
        texts = [served.tokenizer.decode(segment.token_ids) for segment in rollout.segments]
        assert {text.split("<|im_end|>")[0] for text in texts} == {
            "<|im_start|>system\nup", "<|im_start|>system\ndown",
        }  # fmt: skip


def test_the_judge_gives_rewards_and_is_not_trained_on(served):
    for rollout in play(served, EXAMPLES + "judge.py:Judged"):
        (segment,) = rollout.segments
        assert rollout.reward in (0.0, 1.0) and len(segment.turn_ends) == 1
        assert "Good?" not in served.tokenizer.decode(segment.token_ids)


def test_compaction_forks_and_trains_both_parts(served):
    for rollout in play(served, EXAMPLES + "compaction.py:Compaction"):
        assert rollout.invalid is None and len(rollout.segments) >= 2
        first, *rest = [served.tokenizer.decode(segment.token_ids) for segment in rollout.segments]
        assert "sum up" in first and all(text.startswith("<|im_start|>system\n") for text in rest)


def test_anthropic_sdk(served):
    for rollout in play(served, EXAMPLES + "claude_sdk.py:Clock"):
        assert rollout.invalid is None and rollout.num_actions == rollout.num_sampled > 0


@pytest.mark.parametrize("kind", ["LookupEnv", "LookupAgent"])
def test_a_task_as_an_env_and_as_an_agent_is_the_same_tokens(served, kind):
    for rollout in play(served, f"{EXAMPLES}lookup.py:{kind}", group_size=4, index=3):
        (segment,) = rollout.segments
        first, second = served.tokenizer.decode(segment.token_ids).split("<|im_start|>user\n")[1:]
        assert (
            first[:4].isdigit()
            and second[:4].isdigit()
            and len(segment.turn_ends) == len(rollout.rewards) == 2
        )


def test_examples_are_short():
    for path in Path(EXAMPLES).glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path


# --- What an agent may return, and what it may do wrong


def test_rewards_scores_and_infos_come_back(served, tmp_path):
    body = "a = await say('count')\nb = await say('count', a, 'again')\n"
    (rollout,) = play(served, agent_file(tmp_path, body + "return [0.25, 1]"), 1)
    assert rollout.rewards == [0.25, 1.0] and rollout.reward == 1.25 and rollout.info["score"] == 1.25
    body += "return Step(reward=2.0, score=0.5, info={'b': b}, truncated=True)"
    (rollout,) = play(served, agent_file(tmp_path, body), 1, temperature=0.0, max_new_tokens=60)
    assert rollout.rewards == [2.0] and rollout.info == {"score": 0.5, "b": "no more"} and rollout.truncated
    assert [len(segment.turn_ends) for segment in rollout.segments] == [2]


def test_rewards_of_interleaved_conversations_go_with_their_replies(served, tmp_path):
    body = "a = await say('one')\nb = await say('two')\nc = await say('one', a, 'x')\nd = await say('two', b, 'x')\n"
    (rollout,) = play(served, agent_file(tmp_path, body + "return [1, 2, 3, 4]"), 1)
    assert [len(segment.turn_ends) for segment in rollout.segments] == [2, 2]
    assert rollout.rewards == [1, 3, 2, 4], "the rewards of a rollout are in the order of its segments"


def test_a_greedy_reply_with_several_choices_is_one_said_several_times(served, tmp_path):
    body = (
        "messages = [{'role': 'user', 'content': 'count'}]\n"
        "reply = await client.chat.completions.create(model=ctx.model, messages=messages, n=3)\n"
        "return Step(reward=len(reply.choices), info={'same': float(len({c.message.content for c in reply.choices}))})"
    )
    (rollout,) = play(served, agent_file(tmp_path, body), 1, temperature=0.0)
    assert rollout.reward == 3 and rollout.info["same"] == 1 and len(rollout.segments) == 3


WRONG = {
    "await say('count')\nreturn [1, 2, 3]": "bad_reward",
    "await say('count')": "bad_reward",
    "await say('count')\nreturn float('nan')": "bad_reward",
    "await say('count')\nreturn 'good'": "bad_reward",
    "return 1.0": "no_turns",
    "await say('count')\nraise KeyError('broken tool')": "env_error",
    "await say('count')\nos._exit(3)": "env_died",
    "await say('count')\nsys.exit(0)": "env_died",
    "await say('long ' * 1000)\nreturn 1.0": "env_error",
    "await say('count')\nawait asyncio.sleep(60)": "timeout",
    "await say('count')\ntime.sleep(60)": "timeout",
}


@pytest.mark.parametrize("body", WRONG, ids=lambda body: body.splitlines()[-1])
def test_what_an_agent_does_wrong_costs_its_own_rollout(served, tmp_path, body):
    start = time.monotonic()
    (rollout,) = play(served, agent_file(tmp_path, body), 1, timeout_s=5 if "sleep" in body else 60)
    assert rollout.invalid == WRONG[body] and rollout.info["error"]
    assert time.monotonic() - start < 40 and not served.server.sessions, "the session is closed"


def test_agents_run_outside_the_engines_process_and_without_its_settings(served, tmp_path):
    body = (
        "await say('count')\nreturn Step(reward=1.0, info={'pid': str(os.getpid()), 'env': dict(os.environ)})"
    )
    first, second = play(served, agent_file(tmp_path, body), 2)
    assert len({first.info["pid"], second.info["pid"], str(os.getpid())}) == 3
    assert not [name for name in first.info["env"] if name.startswith("VLLM_")]
    assert first.info["env"]["RAY_AUTH_TOKEN"] != os.environ["RAY_AUTH_TOKEN"], "Ray is the run's own"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_ends_the_run_instead_of_costing_rollouts(served, tmp_path, stream):
    def die(_):
        raise EngineDeadError

    body = "messages = [{'role': 'user', 'content': 'count'}]\n"
    body += f"await client.chat.completions.create(model=ctx.model, messages=messages, stream={stream})\n"
    with random_engine(served) as engine:
        engine.say = die
        with pytest.raises(EngineDeadError):
            play(served, agent_file(tmp_path, body + "await asyncio.sleep(60)\nreturn 1.0"), 1)
    assert not served.server.sessions


def test_a_proxy_is_not_asked_for_the_server(served, tmp_path, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    body = "await say('count')\nreturn Step(reward=1.0, info={'hosts': os.environ['NO_PROXY']})"
    (rollout,) = play(served, agent_file(tmp_path, body), 1)
    assert rollout.invalid is None and "example.org,127.0.0.1" in rollout.info["hosts"]


def test_a_slow_agent_blocks_nobody(served, tmp_path):
    async def both():
        slow, quick = EnvPool(), EnvPool()
        (tmp_path / "slow").mkdir()
        await slow.start(
            agent_file(tmp_path / "slow", "time.sleep(8)\nawait say('count')\nreturn 0"), EnvFlags(), 1
        )
        await quick.start(agent_file(tmp_path, "await say('count')\nreturn 1"), EnvFlags(), 4)
        settings = {"temperature": 1.0, "max_new_tokens": 4, "timeout_s": 60, "system_prompt": None}

        async def group(envs, size):
            rollouts = await rollout_group(
                served.engine, served.tokenizer, envs, "train", 0, ticket=0, group_size=size, template_args={},
                **settings,
            )  # fmt: skip
            return rollouts, time.monotonic()

        (slow_rollouts, slow_end), (quick_rollouts, quick_end) = await asyncio.gather(
            group(slow, 1), group(quick, 4)
        )
        slow.close()
        quick.close()
        return slow_rollouts, quick_rollouts, slow_end, quick_end

    slow_rollouts, quick_rollouts, slow_end, quick_end = served.call(both())
    assert [rollout.reward for rollout in slow_rollouts + quick_rollouts] == [0, 1, 1, 1, 1]
    assert quick_end < slow_end


def test_a_session_ends_with_its_episode(served, tmp_path):
    body = "await say('count')\nreturn Step(reward=1.0, info={'key': ctx.api_key, 'url': ctx.base_url})"
    (rollout,) = play(served, agent_file(tmp_path, body), 1)
    reply = httpx.get(rollout.info["url"] + "/models", headers={"x-api-key": rollout.info["key"]})
    assert reply.status_code == 401 and json.loads(reply.content)["error"]["message"]
