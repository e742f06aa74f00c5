"""Token identity through the whole server: random conversations against an engine that samples at random.

vLLM's handlers, renderer and parsers are the real ones; only what samples is a stand-in (`RandomEngine`), so
that replies can be anything, among them tool calls, thinking, and characters where the tokenizer has a word.
The oracle keeps each conversation's ids itself and uses nothing of the recorder.
"""

import asyncio
import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import anthropic
import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from common.agent import Recorder, Turn
from common.chat_server import same_json
from common.rollout import Completion
from tests.chat import CALC, random_engine
from tests.fakes import THINKING_TEMPLATE, TOOL_TEMPLATE, mark_tokenizer, plain_tokenizer

CALL_TEXT = (
    "{% for call in m['tool_calls'] or [] %}<tool_call>\n"
    '{"name": "{{ call["function"]["name"] }}", "arguments": {{ call["function"]["arguments"] | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
# Drops the thoughts of all turns before the last user message.
STRIPPING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% set text = (m['content'] or '') | string %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}{{ text.split('</k>')[-1] }}"
    "{% else %}{{ text }}{% endif %}" + CALL_TEXT + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Puts neighbouring tool results into one turn.
GROUPING = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0-1]['role'] != 'tool' %}<|im_start|>user\n{% endif %}"
    "<r>{{ m['content'] }}</r>"
    "{% if loop.last or messages[loop.index0+1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}" + CALL_TEXT + "<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def post(served, session, body: dict, wire: str = "/v1/chat/completions", **headers) -> dict:
    """The reply's message (OpenAI's shape), whether it streams or not."""
    reply = served.http.post(
        served.server.url + wire,
        json={"model": "policy"} | body,
        headers={"x-api-key": session.key} | headers,
    )
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return reply.json()["choices"][0]["message"]
    message = {"role": "assistant", "content": ""}
    for line in reply.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if delta.get("reasoning_content"):
                message["reasoning_content"] = (
                    message.get("reasoning_content", "") + delta["reasoning_content"]
                )
            for call in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append(
                        {"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}}
                    )
                for name in ("name", "arguments"):
                    calls[call["index"]]["function"][name] += call["function"].get(name) or ""
    return message


@pytest.fixture(scope="module", autouse=True)
def http(served):
    with httpx.Client(timeout=60) as client:
        served.http = client
        yield


def shuffled(message: dict) -> dict:
    """The same assistant turn as another client would send it: arguments in another order and spacing."""
    message = json.loads(json.dumps(message))
    for call in message.get("tool_calls", []):
        with contextlib.suppress(ValueError):
            arguments = json.loads(call["function"]["arguments"])
            if isinstance(arguments, dict):
                call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
    return message


class Oracle:
    """One conversation: its messages, the exact ids so far, and whether the next request must go on from
    them. With the stripping template a user message takes the thoughts out of every earlier turn."""

    def __init__(self, number: int, strips: bool):
        self.messages, self.ids, self.strips = [{"role": "user", "content": f"start {number}"}], None, strips

    def follow(self, role: str, content: str) -> None:
        last = self.messages[-1]
        ids = [call["id"] for call in last.get("tool_calls", [])] or ["none"]
        if role == "tool":
            self.messages += [{"role": "tool", "tool_call_id": i, "content": content} for i in ids]
            return
        self.messages.append({"role": "user", "content": content})
        if self.strips and any(
            "</k>" in (m.get("content") or "") for m in self.messages if m["role"] == "assistant"
        ):
            self.ids = None


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which conversation
        st.sampled_from(["user", "user", "tool", "retry", "resample", "branch", "compact", "edit", "judge"]),
        st.booleans(),  # stream
    ),
    min_size=1, max_size=14,
)  # fmt: skip


