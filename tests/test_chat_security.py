"""The chat server against clients that are wrong, curious or hostile."""

import asyncio
import json
import random
import socket

import httpx
import pytest

from common.chat_server import MAX_BODY_BYTES

PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]
PATHS += ["/judge" + path for path in PATHS]
HI = {"role": "user", "content": "hi"}
GOOD = {"model": "policy", "messages": [HI], "input": [HI], "max_tokens": 2, "max_output_tokens": 2}


@pytest.fixture
def session(served):
    with served.session(temperature=1.0, max_new_tokens=4) as session:
        yield session


def post(served, path, key, **content) -> httpx.Response:
    headers = {"x-api-key": key} if key is not None else {}
    return httpx.post(
        served.server.url + path, headers=headers | content.pop("headers", {}), timeout=60, **content
    )


def shape(path: str, response: httpx.Response) -> str:
    """The error's message, wherever this wire has it."""
    body = response.json()
    if "/messages" in path:
        assert (
            body["type"] == "error"
            and body["error"]["type"].endswith("_error")
            or response.status_code == 413
        )
    return body["error"]["message"]


def test_it_listens_on_loopback_only(served):
    sockets = [s.getsockname()[0] for server in served.server.http.servers for s in server.sockets]
    assert sockets == ["127.0.0.1"]


@pytest.mark.parametrize("path", [*PATHS, "/v1/models"])
@pytest.mark.parametrize("key", [None, "", "x", "Bearer"])
def test_a_wrong_or_missing_key_is_401(served, session, path, key):
    method = "GET" if path == "/v1/models" else "POST"
    headers = {} if key is None else {"Authorization": f"Bearer {key}".strip()}
    content = json.dumps(GOOD) if method == "POST" else None
    response = httpx.request(method, served.server.url + path, content=content, headers=headers)
    assert response.status_code == 401 and shape(path, response)
    assert session.key not in response.text and not session.recorder.turns


def test_no_session_sees_what_another_said(served):
    with served.session(temperature=1.0) as one, served.session(temperature=1.0) as other:
        first = post(served, PATHS[0], one.key, json=GOOD)
        # the very request that `one` made, as a retry: `other` has no reply to it, and gets a sample of its own
        second = post(served, PATHS[0], other.key, json=GOOD, headers={"x-stainless-retry-count": "1"})
        assert first.json()["id"] != second.json()["id"]
        assert len(one.recorder.turns) == len(other.recorder.turns) == 1
        assert one.recorder.turns[0] is not other.recorder.turns[0]
    assert post(served, PATHS[0], one.key, json=GOOD).status_code == 401, "the episode is over"


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_too_long_is_413(served, session, path):
    response = post(served, path, session.key, content=b" " * (MAX_BODY_BYTES + 1))
    assert response.status_code == 413 and shape(path, response)

    def endless():  # chunked: no length is announced
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    assert post(served, path, session.key, content=endless()).status_code == 413


def test_unknown_paths_and_methods_are_errors_with_a_message(served, session):
    for method, path in (
        ("POST", "/v1/completions"),
        ("GET", PATHS[0]),
        ("POST", "/v1/embeddings"),
        ("GET", "/"),
    ):
        response = httpx.request(method, served.server.url + path, headers={"x-api-key": session.key})
        assert response.status_code in (404, 405) and "/v1/chat/completions" in response.text


def test_a_reply_is_never_longer_than_the_run_allows(served, session):
    for path in PATHS[:2]:
        response = post(served, path, session.key, json=GOOD | {"max_tokens": 10**6})
        assert response.status_code == 200
    assert all(len(turn.completion.token_ids) <= 4 for turn in session.recorder.turns)


# --- Fuzz

ODD = [
    None, True, 0, -1, 1.5, 1e308, 2**70, "", "x", "\x00", "\ud800", "\u202e🙂é", [], {}, [None], [[]], [{}],
    {"role": 1}, {"type": "text"}, [{"type": "text"}], [{"type": "image_url", "image_url": {"url": "http://0.0.0.0/"}}],
    [{"role": "assistant", "tool_calls": [{}]}], [{"role": "tool"}], "<|im_start|>" * 50, "a" * 5000,
    [{"type": "function"}], {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}], "required", "stream", -(2**63),
]  # fmt: skip
FIELDS = [
    "messages", "model", "max_tokens", "n", "stop", "tools", "tool_choice", "stream", "stream_options", "logprobs",
    "top_logprobs", "response_format", "seed", "temperature", "top_p", "top_k", "system", "thinking", "metadata",
    "stop_sequences", "chat_template", "chat_template_kwargs", "echo", "add_generation_prompt", "documents",
    "continue_final_message", "structured_outputs", "kv_transfer_params", "vllm_xargs", "bad_words", "logit_bias",
    "allowed_token_ids", "min_tokens", "ignore_eos", "reasoning_effort", "priority", "request_id", "session_id",
    "truncate_prompt_tokens", "prompt_logprobs", "mm_processor_kwargs", "media_io_kwargs", "use_beam_search",
    "skip_special_tokens", "stream_interval", "cache_salt", "repetition_detection", "parallel_tool_calls",
    "include_reasoning", "return_token_ids", "input", "instructions", "text", "previous_response_id", "background",
    "include", "reasoning", "truncation", "store", "previous_input_messages", "max_output_tokens", "prompt",
    "watermarking", "output_config", "context_management",
]  # fmt: skip
ROLES = ["system", "user", "assistant", "tool", "developer", "function", "root"]


