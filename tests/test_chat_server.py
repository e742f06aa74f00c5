"""The chat server on real vLLM with the stock SDKs: what comes over the wire, and what is on record."""

import asyncio
import json

import anthropic
import httpx
import openai
import pytest

from tests.chat import CALC, CALL, COUNT, Waiting

ANTHROPIC_CALC = {"name": "calc", "description": "adds", "input_schema": CALC["function"]["parameters"]}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@pytest.fixture(autouse=True, params=["synchronous", "asynchronous"])
def clients(request, monkeypatch):
    """Every test drives the SDKs' clients of both kinds."""
    monkeypatch.setattr("tests.test_chat_server.ASYNCHRONOUS", request.param == "asynchronous")


ASYNCHRONOUS = False


def openai_client(session, kind=None, **settings):
    settings |= {"base_url": session.access["base_url"], "api_key": session.key, "max_retries": 0}
    return client_of(kind, openai.OpenAI, openai.AsyncOpenAI, settings)


def anthropic_client(session, kind=None, **settings):
    settings |= {"base_url": session.server.url, "api_key": session.key, "max_retries": 0}
    return client_of(kind, anthropic.Anthropic, anthropic.AsyncAnthropic, settings)


def client_of(kind, synchronous, asynchronous, settings: dict):
    if kind:
        return kind(**settings)
    return Waiting(asynchronous(**settings)) if ASYNCHRONOUS else synchronous(**settings)


def sampled(served, segment) -> str:
    return served.tokenizer.decode(segment.token_ids[segment.action_mask])


def only_segment(session):
    (segment,) = session.recorder.segments()
    return segment


# --- One wire, both SDKs, synchronous, asynchronous, streaming


