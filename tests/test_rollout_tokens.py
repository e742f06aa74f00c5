"""The multi-turn loop: sampled ids survive, glue is context, a broken record is an invalid rollout."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest

from algos.grpo import mark_late
from common.metrics import rollout_metrics
from common.agent import next_context
from common.rollout import Engine, read_completion, rollout_group, transcript
from common.sample import Rollout, Segment
from tests.fakes import (
    PIECES,
    PLAIN_TEMPLATE,
    THINKING_TEMPLATE,
    TOOL_TEMPLATE,
    InlineEnvs,
    ScriptedEngine,
    ScriptedEnv,
    ToyTokenizer,
    mark_tokenizer,
    observe,
    plain_tokenizer,
    reply,
    span,
)

EOT = PIECES.index("<eot>")


def play_group(engine, make_env, group_size=2, timeout_s=10.0, tokenizer=None) -> list[Rollout]:
    return asyncio.run(rollout_group(
        engine, tokenizer or plain_tokenizer(), InlineEnvs(make_env), "train", 3, ticket=7,
        group_size=group_size, temperature=0.7, max_new_tokens=20, timeout_s=timeout_s, system_prompt=None,
        template_args={},
    ))  # fmt: skip


def play_out(engine, env, tokenizer=None) -> Rollout:
    """One episode, as the rollout 7.0."""
    (rollout,) = play_group(engine, lambda: env, group_size=1, tokenizer=tokenizer)
    return rollout


def row(segment) -> tuple[list[int], list[int]]:
    return segment.token_ids.tolist(), segment.action_mask.astype(int).tolist()


# --- The toys themselves


def test_the_toy_tokenizer_is_one_that_would_show_a_round_trip():
    tokenizer = plain_tokenizer()
    assert tokenizer.encode("U:hello\nA:") == [12, 7, 11, 13]
    assert tokenizer.encode("\nU:o\nA:") == [11, 12, 4, 11, 13]
    assert tokenizer.decode([5, 6, 10]) == "hello<eot>"
    assert tokenizer.encode("hello<eot>") == [7, 10], "not the 5, 6 that were sampled"


# --- Token identity


def two_turns(first=None):
    engine = ScriptedEngine([
        first or reply([5, 6, 10], [-0.5, -1.0, -0.1]),
        reply([2, 10], [-0.7, -0.2], spans=[span(1, 0, 2)]),
    ])  # fmt: skip
    env = ScriptedEnv("hello", [observe("o", 0.25), observe(None, 1.0)])
    return engine, env, play_out(engine, env)


def test_sampled_ids_survive_although_their_text_tokenises_differently():
    engine, env, rollout = two_turns()
    (segment,) = rollout.segments
    ids, mask = row(segment)
    assert ids == [12, 7, 11, 13, 5, 6, 10, 11, 12, 4, 11, 13, 2, 10], "7 at index 4 went through text"
    assert mask == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert segment.logprobs[segment.action_mask].tolist() == np.float32([-0.5, -1, -0.1, -0.7, -0.2]).tolist()
    assert segment.versions[segment.action_mask].tolist() == [0, 0, 0, 1, 1]
    assert [request["prompt_ids"] for request in engine.requests_seen] == [ids[:4], ids[:12]]
    assert rollout.num_actions == 5 == engine.sampled_tokens
    assert env.actions == ["hello", "e"], "the environment sees text without the end-of-turn token"
    assert segment.turn_ends == [7, 14]
    assert rollout.rewards == [0.25, 1.0] and rollout.reward == 1.25 and rollout.invalid is None


def test_routes_are_asked_for_from_the_first_token_on_that_was_not_read_yet():
    def numbered(start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop, dtype=np.uint8)[:, None, None] + np.zeros((1, 2, 1), np.uint8)

    engine = ScriptedEngine([
        reply([5, 6, 10], routes=numbered(0, 6)),  # of a prompt of 4 and all but the last of 3
        reply([2, 10], routes=numbered(6, 13)),
    ])  # fmt: skip
    rollout = play_out(engine, ScriptedEnv("hello", [observe("o", 0.25), observe(None, 1.0)]))
    assert [request["routed_experts_prompt_start"] for request in engine.requests_seen] == [0, 6]
    (segment,) = rollout.segments
    assert segment.routed_experts[:, 1, 0].tolist() == [*range(13), 0] and len(segment.token_ids) == 14


def test_what_the_template_puts_after_the_end_of_turn_is_context():
    _, _, rollout = two_turns()
    ids, mask = row(rollout.segments[0])
    assert (ids[6:8], mask[6:8]) == ([EOT, 11], [1, 0]), "the line feed is there and was not sampled"


def test_an_end_of_turn_that_the_policy_did_not_sample_is_not_trained():
    # the first turn ends by length; the template closes it with <eot> and a line feed
    _, _, rollout = two_turns(first=reply([5, 6], [-0.5, -1.0], "length"))
    ids, mask = row(rollout.segments[0])
    assert ids == [12, 7, 11, 13, 5, 6, 10, 11, 12, 4, 11, 13, 2, 10]
    assert mask == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert rollout.num_actions == 4


def test_a_line_feed_cut_off_by_length_does_not_stand_in_for_the_one_of_the_template():
    tokenizer = ToyTokenizer(PIECES, {"<eot>"}, PLAIN_TEMPLATE.replace("<eot>", ""))
    engine = ScriptedEngine([reply([1, 11], finish="length"), reply([2, 10])])
    rollout = play_out(engine, ScriptedEnv("hello", [observe("o"), observe(None)]), tokenizer)
    ids, mask = row(rollout.segments[0])
    assert ids == [12, 7, 11, 13, 1, 11, 11, 12, 4, 11, 13, 2, 10]
    assert mask == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1]


def test_a_missing_glue_token_or_a_doubled_end_shows_in_the_delta():
    tokenizer = plain_tokenizer()
    rendered, full = "U:hello\nA:", "U:hello\nA:hello<eot>\nU:o\nA:"
    assert next_context(tokenizer, rendered, "hello", "<eot>", full) == ([11, 12, 4, 11, 13], False)
    assert next_context(tokenizer, rendered, "hello", "", full) == ([10, 11, 12, 4, 11, 13], False)


def test_all_sampling_fields_are_sent_and_the_room_shrinks_with_the_context():
    engine, _, _ = two_turns()
    first, second = engine.requests_seen
    assert first["temperature"] == second["temperature"] == 0.7
    assert (first["top_p"], first["top_k"], first["min_p"]) == (1.0, 0, 0.0), "no token is cut off"
    assert first["repetition_penalty"] == 1.0
    assert first["presence_penalty"] == first["frequency_penalty"] == 0.0
    assert first["stop_token_ids"] == [EOT] and first["logprobs"] == 0
    tight = ScriptedEngine([reply([5, 6, 10]), reply([2, 10])], max_model_len=15)
    play_out(tight, ScriptedEnv("hello", [observe("o"), observe(None)]))
    assert [request["max_tokens"] for request in tight.requests_seen] == [11, 3]  # 15 - 4 and 15 - 12


# --- History that the template rewrites


def rendered_prompts(template: str, action: str, after: dict) -> tuple:
    tokenizer = mark_tokenizer(template)
    messages = [{"role": "user", "content": "q1"}]

    def render(messages) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    full = render([*messages, {"role": "assistant", "content": action}, after])
    return tokenizer, render(messages), full


def test_a_new_user_turn_drops_the_thinking_and_forks():
    user = {"role": "user", "content": "q2"}
    tokenizer, rendered, full = rendered_prompts(THINKING_TEMPLATE, "<k>mm</k>a1", user)
    assert full == "<T>user:q1</T>\n<T>assistant:a1</T>\n<T>user:q2</T>\n<T>assistant:"
    ids, forked = next_context(tokenizer, rendered, "<k>mm</k>a1", "</T>", full)
    assert forked and ids == tokenizer.encode(full)


def test_a_tool_result_keeps_the_thinking_and_the_row():
    tool = {"role": "tool", "content": "r"}
    tokenizer, rendered, full = rendered_prompts(THINKING_TEMPLATE, "<k>mm</k>a1", tool)
    ids, forked = next_context(tokenizer, rendered, "<k>mm</k>a1", "</T>", full)
    assert not forked and ids == tokenizer.encode("\n<T>tool:r</T>\n<T>assistant:")


def test_neighbouring_tool_results_are_one_delta():
    tokenizer = mark_tokenizer(TOOL_TEMPLATE)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "call x2"}]
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    full = tokenizer.apply_chat_template([*messages, *results], tokenize=False, add_generation_prompt=True)
    assert full == "<T>U:q</T>\n<T>A:call x2</T>\n<T>U:<r>1</r><r>2</r></T>\n<T>A:"
    ids, forked = next_context(tokenizer, "<T>U:q</T>\n<T>A:", "call x2", "</T>", full)
    assert not forked and tokenizer.decode(ids) == "\n<T>U:<r>1</r><r>2</r></T>\n<T>A:"


def test_a_fork_trains_each_sampled_token_once_and_in_its_own_context():
    tokenizer = mark_tokenizer(THINKING_TEMPLATE)
    answers = [tokenizer.encode(text) for text in ("<k>mm</k>a1</T>", "<k>n</k>a2</T>", "a3</T>")]
    engine = ScriptedEngine([reply(ids) for ids in answers])
    env = ScriptedEnv("q1", [observe("q2"), observe("q3"), observe(None, 1.0)])
    rollout = play_out(engine, env, tokenizer)
    first = "<T>user:q1</T>\n<T>assistant:"
    second = first + "a1</T>\n<T>user:q2</T>\n<T>assistant:"
    contexts = [first, second, second + "a2</T>\n<T>user:q3</T>\n<T>assistant:"]
    assert env.actions == ["<k>mm</k>a1", "<k>n</k>a2", "a3"]
    assert len(rollout.segments) == 3
    for segment, context, answer, request in zip(rollout.segments, contexts, answers, engine.requests_seen):
        ids = tokenizer.encode(context)
        assert row(segment) == (ids + answer, [0] * len(ids) + [1] * len(answer))
        assert request["prompt_ids"] == ids
    assert rollout.num_actions == sum(map(len, answers)) == engine.sampled_tokens
    assert rollout_metrics([rollout], [], 0, {}, {})["rollout/forks_mean"] == 2


def test_tokens_whose_kv_is_computed_again_after_a_refit_are_counted():
    # prompt of 4, then 3 tokens of version 3 and 2 of version 4: at the refit 7 tokens stand there. Then a
    # tool's 2 tokens and one of version 5, before which 11 stand.
    mask = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1], bool)
    versions = np.array([-1, -1, -1, -1, 3, 3, 3, 4, 4, -1, -1, 5])
    logprobs = np.where(mask, -0.5, 0.0)
    crossing = Segment(np.arange(12), mask, logprobs, versions, [9, 12], "stop")
    calm = Segment(np.arange(12), mask, logprobs, np.where(mask, 3, -1), [9, 12], "stop")
    for segments, expected in (([crossing], 7 + 11), ([calm], 0), ([calm, crossing], 18)):
        rollout = Rollout("0.0", "g0", 0, "0", segments, [1.0])
        assert rollout_metrics([rollout], [], 0, {}, {})["rollout/reprefilled_tokens"] == expected
    crossing.action_mask[4:7] = (
        False  # --late mask takes stale tokens out of the loss: they were sampled still
    )
    rollout = Rollout("0.0", "g0", 0, "0", [crossing], [1.0])
    assert rollout_metrics([rollout], [], 0, {}, {})["rollout/reprefilled_tokens"] == 7 + 11


def test_a_turn_after_the_fork_whose_history_stays_goes_on_in_the_forked_row():
    tokenizer = mark_tokenizer(THINKING_TEMPLATE)
    answers = [tokenizer.encode(text) for text in ("<k>m</k>a</T>", "b</T>", "c</T>")]
    env = ScriptedEnv("q", [observe("r"), observe("s"), observe(None)])
    rollout = play_out(ScriptedEngine([reply(ids) for ids in answers]), env, tokenizer)
    assert [segment.num_actions for segment in rollout.segments] == [len(answers[0]), 4]
    assert [len(segment.turn_ends) for segment in rollout.segments] == [1, 2]
    assert tokenizer.decode(rollout.segments[1].token_ids) == (
        "<T>user:q</T>\n<T>assistant:a</T>\n<T>user:r</T>\n<T>assistant:b</T>\n"
        "<T>user:s</T>\n<T>assistant:c</T>"
    )


def test_a_template_that_trims_an_answer_forks_and_loses_nothing():
    tokenizer = mark_tokenizer("{% for m in msgs %}<T>{{ m.role }}:{{ m.content.strip() }}</T>\n{% endfor %}"
                               "{% if gen %}<T>assistant:{% endif %}")  # fmt: skip
    answers = [tokenizer.encode(text) for text in (" a </T>", "b</T>")]
    env = ScriptedEnv("q", [observe("r"), observe(None)])
    rollout = play_out(ScriptedEngine([reply(ids) for ids in answers]), env, tokenizer)
    assert [segment.num_actions for segment in rollout.segments] == [4, 2]
    assert tokenizer.decode(rollout.segments[0].token_ids).endswith("assistant: a </T>")


# --- Log-probs, versions and ids that do not fit

BROKEN = {
    "one log-prob too few": reply([5, 6, 10], [-0.5, -1.0]),
    "one log-prob too many": reply([5, 6, 10], [-0.5, -1.0, -0.1, -0.1], logprob_ids=[5, 6, 10]),
    "no log-probs": reply([5, 6, 10], []),
    "None": reply([5, 6, 10], [-0.5, None, -0.1]),
    "NaN": reply([5, 6, 10], [-0.5, math.nan, -0.1]),
    "-inf": reply([5, 6, 10], [-0.5, -math.inf, -0.1]),
    "a positive log-prob": reply([5, 6, 10], [-0.5, 0.3, -0.1]),
    "an entry without its id": reply([5, 6, 10], [-0.5, -1.0, -0.1], logprob_ids=[5, 10]),
    "another id": reply([5, 6, 10], [-0.5, -1.0, -0.1], logprob_ids=[5, 7, 10]),
    "a token of no version": reply([5, 6, 10], [-0.5, -1.0, -0.1], spans=[span(0, 0, 2)]),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_record_makes_its_rollout_invalid_with_the_place(broken):
    env = ScriptedEnv("hello", [observe("o", 1.0), observe(None, 1.0)])
    rollout = play_out(ScriptedEngine([broken]), env)
    assert rollout.invalid == "bad_record"
    assert "7.0" in rollout.info["error"] and "position" in rollout.info["error"], rollout.info["error"]
    assert rollout_metrics([rollout], [], 0, {}, {})["rollout/dropped/bad_record"] == 1
    assert rollout.segments == [] and env.actions == [], "nothing of it is scored or trained"


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_record_spares_the_other_rollouts_of_the_group(broken):
    engine = ScriptedEngine([reply([7, 10]), broken, reply([2, 10])])
    group = play_group(engine, lambda: ScriptedEnv("hello", [observe(None, 1.0)]), group_size=3)
    assert [rollout.invalid for rollout in group] == [None, "bad_record", None]
    assert [rollout.num_actions for rollout in group] == [2, 0, 2]


@pytest.mark.parametrize("logprobs", [[-0.5, -1.0, -0.1], [-0.5, 0.0, -0.1], [-0.5, 3e-5, -0.1]])
def test_logprobs_up_to_rounding_above_zero_are_fine(logprobs):
    rollout = play_out(ScriptedEngine([reply([5, 6, 10], logprobs)]), ScriptedEnv("hello", [observe(None)]))
    assert rollout.invalid is None
    assert rollout.segments[0].logprobs[4:].tolist() == np.float32(logprobs).tolist()


def test_an_empty_completion_is_legal():
    env = ScriptedEnv("hello", [observe(None, 0.5)])
    rollout = play_out(ScriptedEngine([reply([])]), env)
    assert rollout.invalid is None and rollout.num_actions == 0 and rollout.reward == 0.5
    assert row(rollout.segments[0]) == ([12, 7, 11, 13], [0, 0, 0, 0]) and env.actions == [""]


def test_a_request_that_crosses_a_refit_has_both_versions():
    completion = read_completion(reply([1, 2, 3, 4, 10], spans=[span(3, 0, 3), span(4, 3, 5)]))
    assert completion.versions.tolist() == [3, 3, 3, 4, 4]
    assert len(completion.logprobs) == 5


def test_answers_that_a_refit_aborted_are_sampled_again_and_leave_no_trace():
    # two of three come whole; the third is aborted twice, once before its first token
    whole = [reply([5, 10]), reply([6, 10])]
    aborted = [reply([7, 7], finish="abort"), reply([], finish="abort")]
    engine = ScriptedEngine([whole[0], aborted[0], whole[1], aborted[1], reply([8, 10])])
    group = play_group(engine, lambda: ScriptedEnv("hello", [observe(None)]), group_size=3)
    assert [request["n"] for request in engine.requests_seen] == [3, 1, 1]
    assert len({tuple(request["prompt_ids"]) for request in engine.requests_seen}) == 1
    assert sorted(rollout.segments[0].token_ids.tolist()[4:] for rollout in group) == [
        [5, 10],
        [6, 10],
        [8, 10],
    ]
    assert [rollout.invalid for rollout in group] == [None] * 3 and engine.sampled_tokens == 6


# --- The end of a turn


def test_stop_tokens_are_trained_where_they_were_sampled_and_nowhere_else():
    # padding is 0, the EOS 10; A stops, B is cut at five tokens, C is the EOS alone, E has another stop token
    sampled = {"A": ([7, 8, 10], "stop"), "B": ([7, 8, 9, 6, 5], "length"), "C": ([10], "stop"),
               "E": ([7, 3], "stop")}  # fmt: skip
    engine = ScriptedEngine([reply(ids, finish=finish) for ids, finish in sampled.values()])
    group = play_group(engine, lambda: ScriptedEnv("hello", [observe(None)]), group_size=4)
    assert len(engine.requests_seen) == 1, "a single-turn group is one request"
    for rollout, (ids, finish) in zip(group, sampled.values()):
        assert row(rollout.segments[0]) == ([12, 7, 11, 13, *ids], [0] * 4 + [1] * len(ids))
        assert rollout.truncated == (finish == "length")
    assert sum(rollout.num_actions for rollout in group) == 11, "9 leaves out the ids that equal the padding"


def test_a_sampled_token_whose_id_is_that_of_padding_is_an_action():
    rollout = play_out(ScriptedEngine([reply([0, 7, 10])]), ScriptedEnv("hello", [observe(None)]))
    assert row(rollout.segments[0])[1] == [0, 0, 0, 0, 1, 1, 1]


def test_an_episode_whose_next_turn_does_not_fit_is_truncated():
    # 4 prompt tokens, 3 sampled and 5 of context make 12: no room for a second answer
    engine = ScriptedEngine([reply([5, 6, 10])], max_model_len=12)
    rollout = play_out(engine, ScriptedEnv("hello", [observe("o", 0.5), observe(None)]))
    assert rollout.invalid is None and rollout.rewards == [0.5]
    assert row(rollout.segments[0])[0] == [12, 7, 11, 13, 5, 6, 10], "context without an answer is left out"
    assert rollout.truncated


@pytest.mark.parametrize("max_turns", [1, 2])
def test_a_prompt_that_leaves_no_room_is_no_rollout_with_a_reward_of_zero(max_turns):
    steps = [observe("o", 1.0), observe(None, 1.0)][-max_turns:]
    group = play_group(ScriptedEngine([], max_model_len=4), lambda: ScriptedEnv("hello", steps))
    assert all(rollout.invalid for rollout in group)


# --- What the environment does


BAD_STEPS = {
    "raises": (RuntimeError("sandbox died"), "env_error", "sandbox died"),
    "no Step": (1.0, "env_error", "float"),
    "None reward": (observe(None, None), "bad_reward", "NoneType"),
    "NaN reward": (observe(None, math.nan), "bad_reward", "nan"),
    "text reward": (observe(None, "1"), "bad_reward", "str"),
}


@pytest.mark.parametrize("step, reason, detail", BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_step_without_a_reward_makes_the_rollout_invalid_with_a_reason(step, reason, detail):
    rollout = play_out(ScriptedEngine([reply([7, 10])]), ScriptedEnv("hello", [step]))
    assert rollout.invalid == reason and detail in rollout.info["error"]


def test_an_environment_that_never_ends_stops_at_its_limit_of_turns():
    engine = ScriptedEngine([reply([7, 10]), reply([2, 10]), reply([4, 10])])
    steps = [observe("o", 0.1), observe("o", 0.2), observe("o", 0.3)]
    rollout = play_out(engine, ScriptedEnv("hello", steps))
    assert len(engine.requests_seen) == 3 and len(rollout.segments[0].turn_ends) == 3
    assert rollout.reward == pytest.approx(0.6) and rollout.truncated


@pytest.mark.parametrize(
    "ends, truncated",
    [
        ({"terminated": True}, False),
        ({"truncated": True}, True),
        ({"terminated": True, "truncated": True}, False),  # gymnasium allows both: nothing was to come
    ],
)
@pytest.mark.parametrize("observation", [None, "o", [4]])
def test_a_closing_observation_ends_the_episode_without_another_turn(observation, ends, truncated):
    engine = ScriptedEngine([reply([7, 10]), reply([2, 10])])
    steps = [observe("o", 0.5), observe(observation, 1.0, **ends), observe(None)]
    rollout = play_out(engine, ScriptedEnv("hello", steps))
    assert engine.replies == [] and rollout.rewards == [0.5, 1.0] and rollout.invalid is None
    assert rollout.truncated == truncated
    assert row(rollout.segments[0])[0] == [12, 7, 11, 13, 7, 10, 11, 12, 4, 11, 13, 2, 10]


def test_a_last_turn_that_was_cut_counts_as_truncated_whatever_the_environment_says():
    for ends in ({}, {"terminated": True}, {"truncated": True}):
        env = ScriptedEnv("hello", [observe(None, 1.0, **ends)])
        assert play_out(ScriptedEngine([reply([7], finish="length")]), env).truncated


# --- Token ids in place of text


def test_a_prompt_and_observations_of_ids_are_used_as_they_are():
    # "he" + "llo" and two line feeds: a round trip through text would give other ids, a template more of them
    engine = ScriptedEngine([reply([5, 6, 10]), reply([1, 3], finish="length"), reply([2, 10])])
    env = ScriptedEnv([5, 6, 11], [observe([11, 5, 6], 0.25), observe([10, 13]), observe(None, 1.0)])
    rollout = play_out(engine, env)
    ids, mask = row(rollout.segments[0])
    assert rollout.invalid is None and len(rollout.segments) == 1, rollout.info
    assert ids == [5, 6, 11] + [5, 6, 10] + [11, 5, 6] + [1, 3] + [10, 13] + [2, 10]
    assert mask == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 2 + [0] * 2 + [1] * 2
    assert [request["prompt_ids"] for request in engine.requests_seen] == [ids[:3], ids[:9], ids[:13]]
    assert env.actions == ["hello", "hl", "e"]
    assert env.sampled == [[5, 6, 10], [1, 3], [2, 10]], "it sees whether a turn came to its end"
    assert rollout.rewards == [0.25, 0.0, 1.0] and not rollout.truncated


def test_ids_may_follow_a_prompt_of_text_and_may_be_none():
    engine = ScriptedEngine([reply([7, 10]), reply([2, 10]), reply([4, 10])])
    env = ScriptedEnv("hello", [observe("o"), observe([]), observe(None, 1.0)])
    rollout = play_out(engine, env)
    assert row(rollout.segments[0])[0] == [12, 7, 11, 13, 7, 10, 11, 12, 4, 11, 13, 2, 10, 4, 10]
    assert rollout.segments[0].turn_ends == [6, 13, 15]


def test_a_prompt_of_ids_needs_one_turn_alone_as_well():
    env = ScriptedEnv([7, 11], [observe(None, 1.0)])
    group = play_group(ScriptedEngine([reply([5, 10]), reply([6, 10])]), lambda: env)
    assert [row(rollout.segments[0])[0] for rollout in group] == [[7, 11, 5, 10], [7, 11, 6, 10]]


@pytest.mark.parametrize(
    "prompt, observations, detail",
    [
        ([7], ["o"], "gave text after token ids"),
        ("hello", [[7], "o"], "gave text after token ids"),
        ("hello", [[7, 14]], "token id 14: the tokenizer has 14"),
        ([14], [], "token id 14: the tokenizer has 14"),
        ("hello", [[-1]], "no text and no list of token ids"),
        ("hello", [[1.0]], "no text and no list of token ids"),
        ("hello", [[True]], "no text and no list of token ids"),
        ("hello", [["o"]], "no text and no list of token ids"),
        ([], [], "not a string or chat messages, nor token ids"),
        ([7, -1], [], "not a string or chat messages, nor token ids"),
    ],
)
def test_ids_that_nothing_can_be_done_with_cost_the_rollout(prompt, observations, detail):
    engine = ScriptedEngine([reply([7, 10])] * 3)
    env = ScriptedEnv(prompt, [*map(observe, observations), observe(None, 1.0), observe(None, 1.0)])
    rollout = play_out(engine, env)
    assert rollout.invalid == "env_error" and detail in rollout.info["error"]


def test_an_episode_past_its_deadline_is_invalid_and_the_finished_ones_are_kept():
    engine = ScriptedEngine([reply([7, 10]), "hang", reply([2, 10])])
    steps = lambda: [observe(None, 1.0), observe(None)]  # noqa: E731  two turns, so that each asks for itself
    group = play_group(engine, lambda: ScriptedEnv("hello", steps()), group_size=3, timeout_s=0.2)
    assert [rollout.invalid for rollout in group] == [None, "timeout", None]
    assert "0.2" in group[1].info["error"]


def test_rollouts_of_a_group_share_their_group_and_keep_their_own_names():
    engine = ScriptedEngine([reply([7, 10]), reply([2, 10])])
    group = play_group(engine, lambda: ScriptedEnv("hello", [observe(None, 1.0)]))
    assert [(r.rollout_id, r.group_id, r.ticket, r.prompt_id) for r in group] == [
        ("7.0", "g7", 7, "3"), ("7.1", "g7", 7, "3"),
    ]  # fmt: skip


def test_a_transcript_shows_what_was_sampled_also_where_it_came_too_late_to_train():
    _, _, rollout = two_turns()  # the first turn by version 0, the second by version 1
    before = transcript(rollout, plain_tokenizer(), 0.5)
    assert (before["prompt"], before["transcript"]) == ("U:hello\nA:", "hello<eot>\nU:o\nA:e<eot>")
    assert (before["versions"], before["num_actions"]) == ([0, 1], 5)
    mark_late([rollout], 2, 1, "mask")
    assert rollout.num_actions == 2
    assert transcript(rollout, plain_tokenizer(), 0.5) == before


def test_a_request_that_the_engine_ended_with_an_error_is_no_answer_without_tokens():
    class Failing:
        async def generate(self, *_, **__):
            output = SimpleNamespace(finish_reason="error", token_ids=[])
            yield SimpleNamespace(outputs=[output], prompt_token_ids=[1])

    engine = Engine.__new__(Engine)
    engine.llm, engine.requests, engine.adapter = Failing(), 0, {}
    with pytest.raises(RuntimeError, match="ended a request with an error"):
        asyncio.run(engine._ask([1], None))