def fuzzed(chance: random.Random) -> bytes:
    body = json.loads(json.dumps(GOOD))
    kind = chance.randrange(6)
    if kind == 0:  # bytes that are no JSON
        text = json.dumps(body).encode()
        cut = chance.randrange(len(text))
        return (
            text[:cut]
            + chance.choice([b"", b"\xff\xfe", b"[" * 100_000, b"\x00" * 10, b'"' * 3])
            + text[cut + 3 :]
        )
    if kind == 1:
        return json.dumps(chance.choice(ODD)).encode()
    for _ in range(chance.randrange(1, 4)):
        if kind in (2, 3):
            body[chance.choice(FIELDS)] = chance.choice(ODD)
        elif kind == 4:
            message = {"role": chance.choice(ROLES), "content": chance.choice(ODD)}
            if chance.random() < 0.5:
                names = ["tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content", "role"]
                message[chance.choice(names)] = chance.choice(ODD)
            body["messages"] = [*body["messages"], message]
            item = {
                "type": chance.choice(["message", "function_call", "function_call_output", "reasoning", 1])
            }
            body["input"] = [*body["input"], message, message | item | {"arguments": chance.choice(ODD)}]
        else:
            call = {
                "id": chance.choice(ODD),
                "type": "function",
                "function": {"name": chance.choice(ODD), "arguments": chance.choice(ODD)},
            }
            body["messages"] += [{"role": "assistant", "content": None, "tool_calls": [call]}]
            body["tools"] = [
                {"type": "function", "function": {"name": "f", "parameters": chance.choice(ODD)}}
            ]
    return json.dumps(body).encode()


def test_ten_thousand_broken_requests_get_an_answer_each_and_the_server_lives(served):
    """2xx (a few of them are fine) or 4xx, never 5xx, each within a minute; 32 at a time."""

    async def storm(session, count: int) -> dict[int, int]:
        statuses: dict[int, int] = {}
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=served.server.url, timeout=60, limits=limits) as client:

            async def one(number: int) -> None:
                chance = random.Random(number)
                path, body = chance.choice(PATHS), fuzzed(chance)
                response = await client.post(path, content=body, headers={"x-api-key": session.key})
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                assert b'"code": 5' not in response.content and b"InternalServerError" not in response.content
                assert 200 <= response.status_code < 500, (number, path, body[:300], response.text[:500])

            for start in range(0, count, 500):
                await asyncio.gather(*(one(number) for number in range(start, start + 500)))
        return statuses

    with served.session(temperature=1.0, max_new_tokens=2) as session:
        statuses = asyncio.run(storm(session, 10_000))
        print(statuses)
        assert sum(statuses.values()) == 10_000 and statuses[400] > 3_000
        assert post(served, PATHS[0], session.key, json=GOOD).status_code == 200
        segments = session.recorder.segments()
        assert sum(s.num_actions for s in segments) == sum(
            len(t.completion.token_ids) for t in session.recorder.turns
        )


def test_cut_connections_leave_no_trace_and_no_hang(served, session):
    host, port = served.server.url.removeprefix("http://").split(":")
    body = json.dumps(GOOD | {"stream": True})
    request = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    for number in range(200):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(request[: 1 + number * len(request) // 200].encode())
    for junk in (b"\x16\x03\x01", b"GET\r\n\r\n", b"POST / HTTP/9\r\n\r\n", b"A" * 100_000):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(junk)
    assert post(served, PATHS[0], session.key, json=GOOD).status_code == 200


def test_256_sessions_at_once_lose_and_cross_nothing(served):
    """Each says its own number in two turns; its record has that number and no other."""
    sessions = [served.session(temperature=1.0, max_new_tokens=8) for _ in range(256)]
    opened = [context.__enter__() for context in sessions]

    async def talk(number: int, session, client) -> None:
        messages = [{"role": "user", "content": f"I am {number}."}]
        for _ in range(2):
            response = await client.post(
                "/v1/chat/completions", json={"model": "policy", "messages": messages},
                headers={"x-api-key": session.key},
            )  # fmt: skip
            assert response.status_code == 200, response.text
            messages += [
                response.json()["choices"][0]["message"],
                {"role": "user", "content": f"Still {number}."},
            ]

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=300)
        async with httpx.AsyncClient(base_url=served.server.url, timeout=300, limits=limits) as client:
            await asyncio.gather(*(talk(number, session, client) for number, session in enumerate(opened)))

    asyncio.run(all_of_them())
    for number, session in enumerate(opened):
        (segment,) = session.recorder.segments()
        text = served.tokenizer.decode(segment.token_ids)
        assert f"I am {number}." in text and f"Still {number}." in text
        assert text.count("I am") == text.count("Still") == 1 and len(segment.turn_ends) == 2
    for context in sessions:
        context.__exit__(None, None, None)