def ask_openai(session, stream: bool) -> tuple[str, str, int, int]:
    """(text, finish reason, prompt tokens, completion tokens)."""
    client = openai_client(session)
    if not stream:
        reply = client.chat.completions.create(model="policy", messages=[user("count")])
        return (reply.choices[0].message.content, reply.choices[0].finish_reason,
                reply.usage.prompt_tokens, reply.usage.completion_tokens)  # fmt: skip
    text, finish = "", None
    for chunk in client.chat.completions.create(
        model="policy", messages=[user("count")], stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            text, finish = text + (choice.delta.content or ""), choice.finish_reason or finish
        usage = chunk.usage
    return text, finish, usage.prompt_tokens, usage.completion_tokens


def ask_openai_async(session, stream: bool) -> tuple[str, str, int, int]:
    async def ask():
        async with openai_client(session, openai.AsyncOpenAI) as client:
            if not stream:
                reply = await client.chat.completions.create(model="policy", messages=[user("count")])
                return (reply.choices[0].message.content, reply.choices[0].finish_reason,
                        reply.usage.prompt_tokens, reply.usage.completion_tokens)  # fmt: skip
            text, finish = "", None
            async for chunk in await client.chat.completions.create(
                model="policy", messages=[user("count")], stream=True, stream_options={"include_usage": True}
            ):
                for choice in chunk.choices:
                    text, finish = text + (choice.delta.content or ""), choice.finish_reason or finish
                usage = chunk.usage
            return text, finish, usage.prompt_tokens, usage.completion_tokens

    return asyncio.run(ask())


def from_message(message) -> tuple[str, str, int, int]:
    text = "".join(block.text for block in message.content)
    finish = {"end_turn": "stop", "max_tokens": "length"}[message.stop_reason]
    return text, finish, message.usage.input_tokens, message.usage.output_tokens


def ask_anthropic(session, stream: bool) -> tuple[str, str, int, int]:
    client = anthropic_client(session)
    asked = {"model": "policy", "max_tokens": 100, "messages": [user("count")]}
    if not stream:
        return from_message(client.messages.create(**asked))
    with client.messages.stream(**asked) as events:
        text = "".join(events.text_stream)
        message = events.get_final_message()
    assert text == message.content[0].text
    return from_message(message)


def ask_anthropic_async(session, stream: bool) -> tuple[str, str, int, int]:
    async def ask():
        async with anthropic_client(session, anthropic.AsyncAnthropic) as client:
            asked = {"model": "policy", "max_tokens": 100, "messages": [user("count")]}
            if not stream:
                return from_message(await client.messages.create(**asked))
            async with client.messages.stream(**asked) as events:
                return from_message(await events.get_final_message())

    return asyncio.run(ask())


CLIENTS = [ask_openai, ask_openai_async, ask_anthropic, ask_anthropic_async]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", CLIENTS)
def test_a_reply_is_the_text_of_the_recorded_tokens_and_usage_counts_them(served, ask, stream):
    with served.session() as session:
        text, finish, prompt_tokens, completion_tokens = ask(session, stream)
        segment = only_segment(session)
    assert text == COUNT and finish == "stop"
    assert sampled(served, segment) == COUNT + "<|im_end|>"
    assert served.tokenizer.decode(segment.token_ids[:prompt_tokens]) == (
        "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (prompt_tokens, completion_tokens) == (
        len(segment.token_ids) - segment.num_actions,
        segment.num_actions,
    )
    assert (segment.logprobs[segment.action_mask] <= 0).all() and segment.finish_reason == "stop"
    assert set(segment.versions[segment.action_mask].tolist()) == {0}


@pytest.mark.parametrize("path, asked", [
    ("/v1/chat/completions", {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/messages", {"stream": True, "max_tokens": 200}),
])  # fmt: skip
def test_the_first_chunk_leaves_before_the_engine_has_finished(served, path, asked):
    recorded = []
    for _ in range(5):  # a busy machine may be late to look
        with served.session() as session:
            body = {"model": "policy", "messages": [user("count")]} | asked
            headers = {"Authorization": f"Bearer {session.key}"}
            url = served.server.url + path
            with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
                chunks = response.iter_bytes()
                assert response.status_code == 200 and next(chunks)
                recorded.append(len(session.recorder.turns))
                assert b"".join(chunks)
            assert len(session.recorder.turns) == 1, "after the last chunk the reply is on record"
    assert 0 in recorded


def test_a_reply_over_a_refit_has_the_version_of_each_token(served):
    """What a refit does to a reply that streams: a pause, a new label, and on."""

    async def relabel(version: str) -> None:
        await served.engine.pause()
        await served.engine.llm.update_weight_version(version)
        await served.engine.resume()

    versions: list[int] = []
    for _ in range(5):  # on a busy machine the reply may be over too soon
        with served.session() as session:
            chunks = openai_client(session).chat.completions.create(
                model="policy", messages=[user("count")], stream=True
            )
            text = next(chunks).choices[0].delta.content or ""
            served.call(relabel("1"))
            text += "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            segment = only_segment(session)
        served.call(relabel("0"))
        versions = segment.versions[segment.action_mask].tolist()
        assert text == COUNT and versions == sorted(versions)
        if set(versions) == {0, 1}:
            break
    assert set(versions) == {0, 1} and len(versions) == len(COUNT) + 1


# --- Conversations that go on


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_that_goes_on_stays_in_one_segment(served, stream):
    with served.session() as session:
        client = openai_client(session)
        messages = [user("count")]
        for expected, following in ((COUNT, "again"), ("no more", None)):
            if stream:
                chunks = client.chat.completions.create(model="policy", messages=messages, stream=True)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            else:
                text = (
                    client.chat.completions.create(model="policy", messages=messages)
                    .choices[0]
                    .message.content
                )
            assert text == expected
            messages += [{"role": "assistant", "content": text}, user(following)]
        segment = only_segment(session)
    assert sampled(served, segment) == f"{COUNT}<|im_end|>no more<|im_end|>"
    assert served.tokenizer.decode(segment.token_ids) == (
        f"<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\n{COUNT}<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\nno more<|im_end|>"
    )
    assert len(segment.turn_ends) == 2


def test_an_edited_reply_starts_a_new_segment(served):
    with served.session() as session:
        client = openai_client(session)
        client.chat.completions.create(model="policy", messages=[user("count")])
        for edited in (COUNT + "!", COUNT[:-1], "x"):
            messages = [user("count"), {"role": "assistant", "content": edited}, user("again")]
            client.chat.completions.create(model="policy", messages=messages)
        segments = session.recorder.segments()
    assert len(segments) == 4
    assert [len(segment.turn_ends) for segment in segments] == [1, 1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_parsed_and_their_echo_is_recognised(served, stream):
    with served.session() as session:
        client = openai_client(session)
        messages = [user("add")]
        asked = {"model": "policy", "tools": [CALC], "tool_choice": "auto"}
        if stream:
            with client.chat.completions.stream(messages=messages, **asked) as events:
                message = events.get_final_completion().choices[0].message
        else:
            reply = client.chat.completions.create(messages=messages, **asked)
            message = reply.choices[0].message
            assert reply.choices[0].finish_reason == "tool_calls"
        (call,) = message.tool_calls
        assert call.function.name == "calc" and json.loads(call.function.arguments) == {"sum": "1+2"}
        echo = {
            "id": call.id,
            "type": "function",
            "function": {"name": "calc", "arguments": '{"sum":   "1+2"}'},
        }
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [echo]},
            {"role": "tool", "tool_call_id": call.id, "content": "3"},
        ]
        reply = client.chat.completions.create(messages=messages, **asked)
        assert reply.choices[0].message.content == "it is 3"
        segment = only_segment(session)
        # an argument that is another one is another turn
        echo["function"]["arguments"] = '{"sum": "1+3"}'
        client.chat.completions.create(messages=messages, **asked)
        assert len(session.recorder.segments()) == 2
    assert sampled(served, segment) == f"{CALL}<|im_end|>it is 3<|im_end|>"
    assert f"{CALL}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n" in served.tokenizer.decode(segment.token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tool_use_goes_on_in_one_segment(served, stream):
    with served.session() as session:
        client = anthropic_client(session)
        asked = {"model": "policy", "max_tokens": 150, "tools": [ANTHROPIC_CALC]}
        messages = [user("add")]
        if stream:
            with client.messages.stream(messages=messages, **asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(messages=messages, **asked)
        assert message.stop_reason == "tool_use"
        (block,) = [block for block in message.content if block.type == "tool_use"]
        assert (block.name, block.input) == ("calc", {"sum": "1+2"})
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
        messages += [
            {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in message.content]},
            {"role": "user", "content": [result]},
        ]
        counted = client.messages.count_tokens(model="policy", messages=messages, tools=[ANTHROPIC_CALC])
        message = client.messages.create(messages=messages, **asked)
        assert message.content[0].text == "it is 3"
        assert counted.input_tokens == message.usage.input_tokens
        segment = only_segment(session)
    assert sampled(served, segment) == f"{CALL}<|im_end|>it is 3<|im_end|>"


def test_without_tool_choice_a_reply_is_text(served):
    with served.session() as session:
        reply = openai_client(session).chat.completions.create(
            model="policy", messages=[user("add")], tools=[CALC], tool_choice="none"
        )
        segment = only_segment(session)
    message, text = reply.choices[0].message, sampled(served, segment)
    assert not message.tool_calls and message.content == text.removesuffix("<|im_end|>")


def test_two_tool_calls_in_one_reply(served):
    with served.session() as session:
        reply = openai_client(session).chat.completions.create(
            model="policy", messages=[user("twice")], tools=[CALC], tool_choice="auto"
        )
    calls = [json.loads(call.function.arguments) for call in reply.choices[0].message.tool_calls]
    assert calls == [{"sum": "1+2"}, {"sum": "4+2"}]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_comes_apart_from_the_answer_on_both_wires(served, stream):
    with served.session(parsers=("hermes", "qwen3")) as session:
        client = openai_client(session)
        if stream:
            reasoning = answer = ""
            for chunk in client.chat.completions.create(
                model="policy", messages=[user("think")], stream=True
            ):
                delta = chunk.choices[0].delta
                reasoning += getattr(delta, "reasoning_content", None) or ""
                answer += delta.content or ""
        else:
            message = (
                client.chat.completions.create(model="policy", messages=[user("think")]).choices[0].message
            )
            reasoning, answer = message.reasoning_content, message.content
        assert (reasoning, answer) == ("so so", "yes")
        client = anthropic_client(session)
        asked = {"model": "policy", "max_tokens": 50, "messages": [user("think")]}
        if stream:
            with client.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
        thinking, text = message.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "so so", "yes")


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_wire_goes_on_in_one_segment(served, stream):
    tool = {
        "type": "function",
        "name": "calc",
        "description": "adds",
        "parameters": CALC["function"]["parameters"],
    }

    def ask(session, items):
        client = openai_client(session)
        asked = {"model": "policy", "input": items, "tools": [tool], "max_output_tokens": 100_000}
        if not stream:
            return client.responses.create(**asked)
        with client.responses.stream(**asked) as events:
            return events.get_final_response()

    with served.session() as session:
        items = [user("add")]
        response = ask(session, items)
        (call,) = [item for item in response.output if item.type == "function_call"]
        assert json.loads(call.arguments) == {"sum": "1+2"}
        items += [item.model_dump(exclude_none=True) for item in response.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        response = ask(session, items)
        assert response.output_text == "it is 3"
        segment = only_segment(session)
        assert response.usage.output_tokens == len("it is 3") + 1
        with pytest.raises(openai.BadRequestError):
            openai_client(session).responses.create(model="policy", input="add", background=True)
    assert sampled(served, segment) == f"{CALL}<|im_end|>it is 3<|im_end|>"


# --- Features of the wire


def test_n_stop_max_tokens_and_logprobs(served):
    with served.session(temperature=1.0) as session:
        client = openai_client(session)
        reply = client.chat.completions.create(
            model="policy", messages=[user("count")], n=3, max_tokens=5, logprobs=True, top_logprobs=2
        )
        segments = session.recorder.segments()
        assert len(reply.choices) == len(segments) == 3
        assert reply.usage.completion_tokens == sum(segment.num_actions for segment in segments)
        for choice, segment in zip(reply.choices, segments):
            on_the_wire = [token.logprob for token in choice.logprobs.content]
            assert on_the_wire == pytest.approx(segment.logprobs[segment.action_mask].tolist(), abs=1e-6)
            assert all(len(token.top_logprobs) >= 2 for token in choice.logprobs.content)
            assert segment.num_actions <= 5
    with served.session() as session:
        client = openai_client(session)
        reply = client.chat.completions.create(model="policy", messages=[user("count")], stop=[" three"])
        assert reply.choices[0].message.content == "one two" and reply.choices[0].finish_reason == "stop"
        messages = [user("count"), {"role": "assistant", "content": "one two"}, user("again")]
        client.chat.completions.create(model="policy", messages=messages)
        segment = only_segment(session)
    text = served.tokenizer.decode(segment.token_ids)
    assert "one two three<|im_end|>\n<|im_start|>user\nagain" in text, (
        "what was sampled stays; its end is context"
    )
    assert sampled(served, segment).startswith("one two three")


def test_streamed_choices_and_their_logprobs_are_those_on_record(served):
    with served.session(temperature=1.0) as session:
        texts, logprobs, finish = ["", "", ""], [[], [], []], [None] * 3
        for chunk in openai_client(session).chat.completions.create(
            model="policy", messages=[user("count")], n=3, max_tokens=5, logprobs=True, stream=True,
            stream_options={"include_usage": True},
        ):  # fmt: skip
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                finish[choice.index] = choice.finish_reason or finish[choice.index]
                logprobs[choice.index] += [
                    t.logprob for t in (choice.logprobs and choice.logprobs.content) or []
                ]
        segments = session.recorder.segments()
        assert chunk.usage.completion_tokens == sum(segment.num_actions for segment in segments)
    on_record = [
        (
            sampled(served, segment).removesuffix("<|im_end|>"),
            segment.finish_reason,
            segment.logprobs[segment.action_mask].tolist(),
        )
        for segment in segments
    ]
    streamed = [(t, f, pytest.approx(own, abs=1e-6)) for t, f, own in zip(texts, finish, logprobs)]
    assert sorted(on_record) == sorted(streamed, key=lambda choice: choice[:2])  # in the order of their ends


def test_stop_sequences_of_the_other_wire(served):
    with served.session() as session:
        asked = {
            "model": "policy",
            "max_tokens": 100,
            "stop_sequences": [" three"],
            "messages": [user("count")],
        }
        message = anthropic_client(session).messages.create(**asked)
        assert (message.content[0].text, message.stop_reason) == ("one two", "stop_sequence")
        assert sampled(served, only_segment(session)).startswith("one two three")


def test_sampling_is_pinned_with_one_warning_a_session(served):
    with served.session() as session:
        client = openai_client(session)
        for _ in range(2):
            reply = client.chat.completions.create(
                model="policy",
                messages=[user("count")],
                temperature=2.0,
                top_p=0.1,
                seed=3,
                presence_penalty=2,
            )
            assert reply.choices[0].message.content == COUNT
        assert session.info == {
            "warning": "pinned to the run's values: temperature, top_p, presence_penalty, seed"
        }


REFUSED = [
    {"response_format": {"type": "json_object"}},
    {"tools": [CALC], "tool_choice": "required"},
    {"tools": [CALC], "tool_choice": {"type": "function", "function": {"name": "calc"}}},
    {"n": 1000},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]}]},
    {"messages": []},
    {"messages": [user("long " * 1000)]},
]  # fmt: skip


