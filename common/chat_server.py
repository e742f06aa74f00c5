"""The server that a `ChatAgent` speaks to: OpenAI's and Anthropic's wire, and every token on record.

    SDK --HTTP, loopback, a key a session--> Reply (dedupe) --> vLLM's own handlers --> Client --> engine
                                                                render, parse, SSE      records

The wire is vLLM's: its handlers render the messages, parse tool calls and thinking, and stream. We take part
in two places. After rendering, a conversation that goes on from a recorded turn gets that turn's exact ids
and the template's delta (`Recorder`). Where a handler asks the engine, the run's sampling values go in, and
the ids, log-probs and versions that come out are recorded.
"""

import asyncio
import contextlib
import contextvars
import hashlib
import json
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import (
    construct_chat_messages_with_tool_call,
    construct_tool_dicts,
    should_continue_final_message,
)
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMServerError
from vllm.platforms import current_platform
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from common.agent import Recorder, Turn, encode
from common.envs.pool import EnvError
from common.rollout import read_completion

LOG = logging.getLogger("instar.chat")
MODEL = "policy"
MAX_BODY_BYTES, BODY_TIMEOUT_S, MAX_CHOICES = 16 << 20, 30.0, 128
# Rendered once a session, to see what the template puts after a reply.
STAND_IN = "instar-stand-in-for-a-reply"

# What would change the policy's distribution is pinned to the run's values, with a warning.
PINNED = {
    "temperature": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None, "bad_words": [], "min_tokens": 0,
    "allowed_token_ids": None, "ignore_eos": False, "stop_token_ids": [], "thinking_token_budget": None,
    "repetition_detection": None, "parallel_tool_calls": True, "watermarking": None, "priority": 0,
}  # fmt: skip
# What a recorded reply can't honour is an error, with the value that is fine.
REFUSED = {
    "use_beam_search": False, "echo": False, "continue_final_message": False, "add_generation_prompt": True,
    "add_special_tokens": False, "structured_outputs": None, "prompt_logprobs": None,
    "logprob_token_ids": None, "truncate_prompt_tokens": None, "kv_transfer_params": None,
    "ec_transfer_params": None, "vllm_xargs": None, "background": False, "truncation": "disabled",
    "previous_input_messages": None,
}  # fmt: skip
PREFILL = "the last message is the assistant's: a recorded reply is the policy's own from its first token"
EXCHANGE: contextvars.ContextVar["Exchange"] = contextvars.ContextVar("exchange")


class Refusal(ValueError):
    """A request that can't be honoured, as the client is told."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass
class Exchange:
    """One request on its way through vLLM's handlers, which find it in the context variable."""

    session: "Session"
    reply: "Reply"
    number: int  # of the request, in the order in which they arrived
    judge: bool
    counts: bool  # asks for the number of tokens only
    parent: Turn | None = None  # the turn that the conversation goes on from
    context_ids: list[int] = field(default_factory=list)  # what comes after it
    prompt: str = ""  # all of it as the template writes it
    room: int = 0  # tokens that are left for the reply
    render: Callable | None = None  # the template's text of the conversation with more messages
    turns: dict[int, Turn] = field(default_factory=dict)  # the recorded replies by choice


class Reply:
    """What a request got: kept, so that a retry gets the same instead of a second sample. It is produced by a
    task of its own, whether or not the client is still there."""

    def __init__(self):
        self.status, self.media_type, self.chunks = 0, "application/json", []
        self.news, self.done = asyncio.Event(), False
        self.sent: int | None = None  # chunks that a client had got when it left, -1: no answer at all

    @property
    def abandoned(self) -> bool:
        """Nobody is there who waits for it, and nobody has got the whole of it."""
        return self.sent is not None and not (self.done and self.sent == len(self.chunks))

    def add(self, chunk: bytes) -> None:
        self.chunks.append(chunk)
        self.tell()

    def tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    async def read(self):
        sent = 0
        try:
            while not self.done or sent < len(self.chunks):
                if sent == len(self.chunks):
                    await self.news.wait()
                    continue
                sent += 1
                yield self.chunks[sent - 1]
        finally:
            self.sent = sent if self.sent is None else max(self.sent, sent)