@pytest.mark.parametrize("template", [None, STRIPPING, GROUPING], ids=["chatml", "stripping", "grouping"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS)
def test_every_prompt_is_the_recorded_prefix_and_every_sampled_token_is_trained_once(served, template, steps):
    with random_engine(served, template) as engine, served.session(temperature=1.0) as session:
        talks = [Oracle(number, template is STRIPPING) for number in range(3)]
        sent: dict[int, tuple[dict, dict]] = {}  # of each conversation: the last request and its reply
        prompts: dict[int, list[int]] = {}
        asked = {"tools": [CALC], "tool_choice": "auto"}
        for which, action, stream in steps:
            talk, before = talks[which], len(engine.requests)
            if action == "judge":
                post(served, session, {"messages": talk.messages}, "/judge/v1/chat/completions")
                del engine.requests[before:]
                continue
            if action == "retry" and which in sent:
                again = post(served, session, sent[which][0], **{"x-stainless-retry-count": "2"})
                assert again == sent[which][1] and len(engine.requests) == before
                continue
            if action == "resample" and which in sent:
                sent[which] = sent[which][0], post(served, session, sent[which][0])
                (prompt_ids, _) = engine.requests[-1]
                assert prompt_ids == prompts[which], "the same prompt, and a sample of its own"
                continue
            if talk.messages[-1]["role"] == "assistant":
                if action == "compact":
                    talk.messages, talk.ids = [{"role": "system", "content": f"sum {before}"}], None
                elif action == "edit":
                    talk.messages[-1] = {"role": "assistant", "content": f"edited {before}"}
                    talk.ids = None
                elif action == "branch":  # another conversation goes on from here too
                    other = talks[(which + 1) % 3]
                    other.messages, other.ids = json.loads(json.dumps(talk.messages)), talk.ids
                    sent.pop((which + 1) % 3, None)
                    other.follow("user", f"branch {before}")
                    continue
                talk.follow("tool" if action == "tool" else "user", f"next {before}")
            body = {"messages": talk.messages, "stream": stream} | asked
            message = post(served, session, body)
            assert len(engine.requests) == before + 1
            prompt_ids, ids = engine.requests[-1]
            if talk.ids is not None:
                assert prompt_ids[: len(talk.ids)] == talk.ids, "the exact ids so far, whatever their text is"
            sent[which] = (body, message)
            prompts[which] = prompt_ids
            talk.messages = [*talk.messages, shuffled(message)]
            talk.ids = prompt_ids + ids
        segments = session.recorder.segments()
        # every sampled token is trained exactly once, after exactly the ids that it was sampled after
        assert sum(segment.num_actions for segment in segments) == sum(len(ids) for _, ids in engine.requests)
        trained = []
        for segment in segments:
            start = 0
            for end in segment.turn_ends:
                own = np.flatnonzero(segment.action_mask[start:end]) + start
                first = int(own[0]) if len(own) else end
                assert segment.action_mask[first:end].all(), "what was sampled is in one piece"
                trained.append((segment.token_ids[:first].tolist(), segment.token_ids[first:end].tolist()))
                start = end
            assert set(segment.versions[segment.action_mask].tolist()) <= {4}
        assert sorted(pair for pair in trained if pair[1]) == sorted(
            pair for pair in engine.requests if pair[1]
        )


# --- Known cases, by hand


def completion(ids, finish="stop") -> Completion:
    return Completion(list(ids), [-0.5] * len(ids), np.zeros(len(ids), np.int32), finish)


def record(recorder, tokenizer, prompt: str, ids, closing: str, finish="stop") -> Turn:
    parent, delta = recorder.place(prompt)
    end = tokenizer.decode(ids[-1:]) if finish == "stop" else ""
    said = tokenizer.decode(ids).removesuffix(end)
    turn = Turn(
        parent, tokenizer.encode(delta), completion(ids, finish), end, closing, {prompt + said + closing}
    )
    recorder.turns.append(turn)
    return turn


def rows(recorder) -> list[tuple[list[int], list[int]]]:
    return [(s.token_ids.tolist(), s.action_mask.astype(int).tolist()) for s in recorder.segments()]


def test_sampled_ids_survive_although_their_text_tokenises_differently():
    recorder, tokenizer = Recorder(), plain_tokenizer()
    record(recorder, tokenizer, "U:hello\nA:", [5, 6, 10], "<eot>\n")
    second = record(recorder, tokenizer, "U:hello\nA:hello<eot>\nU:o\nA:", [2, 10], "<eot>\n")
    assert second.parent.ids + second.context_ids == [12, 7, 11, 13, 5, 6, 10, 11, 12, 4, 11, 13]
    assert rows(recorder) == [
        ([12, 7, 11, 13, 5, 6, 10, 11, 12, 4, 11, 13, 2, 10], [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1])
    ]


def test_an_end_of_turn_that_was_not_sampled_is_context():
    recorder, tokenizer = Recorder(), plain_tokenizer()
    record(recorder, tokenizer, "U:hello\nA:", [5, 6], "<eot>\n", "length")
    record(recorder, tokenizer, "U:hello\nA:hello<eot>\nU:o\nA:", [2, 10], "<eot>\n")
    assert rows(recorder) == [
        ([12, 7, 11, 13, 5, 6, 10, 11, 12, 4, 11, 13, 2, 10], [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1])
    ]


def test_a_rewritten_history_forks_and_the_longest_prefix_wins():
    tokenizer = mark_tokenizer(THINKING_TEMPLATE)
    first = {"role": "user", "content": "q1"}
    thought = {"role": "assistant", "content": "<k>mm</k>a1"}

    def render(*messages) -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)

    ids = tokenizer.encode("<k>mm</k>a1</T>")
    for after, forks in (({"role": "user", "content": "q2"}, 1), ({"role": "tool", "content": "r"}, 0)):
        recorder = Recorder()
        record(recorder, tokenizer, render(first), ids, "</T>\n")
        record(recorder, tokenizer, render(first, thought, after), tokenizer.encode("a2</T>"), "</T>\n")
        segments = recorder.segments()
        assert len(segments) == 1 + forks
        assert sum(segment.num_actions for segment in segments) == len(ids) + 3
        # a third turn goes on from the second, the longer of the two that it begins with
        full = render(
            first, thought, after, {"role": "assistant", "content": "a2"}, {"role": "tool", "content": "s"}
        )
        assert recorder.place(full)[0] is recorder.turns[1]