@pytest.mark.parametrize("asked", REFUSED, ids=lambda asked: next(iter(asked)))
def test_what_cannot_be_honoured_is_an_error_in_the_wires_own_shape(served, asked):
    with served.session() as session:
        with pytest.raises(openai.BadRequestError) as raised:
            openai_client(session).chat.completions.create(
                **{"model": "policy", "messages": [user("count")]} | asked
            )
        assert raised.value.body["type"] == "invalid_request_error" and raised.value.body["message"]
        if asked.get("messages"):
            content = asked["messages"][0]["content"]
            if isinstance(content, list):
                source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
                content = [{"type": "image", "source": source}]
            with pytest.raises(anthropic.BadRequestError) as raised:
                anthropic_client(session).messages.create(
                    model="policy", max_tokens=5, messages=[user(content)]
                )
            assert raised.value.body["error"]["type"] == "invalid_request_error"
        assert not session.recorder.turns


def test_models_health_and_an_unknown_model(served):
    with served.session() as session:
        client = openai_client(session)
        assert [model.id for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt", messages=[user("count")])
        with pytest.raises(anthropic.NotFoundError):
            anthropic_client(session).messages.create(model="gpt", max_tokens=5, messages=[user("count")])
    assert httpx.get(served.server.url + "/health").status_code == 200


# --- Judge


def test_the_judge_is_the_same_engine_and_leaves_no_trace(served):
    with served.session() as session:
        judge = openai.OpenAI(base_url=session.server.url + "/judge/v1", api_key=session.key, max_retries=0)
        reply = judge.chat.completions.create(model="policy", messages=[user("count")], temperature=0)
        assert reply.choices[0].message.content == COUNT
        reply = judge.chat.completions.create(
            model="policy", messages=[user("zz")], temperature=1.0, seed=1,
            extra_body={"structured_outputs": {"choice": ["good", "bad"]}},
        )  # fmt: skip
        assert reply.choices[0].message.content in ("good", "bad"), "a grammar is honoured here"
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        form = {"name": "verdict", "schema": schema | {"additionalProperties": False}}
        reply = judge.chat.completions.create(
            model="policy", messages=[user("zz")], temperature=0, max_tokens=200,
            response_format={"type": "json_schema", "json_schema": form},
        )  # fmt: skip
        said = "".join(reply.choices[0].message.content.split())  # the grammar allows spaces without end
        assert len(said) > 4 and any(whole.startswith(said) for whole in ('{"ok":true}', '{"ok":false}'))
        forced = {"tools": [CALC], "tool_choice": {"type": "function", "function": {"name": "calc"}}}
        reply = judge.chat.completions.create(model="policy", messages=[user("add")], max_tokens=80, **forced)
        assert reply.choices[0].message.tool_calls[0].function.name == "calc"
        assert not session.recorder.turns and not session.info


# --- Retries and resampling


def test_the_same_prompt_three_times_is_three_generations(served):
    with served.session(temperature=1.0) as session:
        client = openai_client(session)
        for _ in range(3):
            client.chat.completions.create(model="policy", messages=[user("zz")])
        assert len(session.recorder.segments()) == 3

        async def at_once():
            async with openai_client(session, openai.AsyncOpenAI) as client:
                asked = {"model": "policy", "messages": [user("zz")]}
                await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(3)))

        asyncio.run(at_once())
        assert len(session.recorder.segments()) == 6


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_gets_the_stored_reply(served, path, stream):
    with served.session(temperature=1.0) as session:
        body = {"model": "policy", "messages": [user("zz")], "stream": stream, "max_tokens": 200}
        headers = {"x-api-key": session.key}
        url = served.server.url + path
        first = httpx.post(url, json=body, headers=headers, timeout=60)
        retried = httpx.post(url, json=body, headers=headers | {"x-stainless-retry-count": "1"}, timeout=60)
        assert first.status_code == retried.status_code == 200
        assert first.content == retried.content and len(session.recorder.turns) == 1


def test_a_reply_that_never_arrived_is_given_to_the_next_who_asks(served):
    with served.session(temperature=1.0) as session:
        body = {"model": "policy", "messages": [user("zz")], "stream": True}
        headers = {"Authorization": f"Bearer {session.key}"}
        url = served.server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
            cut = next(response.iter_bytes(20))
        whole = httpx.post(url, json=body, headers=headers, timeout=60).content
        assert whole.startswith(cut) and whole.endswith(b"data: [DONE]\n\n")
        assert len(session.recorder.turns) == 1
        httpx.post(url, json=body, headers=headers, timeout=60)
        assert len(session.recorder.turns) == 2, "that one has arrived, so this is a new sample"