class Session:
    """One episode's requests, under a key of its own, and the record of what the policy said in it."""

    def __init__(self, server: "ChatServer", parsers: list[str], temperature: float, max_new_tokens: int):
        self.server, self.handlers = server, server.handlers(*parsers)
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        self.key, self.recorder, self.info = secrets.token_urlsafe(24), Recorder(), {}
        self.replies: dict[str, list[Reply]] = defaultdict(list)
        self.arguments: dict[str, str] = {}  # of each tool call that went out, by its id
        self.closing: str | None = None
        self.arrivals = 0
        self.tasks: set[asyncio.Task] = set()
        self.failed = asyncio.get_running_loop().create_future()  # gets the engine's error

    @property
    def access(self) -> dict:
        return {
            "base_url": self.server.url + "/v1", "api_key": self.key, "model": MODEL,
            "max_tokens": self.max_new_tokens,
        }  # fmt: skip

    async def __aenter__(self) -> "Session":
        self.server.sessions[self.key] = self
        return self

    async def __aexit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """No more requests; those that still run end, and leave no record."""
        self.server.sessions.pop(self.key, None)
        for task in self.tasks:
            task.cancel()
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()  # it was raised where it happened; asyncio need not repeat it

    def fail(self, error: EngineDeadError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def unless_it_failed(self, coroutine):
        """The coroutine's result, or the engine's error as soon as there is one."""
        task = asyncio.ensure_future(coroutine)
        try:
            await asyncio.wait([task, self.failed], return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                raise self.failed.exception()  # ty: ignore[invalid-raise]
            return await task
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, EnvError):
                    await task  # the agent's process is gone before its session is

    def check(self, request: ChatCompletionRequest | ResponsesRequest) -> None:
        """Refuses what a recorded reply can't honour, and warns once of what is pinned."""
        asked = {name: value for name, value in request if value is not None}  # each wire has its own fields
        refused = [name for name, fine in REFUSED.items() if asked.get(name, fine) != fine]
        form = request.text and request.text.format if "text" in asked else asked.get("response_format")
        if form is not None and form.type != "text":
            refused.append("response_format")
        if request.tool_choice not in (None, "none", "auto"):
            refused.append("tool_choice")
        if "input" in asked and should_continue_final_message(request.input):
            raise Refusal(400, PREFILL)
        if refused:
            where = "a recorded reply is the policy's own, without a grammar; /judge/v1 honours it"
            raise Refusal(400, f"{', '.join(refused)}: not supported here: {where}")
        if not 1 <= asked.get("n", 1) <= MAX_CHOICES:
            raise Refusal(400, f"n is {asked['n']}, use 1 to {MAX_CHOICES}")
        run = PINNED | {"temperature": self.temperature}
        pinned = [name for name, own in run.items() if asked.get(name, own) != own]
        if "seed" in asked:  # all rollouts of a group would be the same one
            pinned.append("seed")
        if pinned and "warning" not in self.info:
            self.info["warning"] = f"pinned to the run's values: {', '.join(pinned)}"
            LOG.warning("a ChatAgent asked otherwise, %s", self.info["warning"])

    def restore_arguments(self, messages: list[dict]) -> None:
        """Tool calls come back in the words in which they went out."""
        for message in messages:
            for call in message.get("tool_calls") or []:
                sent = self.arguments.get(call.get("id"))
                if sent is not None and same_json(sent, call["function"].get("arguments")):
                    call["function"]["arguments"] = sent

    async def place(self, exchange: Exchange, prompt: dict, render) -> None:
        """Puts the exact ids of a conversation that goes on in the place of the rendered ones. `render` gives
        the conversation with more messages at its end as the template writes it."""
        if prompt["type"] != "token":
            raise Refusal(400, "images are not recorded yet; /judge/v1 takes them where the model does")
        exchange.parent, delta = self.recorder.place(prompt["prompt"])
        # encoded here for a new conversation too: vLLM's wires differ in whether they add a first token
        exchange.context_ids = encode(self.server.tokenizer, delta)
        before = exchange.parent.ids if exchange.parent else []
        prompt["prompt_token_ids"] = before + exchange.context_ids
        exchange.render, exchange.prompt = render, prompt["prompt"]
        exchange.room = self.server.engine.max_model_len - len(prompt["prompt_token_ids"])
        if exchange.room < 1:
            raise Refusal(400, f"the context is full: {len(prompt['prompt_token_ids'])} tokens")
        if exchange.parent and not exchange.counts:
            exchange.parent.continued = True
        if self.closing is None:
            text = await render([{"role": "assistant", "content": STAND_IN}])
            if STAND_IN not in text:
                raise Refusal(400, "the chat template does not write what an assistant's message says")
            self.closing = text.rpartition(STAND_IN)[2]

    def record(self, exchange: Exchange, index: int, output) -> None:
        """A finished choice, before the client hears of its end."""
        completion, decode = read_completion(output), self.server.tokenizer.decode
        self.server.engine.sampled_tokens += len(completion.token_ids)
        ended = completion.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        length = len(completion.token_ids) - ended
        said, end = decode(completion.token_ids[:length]), decode(completion.token_ids[length:])
        turn = Turn(exchange.parent, exchange.context_ids, completion, end, self.closing)
        turn.texts.add(exchange.prompt + said + self.closing)
        turn.reply = exchange.reply
        # a parent comes first, also where a request that arrived before it was read after it
        turn.order = max((exchange.number, index), turn.parent.order if turn.parent else (0, 0))
        exchange.turns[index] = turn
        self.recorder.turns.append(turn)

    async def deliver(self, exchange: Exchange, index: int, reply: list[dict]) -> None:
        """The reply as the client gets it, and so how the template will write it: parsed, without special
        tokens, cut at a stop string."""
        for message in reply:
            for call in message.get("tool_calls") or []:
                self.arguments[call["id"]] = call["function"]["arguments"]
        text = await exchange.render(reply)
        if text.endswith(self.closing) and index in exchange.turns:
            exchange.turns[index].texts.add(text)


def same_json(text: str, other) -> bool:
    """Whether two tool calls' arguments are the same values; true is not 1."""
    try:
        values = json.loads(text), json.loads(other) if isinstance(other, str) else other
        one, two = (json.dumps(value, sort_keys=True) for value in values)
        return one == two
    except (ValueError, RecursionError):
        return text == other


class Client:
    """The engine as vLLM's handlers see it."""

    def __init__(self, engine):
        self.engine, self.llm = engine, engine.llm

    def __getattr__(self, name: str):
        return getattr(self.llm, name)

    async def generate(self, prompt: dict, asked, request_id: str, **settings):
        exchange, engine = EXCHANGE.get(), self.engine
        engine.requests += 1
        name = f"chat{engine.requests}"  # a client may have chosen `request_id`
        if exchange.judge:
            asked.seed = None if current_platform.is_cpu() else asked.seed  # it kills vLLM's CPU engine
            outputs = self.llm.generate(prompt, asked, name, **settings | engine.adapter)
        else:
            outputs = self.record(exchange, asked, prompt, name)
        try:
            async for output in outputs:
                yield output
        except EngineDeadError as dead:
            exchange.session.fail(dead)  # vLLM would only tell the client of a stream
            raise

    async def record(self, exchange: "Exchange", asked, prompt: dict, name: str):
        """The run's sampling, and each choice on record as soon as it is finished."""
        engine, session = self.engine, exchange.session
        greedy = session.temperature == 0  # all choices are the same, and vLLM samples one only
        sampling = engine.make_sampling(
            n=1 if greedy else asked.n, temperature=session.temperature,
            stop=asked.stop, stop_token_ids=engine.stop_token_ids,
            max_tokens=min(asked.max_tokens, session.max_new_tokens, exchange.room),
            top_p=1.0, top_k=0, min_p=0.0,
            repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
            logprobs=asked.logprobs or 0, flat_logprobs=True, output_kind=asked.output_kind,
            skip_special_tokens=asked.skip_special_tokens, stream_interval=asked.stream_interval,
        )  # fmt: skip
        parts: dict[int, SimpleNamespace] = {}
        async for output in self.llm.generate(prompt, sampling, name, **engine.adapter):
            if greedy:
                output.outputs = [replace(o, index=i) for o in output.outputs for i in range(asked.n)]
            for piece in output.outputs:
                part = parts.setdefault(piece.index, SimpleNamespace(token_ids=[], ids=[], values=[]))
                part.token_ids += piece.token_ids
                starts = piece.logprobs.start_indices if piece.logprobs is not None else []
                part.ids += [piece.logprobs.token_ids[start] for start in starts]
                part.values += [piece.logprobs.logprobs[start] for start in starts]
                if piece.finish_reason:
                    part.logprobs = SimpleNamespace(token_ids=part.ids, logprobs=part.values)
                    part.weight_versions, part.stop_reason = piece.weight_versions, piece.stop_reason
                    part.finish_reason, part.routed_experts = piece.finish_reason, piece.routed_experts
                    if piece.finish_reason in ("stop", "length"):  # else it was not the policy that ended it
                        session.record(exchange, piece.index, part)
            yield output


class Recording:
    """What a recorded session adds to one of vLLM's handlers."""

    def renderer_of(self, request, messages: list[dict], tools: list[dict] | None):
        params = request.build_chat_params(self.chat_template, self.chat_template_content_format)
        params = params.with_defaults(
            self.online_renderer.default_chat_template_kwargs | {"tools": tools, "tokenize": False}
        )
        params.chat_template_kwargs["add_generation_prompt"] = False

        async def render(reply: list[dict]) -> str:
            copy = json.loads(json.dumps([*messages, *reply]))  # rendering parses arguments in place
            _, prompt = await self.renderer.render_messages_async(copy, params)
            return prompt["prompt"]

        return render

    async def deliver(self, exchange: Exchange, index: int, reply: list[dict]) -> None:
        if not exchange.judge:
            await exchange.session.deliver(exchange, index, reply)


class RecordingChat(Recording, OpenAIServingChat):
    async def render_chat_request(self, request):
        exchange = EXCHANGE.get()
        if exchange.judge:
            return await super().render_chat_request(request)
        exchange.session.check(request)
        exchange.session.restore_arguments(request.messages)
        bounds = request.max_tokens, request.max_completion_tokens
        request.max_tokens = request.max_completion_tokens = None  # bounds may be above the room that is left
        rendered = await super().render_chat_request(request)
        request.max_tokens, request.max_completion_tokens = bounds
        if not isinstance(rendered, ErrorResponse):
            tools = [tool.model_dump() for tool in request.tools] if request.tools else None
            render = self.renderer_of(request, request.messages, tools)
            await exchange.session.place(exchange, rendered[1][0], render)
        return rendered

    async def create_chat_completion(self, request, raw_request=None):
        exchange = EXCHANGE.get()
        result = await super().create_chat_completion(request, raw_request)
        if isinstance(result, ErrorResponse):
            return result
        if not isinstance(result, ChatCompletionResponse):
            return self.watch(exchange, result)
        for choice in result.choices:
            await self.deliver(exchange, choice.index, [choice.message.model_dump(exclude_none=True)])
            if choice.message.reasoning is not None:
                choice.message.reasoning_content = choice.message.reasoning  # its name elsewhere
        return result

    async def watch(self, exchange: Exchange, stream):
        """The stream as it is; a choice is delivered before its last chunk goes out."""
        messages = defaultdict(lambda: {"role": "assistant"})
        async for line in stream:
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {}
            for choice in chunk.get("choices", []):
                message, delta = messages[choice["index"]], choice["delta"]
                join_delta(message, delta)
                if choice.get("finish_reason"):
                    await self.deliver(exchange, choice["index"], [message])
                if "reasoning" in delta:
                    delta["reasoning_content"] = delta["reasoning"]
                    line = f"data: {json.dumps(chunk)}\n\n"
            yield line


class RecordingMessages(RecordingChat, AnthropicServingMessages):
    """Anthropic's wire, which vLLM translates to a chat request and back."""

    async def create_messages(self, request, raw_request=None):
        if request.messages and request.messages[-1].role == "assistant" and not EXCHANGE.get().judge:
            raise Refusal(400, PREFILL)
        return await super().create_messages(request, raw_request)

    async def create_chat_completion(self, request, raw_request=None):
        """A tool call whose arguments are no JSON object has no place on this wire: it comes as text."""
        result = await super().create_chat_completion(request, raw_request)
        if not isinstance(result, ChatCompletionResponse):
            return result
        (choice,) = result.choices
        message = choice.message
        for call in message.tool_calls:
            call.function.arguments = call.function.arguments or "{}"  # vLLM parses it
        texts = [as_text(call.function.name, call.function.arguments) for call in message.tool_calls]
        if any(texts):
            message.content = "\n".join(filter(None, [message.content, *texts]))
            message.tool_calls = [call for call, text in zip(message.tool_calls, texts) if not text]
            if choice.finish_reason == "tool_calls" and not message.tool_calls:
                choice.finish_reason = "stop"
            await self.deliver(EXCHANGE.get(), 0, [message.model_dump(exclude_none=True)])
        return result

    async def watch(self, exchange: Exchange, stream):
        """Tool calls go out whole, at the end: only then it is known whether they are calls or text."""
        message = {"role": "assistant"}
        async for line in super().watch(exchange, stream):
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {}
            for choice in chunk.get("choices", []):
                delta = choice["delta"]
                join_delta(message, delta)
                delta["tool_calls"], calls = [], message.get("tool_calls") or []
                if choice.get("finish_reason") and calls:
                    texts = [as_text(**call["function"]) for call in calls]
                    good = [call for call, text in zip(calls, texts) if not text]
                    delta["tool_calls"] = [{"index": index} | call for index, call in enumerate(good)]
                    if any(texts):
                        old, message["tool_calls"] = message.get("content"), good
                        message["content"] = "\n".join(filter(None, [old, *texts]))
                        delta["content"] = (delta.get("content") or "") + message["content"][len(old or "") :]
                        await self.deliver(exchange, 0, [message])
                    if choice["finish_reason"] == "tool_calls" and not good:
                        choice["finish_reason"] = "stop"
                line = f"data: {json.dumps(chunk)}\n\n"
            yield line


class RecordingResponses(Recording, OpenAIServingResponses):
    """OpenAI's newer wire, without what it would keep on the server (previous_response_id, background)."""

    async def _render_resolved_response_inputs(self, request, prev_response, **settings):
        exchange = EXCHANGE.get()
        if exchange.judge:
            return await super()._render_resolved_response_inputs(request, prev_response, **settings)
        exchange.session.check(request)
        bound, request.max_output_tokens = request.max_output_tokens, None
        rendered = await super()._render_resolved_response_inputs(request, prev_response, **settings)
        request.max_output_tokens = bound
        if not isinstance(rendered, ErrorResponse):
            tools = construct_tool_dicts(request.tools, request.tool_choice)
            render = self.renderer_of(request, rendered.messages, tools)
            await exchange.session.place(exchange, rendered.engine_input, render)
        return rendered

    async def create_responses(self, request, raw_request=None):
        exchange = EXCHANGE.get()
        result = await super().create_responses(request, raw_request)
        if isinstance(result, ErrorResponse):
            return result
        if not isinstance(result, ResponsesResponse):
            return self.watch(exchange, result)
        await self.deliver(exchange, 0, construct_chat_messages_with_tool_call(result.output))
        return result

    async def watch(self, exchange: Exchange, events):
        async for event in events:
            if event.type in ("response.completed", "response.incomplete"):
                reply = construct_chat_messages_with_tool_call(event.response.output)
                await self.deliver(exchange, 0, reply)
            yield f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"


def as_text(name: str, arguments: str) -> str:
    """A tool call whose arguments are no JSON object, as text; "" for one whose arguments are. None at all
    are an empty one to a parser that streams."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(json.loads(arguments or "{}"), dict):
            return ""
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'


def join_delta(message: dict, delta: dict) -> None:
    """One more piece of a streamed message."""
    for name in ("content", "reasoning"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls") or []:
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        for name in ("name", "arguments"):
            calls[call["index"]]["function"][name] += (call.get("function") or {}).get(name) or ""


class ChatServer:
    """The server of one engine, in its process and its event loop, on a port of its own on loopback."""

    def __init__(self, engine, tokenizer, template_args: dict):
        self.engine, self.tokenizer, self.template_args = engine, tokenizer, template_args
        self.sessions: dict[str, Session] = {}
        self.by_parsers: dict[tuple[str, str], dict] = {}

    async def start(self) -> "ChatServer":
        self.client = Client(self.engine)
        name = BaseModelPath(name=MODEL, model_path=self.engine.llm.model_config.model)
        self.models = OpenAIServingModels(self.client, [name])
        routes = [Route("/health", self.health), Route("/v1/models", self.list_models)]
        for path in WIRES:
            routes += [
                Route(path, self.post, methods=["POST"]),
                Route("/judge" + path, self.post, methods=["POST"]),
            ]
        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers={404: self.not_found, 405: self.not_found}),
            host="127.0.0.1", port=0, log_level="error", access_log=False, lifespan="off", backlog=4096,
            timeout_keep_alive=600,
        )  # fmt: skip
        self.http = uvicorn.Server(config)
        self.http.capture_signals = contextlib.nullcontext  # they are the process's, not ours
        self.serving = asyncio.create_task(self.http.serve())
        while not self.http.started:
            if self.serving.done():
                raise RuntimeError(f"the chat server did not start: {self.serving.exception()}")
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.http.servers[0].sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        self.http.should_exit = self.http.force_exit = True
        await self.serving

    def session(self, parsers: list[str], temperature: float, max_new_tokens: int) -> Session:
        return Session(self, parsers, temperature, max_new_tokens)

    def handlers(self, tool_parser: str, reasoning_parser: str) -> dict:
        """vLLM's handlers with these parsers. Raises ValueError for a name that vLLM does not know."""
        if (tool_parser, reasoning_parser) not in self.by_parsers:
            parsers = {"tool_parser": tool_parser or None, "enable_auto_tools": bool(tool_parser)}
            parsers |= {
                "reasoning_parser": reasoning_parser,
                "default_chat_template_kwargs": self.template_args,
            }
            shared = {"request_logger": None, "chat_template": None, "chat_template_content_format": "auto"}
            model = {"model_config": self.client.model_config, "renderer": self.client.renderer}
            renderer = OnlineRenderer(**model, **shared, **parsers)
            shared |= {"engine_client": self.client, "models": self.models, "online_renderer": renderer}
            chat = {"response_role": "assistant"}
            self.by_parsers[tool_parser, reasoning_parser] = {
                RecordingChat: RecordingChat(**shared, **parsers, **chat),
                RecordingMessages: RecordingMessages(**shared, **parsers, **chat),
                RecordingResponses: RecordingResponses(**shared, **parsers),
            }
        return self.by_parsers[tool_parser, reasoning_parser]

    # --- HTTP

    async def health(self, _: Request) -> Response:
        return Response(status_code=503 if self.client.errored else 200)

    async def list_models(self, request: Request) -> Response:
        try:
            self.find_session(request)
        except Refusal as refusal:
            return error(request, refusal.status, str(refusal))
        return JSONResponse((await self.models.show_available_models()).model_dump())

    async def not_found(self, request: Request, error_: Exception) -> Response:
        there = ", ".join(["/v1/models", *WIRES])
        return error(request, error_.status_code, f"{request.method} {request.url.path}: there are {there}")

    def find_session(self, request: Request) -> Session:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        session = self.sessions.get(key)  # 192 random bits: how long a look-up takes tells nothing
        if session is None:
            raise Refusal(401, "no session has this key: it is of another run, or its episode is over")
        return session

    async def post(self, request: Request) -> Response:
        try:
            session = self.find_session(request)
            session.arrivals += 1
            number, body = session.arrivals, await read_body(request)
        except Refusal as refusal:
            return error(request, refusal.status, str(refusal))
        except ClientDisconnect:
            return Response(status_code=400)
        reply = self.find_reply(session, request, body, number)
        gone = asyncio.create_task(disconnected(request))
        while not reply.done and not (reply.chunks and reply.media_type == "text/event-stream"):
            news = asyncio.ensure_future(reply.news.wait())
            await asyncio.wait([news, gone], return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            if gone.done():
                break
        if not gone.cancel():  # the client has left
            reply.sent = -1
            return Response(status_code=499)
        if reply.media_type != "text/event-stream":
            return Response(b"".join(reply.chunks), reply.status, media_type=reply.media_type)
        return StreamingResponse(reply.read(), reply.status, media_type=reply.media_type)

    def find_reply(self, session: Session, request: Request, body: bytes, number: int) -> Reply:
        """The stored reply, for a retry or where the last one to the same request never arrived; else a new
        one: the same request made again on purpose is another sample."""
        path = request.url.path
        replies = session.replies[hashlib.sha256(path.encode() + b"\n" + body).hexdigest()]
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        for reply in reversed(replies):
            if (reply.abandoned or retry) and not (reply.done and reply.status >= 500):
                reply.sent = None
                return reply
        reply = Reply()
        replies.append(reply)
        judge, counts = path.startswith("/judge"), path.endswith("/count_tokens")
        exchange = Exchange(session, reply, number, judge, counts)
        task = asyncio.create_task(self.answer(exchange, path, body))
        session.tasks.add(task)

        def ended(task: asyncio.Task) -> None:  # also one that was cancelled before it ran at all
            session.tasks.discard(task)
            if not reply.status:
                reply.status = 503
                reply.add(error_body(path, 503, "the episode is over"))
            reply.done = True
            reply.tell()

        task.add_done_callback(ended)
        return reply

    async def answer(self, exchange: Exchange, path: str, body: bytes) -> None:
        session, reply = exchange.session, exchange.reply
        EXCHANGE.set(exchange)
        parse, kind, method = WIRES[path.removeprefix("/judge")]
        try:
            request = parse_body(parse, body)
            result = await getattr(session.handlers[kind], method)(request)
            if isinstance(result, ErrorResponse):
                reply.status = result.error.code
                reply.add(error_body(path, reply.status, result.error.message))
            elif hasattr(result, "model_dump_json"):
                reply.status = 200
                reply.add(result.model_dump_json(exclude_none=kind is RecordingMessages).encode())
            else:
                reply.status, reply.media_type = 200, "text/event-stream"
                async for chunk in result:
                    reply.add(chunk.encode())
        except EngineDeadError as dead:
            session.fail(dead)
            reply.status = 500
            reply.add(error_body(path, 500, str(dead)))
        except Exception as problem:  # a template, a parser, or what a client sent may raise anything
            if isinstance(problem, EngineGenerateError):  # vLLM's name for a request that broke on its way in
                problem = problem.__cause__ or problem
            reply.status = problem.status if isinstance(problem, Refusal) else 400
            if isinstance(problem, VLLMServerError):
                reply.status = create_error_response(problem).error.code
            LOG.debug("%s", path, exc_info=True)
            reply.add(error_body(path, reply.status, f"{problem}" or type(problem).__name__))


WIRES = {
    "/v1/chat/completions": (ChatCompletionRequest, RecordingChat, "create_chat_completion"),
    "/v1/responses": (ResponsesRequest, RecordingResponses, "create_responses"),
    "/v1/messages": (AnthropicMessagesRequest, RecordingMessages, "create_messages"),
    "/v1/messages/count_tokens": (AnthropicCountTokensRequest, RecordingMessages, "count_tokens"),
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
    413: "request_too_large",
}  # fmt: skip


def parse_body(kind, body: bytes):
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error_:
        raise Refusal(400, f"the body is no JSON: {error_}") from None
    if not isinstance(values, dict):
        raise Refusal(400, f"the body is a {type(values).__name__}, not a JSON object")
    if b"\\u" in body:
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refusal(400, "the body has half of a surrogate pair, which is no text") from None
    return kind.model_validate(values)


async def read_body(request: Request) -> bytes:
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise Refusal(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
                chunks.append(chunk)
    except TimeoutError:
        raise Refusal(408, f"the body was not there after {BODY_TIMEOUT_S} s") from None
    return b"".join(chunks)


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_body(path: str, status: int, message: str) -> bytes:
    """An error in the wire's own shape."""
    if "/messages" in path:
        kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
    kind = "server_error" if status >= 500 else "invalid_request_error"
    shape = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": shape}).encode()


def error(request: Request, status: int, message: str) -> Response:
    return Response(error_body(request.url.path, status, message), status, media_type="application/json")


async def open_server(engine, tokenizer, template_args: dict) -> ChatServer:
    """The engine's server, started by whoever comes first."""
    if engine.chat_server is None:
        engine.chat_server = asyncio.create_task(ChatServer(engine, tokenizer, template_args).start())
    return await asyncio.shield(engine.chat_server)