def test_neighbouring_tool_results_are_one_turn_after_the_stored_ids():
    tokenizer = mark_tokenizer(TOOL_TEMPLATE)
    messages = [{"role": "user", "content": "q"}]
    recorder = Recorder()

    def render(messages) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    record(recorder, tokenizer, render(messages), tokenizer.encode("call x2</T>"), "</T>\n")
    messages += [
        {"role": "assistant", "content": "call x2"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    turn, delta = recorder.place(render(messages))
    assert turn is recorder.turns[0] and delta == "\n<T>U:<r>1</r><r>2</r></T>\n<T>A:"


def test_what_two_turns_share_is_trained_once():
    recorder, tokenizer = Recorder(), plain_tokenizer()
    record(recorder, tokenizer, "U:hello\nA:", [5, 6, 10], "<eot>\n")
    for word, ids in (("o", [2, 10]), ("h", [3, 10])):
        record(recorder, tokenizer, f"U:hello\nA:hello<eot>\nU:{word}\nA:", ids, "<eot>\n")
    (_, first), (second_ids, second) = rows(recorder)
    assert sum(first) == 5 and sum(second) == 2
    assert second_ids == [12, 7, 11, 13, 5, 6, 10, 11, 12, 1, 11, 13, 3, 10]


def test_arguments_in_another_order_are_the_same_turn_and_other_arguments_are_not(served):
    sampled = '<tool_call>{"name": "calc", "arguments": {"a": 1, "b": 2}}</tool_call>'
    with random_engine(served) as engine, served.session(temperature=1.0) as session:
        ids = [*served.tokenizer.encode(sampled, add_special_tokens=False), served.tokenizer.eos_token_id]
        engine.say = lambda _: (ids, "stop")
        asked = {"tools": [CALC], "tool_choice": "auto"}
        messages = [{"role": "user", "content": "q"}]
        message = post(served, session, {"messages": messages} | asked)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        for arguments, segments in (('{"b":2,"a":1}', 1), ('{"a": 1, "b": 3}', 2)):
            message["tool_calls"][0]["function"]["arguments"] = arguments
            post(served, session, {"messages": [*messages, message, result]} | asked)
            assert len(session.recorder.segments()) == segments
        assert engine.requests[1][0][: len(engine.requests[0][0]) + len(ids)] == engine.requests[0][0] + ids


def test_a_template_gets_the_arguments_of_a_call_as_a_mapping(served):
    with random_engine(served, GROUPING) as engine, served.session() as session:
        function = {"name": "calc", "arguments": '{"a":1,"b":2}'}
        call = {"id": "c1", "type": "function", "function": function}
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ]
        post(served, session, {"messages": messages})
    assert '"arguments": {"a": 1, "b": 2}}' in served.tokenizer.decode(engine.requests[0][0])


def test_broken_json_from_the_model_reaches_the_client_and_goes_on(served):
    sampled = '<tool_call>{"name": "calc", "arguments": {"a": bad}}</tool_call>'
    with random_engine(served) as engine, served.session(temperature=1.0) as session:
        ids = [*served.tokenizer.encode(sampled, add_special_tokens=False), served.tokenizer.eos_token_id]
        engine.say = lambda _: (ids, "stop")
        asked = {"tools": [CALC], "tool_choice": "auto"}
        messages = [{"role": "user", "content": "q"}]
        message = post(served, session, {"messages": messages} | asked)
        assert "bad" in json.dumps(message)
        post(
            served, session, {"messages": [*messages, message, {"role": "user", "content": "what?"}]} | asked
        )
        prompt_ids, sampled_ids = engine.requests[0]
        assert engine.requests[1][0][: len(prompt_ids + sampled_ids)] == prompt_ids + sampled_ids
        assert len(session.recorder.segments()) == 1


@pytest.mark.parametrize("text", ["<think>so so</think>yes", "<think></think>", "yes", "a<think>b</think>c"])
def test_thinking_streams_as_it_comes_whole_whatever_the_chunks(served, text):
    """Under load vLLM puts several tokens into a chunk; here it is three at a time."""
    with random_engine(served) as engine, served.session(parsers=("hermes", "qwen3")) as session:
        ids = [*served.tokenizer.encode(text, add_special_tokens=False), served.tokenizer.eos_token_id]
        engine.say = lambda _: (ids, "stop")
        messages = [{"role": "user", "content": "q"}]
        whole = post(served, session, {"messages": messages})
        streamed = post(served, session, {"messages": messages, "stream": True})
        assert (streamed["content"] or None, streamed.get("reasoning_content")) == (
            whole["content"] or None,
            whole.get("reasoning_content"),
        )


@pytest.mark.parametrize("text", [
    '<tool_call>{"name": "calc", "arguments": {"sum": "1+2"}}</tool_call>',
    'so: <tool_call>\n{"name": "calc", "arguments": {"sum":"1+2"}}\n</tool_call>',
    '<tool_call>{"name": "calc", "arguments": {}}</tool_call><tool_call>{"name": "b", "arguments": {"x": [1]}}</tool_call>',
])  # fmt: skip
def test_tool_calls_stream_as_they_come_whole_whatever_the_chunks(served, text):
    with random_engine(served) as engine, served.session() as session:
        ids = [*served.tokenizer.encode(text, add_special_tokens=False), served.tokenizer.eos_token_id]
        engine.say = lambda _: (ids, "stop")
        body = {"messages": [{"role": "user", "content": "q"}], "tools": [CALC], "tool_choice": "auto"}
        whole, streamed = (post(served, session, body | {"stream": stream}) for stream in (False, True))
        assert [
            (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in streamed["tool_calls"]
        ] == [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in whole["tool_calls"]]
        assert (streamed["content"] or "").strip() == (whole["content"] or "").strip()


# --- Which replies are on record, and in which order


def asks(text: str, *more: dict) -> dict:
    return {"messages": [{"role": "user", "content": text}, *more]}


@contextlib.contextmanager
def says(served, text: str, finish: str = "stop"):
    """(engine, session) of an engine that always says `text`."""
    with random_engine(served) as engine, served.session(temperature=1.0) as session:
        end = [served.tokenizer.eos_token_id] if finish == "stop" else []
        ids = [*served.tokenizer.encode(text, add_special_tokens=False), *end]
        engine.say = lambda _: (ids, finish)
        yield engine, session


def wait_for(there, timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_a_refit_cut_off_is_not_on_record(served, stream):
    with says(served, "yes", "abort") as (_, session):
        post(served, session, asks("q") | {"stream": stream})
        assert not session.recorder.turns


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_prefill_is_refused_and_leaves_no_trace(served, path):
    with says(served, "yes") as (engine, session):
        text = {"type": "output_text", "text": "one", "annotations": []}
        items = {"/v1/messages": {"role": "assistant", "content": "one"}}
        items["/v1/responses"] = {
            "type": "message", "role": "assistant", "status": "incomplete", "id": "m", "content": [text],
        }  # fmt: skip
        body = asks("q", items[path])
        body |= {"model": "policy", "max_tokens": 9, "input": body["messages"]}
        reply = served.http.post(served.server.url + path, json=body, headers={"x-api-key": session.key})
        assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"
        assert session.closing is None and not engine.requests
        message = post(served, session, asks("q"))
        post(served, session, asks("q", message, {"role": "user", "content": "r"}))
        assert len(session.recorder.segments()) == 1


def test_a_template_that_leaves_out_replies_is_refused(served):
    template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with random_engine(served, template) as engine, served.session() as session:
        for _ in range(2):
            reply = served.http.post(
                served.server.url + "/v1/chat/completions",
                json={"model": "policy"} | asks("q"),
                headers={"x-api-key": session.key},
            )
            assert reply.status_code == 400 and "template" in reply.text
        assert not engine.requests


def test_turns_are_in_the_order_in_which_their_requests_arrived(served):
    with says(served, "yes") as (engine, session):
        generate, started = engine.generate, threading.Event()

        async def first_is_slow(*asked, **settings):
            if not started.is_set():
                started.set()
                while not session.recorder.turns:
                    await asyncio.sleep(0.01)
            async for output in generate(*asked, **settings):
                yield output

        engine.generate = first_is_slow
        with ThreadPoolExecutor() as pool:
            first = pool.submit(post, served, session, asks("one"))
            assert started.wait(30)
            post(served, session, asks("two"))
            first.result(30)
        texts = [served.tokenizer.decode(segment.token_ids) for segment in session.recorder.segments()]
        assert ["one" in text for text in texts] == [True, False]


def test_a_parent_comes_before_a_child_whose_request_began_to_arrive_before_it(served):
    with says(served, "yes") as (_, session):
        said = {"role": "assistant", "content": "yes"}
        body = json.dumps({"model": "policy"} | asks("q", said, {"role": "user", "content": "r"})).encode()

        def slow_body():
            yield body[:5]
            wait_for(lambda: session.arrivals == 1)
            post(served, session, asks("q"))
            yield body[5:]

        url, headers = served.server.url + "/v1/chat/completions", {"x-api-key": session.key}
        assert httpx.post(url, content=slow_body(), headers=headers, timeout=60).is_success
        assert session.arrivals == 2
        (segment,) = session.recorder.segments()
        assert len(segment.turn_ends) == 2 and session.recorder.order == [[0, 1]]


def test_choices_are_in_their_own_order():
    recorder, tokenizer = Recorder(), plain_tokenizer()
    for word, order in (("o", (2, 1)), ("h", (2, 0)), ("hello", (1, 0))):
        record(recorder, tokenizer, f"U:{word}\nA:", [2, 10], "<eot>\n").order = order
    assert [ids[1] for ids, _ in rows(recorder)] == [7, 1, 4]


def test_the_last_segment_has_the_last_turn():
    recorder, tokenizer = Recorder(), plain_tokenizer()
    record(recorder, tokenizer, "U:hello\nA:", [5, 6, 10], "<eot>\n")
    record(recorder, tokenizer, "U:o\nA:", [2, 10], "<eot>\n")
    record(recorder, tokenizer, "U:hello\nA:hello<eot>\nU:o\nA:", [2], "<eot>\n", "length")
    assert [segment.finish_reason for segment in recorder.segments()] == ["stop", "length"]
    assert recorder.order == [[1], [0, 2]]


def test_a_seed_is_not_passed_on_anywhere(served, monkeypatch):
    monkeypatch.setattr("common.chat_server.current_platform", SimpleNamespace(is_cpu=lambda: False))
    with says(served, "yes") as (engine, session):
        generate, seeds = engine.generate, []

        def spy(prompt, sampling, *rest, **settings):
            seeds.append(sampling.seed)
            return generate(prompt, sampling, *rest, **settings)

        engine.generate = spy
        post(served, session, asks("q") | {"seed": 3})
        post(served, session, asks("q") | {"seed": 3}, "/judge/v1/chat/completions")
        assert seeds == [None, 3] and session.info["warning"].endswith(": seed")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_request_that_is_cancelled_before_it_ran_is_answered(served, path):
    with says(served, "yes") as (_, session):
        body = json.dumps({"model": "policy", "max_tokens": 9} | asks("q")).encode()

        async def receive():
            if session.arrivals_seen:
                await asyncio.sleep(60)
            session.arrivals_seen = True
            asyncio.get_running_loop().call_soon(session.close)  # it comes before the reply's task
            return {"type": "http.request", "body": body, "more_body": False}

        async def ask():
            headers = [(b"x-api-key", session.key.encode()), (b"host", b"x")]
            scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
            return await asyncio.wait_for(served.server.post(Request(scope, receive)), 10)

        session.arrivals_seen = False
        response = served.call(ask())
        assert response.status_code == 503 and json.loads(response.body)["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampled", ["[1]", '"x"', "null"])
def test_arguments_that_are_no_object_are_text_on_anthropics_wire(served, sampled, stream):
    text = '<tool_call>{"name": "calc", "arguments": ' + sampled + "}</tool_call>"
    with says(served, text) as (_, session):
        tool = {"name": "calc", "input_schema": CALC["function"]["parameters"]}
        messages = asks("q")["messages"]
        client = anthropic.Anthropic(base_url=served.server.url, api_key=session.key, max_retries=0)
        asked = {"model": "policy", "max_tokens": 99, "tools": [tool]}
        for _ in range(2):
            if stream:
                with client.messages.stream(messages=messages, **asked) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(messages=messages, **asked)
            (block,) = [block.model_dump(exclude_none=True) for block in message.content]
            assert block["type"] == "text" and sampled in block["text"] and message.stop_reason == "end_turn"
            block = {"type": "text", "text": block["text"]}
            messages = [*messages, {"role": "assistant", "content": [block]}, *asks("no")["messages"]]
        assert len(session.recorder.turns) == 2 and len(session.recorder.segments()) == 1


def test_of_two_equal_conversations_each_goes_on_from_its_own(served):
    with says(served, "yes") as (_, session):
        message = [post(served, session, asks("q")) for _ in range(2)][0]
        for word in ("one", "two"):
            body = {"model": "policy"} | asks("q", message, {"role": "user", "content": word})
            url, headers = served.server.url + "/v1/messages/count_tokens", {"x-api-key": session.key}
            plain = [{"role": m["role"], "content": m["content"]} for m in body["messages"]]
            assert served.http.post(url, json=body | {"messages": plain}, headers=headers).is_success
            post(served, session, body)
        assert [len(segment.turn_ends) for segment in session.recorder.segments()] == [2, 2]


def test_true_is_not_one():
    assert not same_json('{"a": 1}', {"a": True}) and not same_json('{"a": [0]}', '{"a": [false]}')
    assert same_json('{"a": 1, "b": null}', {"b": None, "a": 1})


def test_a_reply_whose_client_left_is_not_trained_unless_it_is_asked_for_again(served):
    with says(served, "yes") as (engine, session):
        generate, gate = engine.generate, threading.Event()

        async def gated(*asked, **settings):
            while not gate.is_set():
                await asyncio.sleep(0.01)
            async for output in generate(*asked, **settings):
                yield output

        engine.generate = gated
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                served.server.url + "/v1/chat/completions",
                json={"model": "policy"} | asks("q"),
                headers={"x-api-key": session.key},
                timeout=1,
            )
        wait_for(lambda: any(reply.abandoned for replies in session.replies.values() for reply in replies))
        gate.set()
        wait_for(lambda: session.recorder.turns)
        assert session.recorder.segments() == []
        for stream in (False, True):  # the first gets the stored reply
            post(served, session, asks("q") | ({"stream": True} if stream else {}))
        assert len(session.recorder.turns) == len(session.recorder.segments()) == 2
