"""What the chat server costs beside the engine alone: CPU time a request, and requests a second.

    .venv/bin/python scripts/bench/chat.py                                         tiny, 256 sessions
    .venv/bin/python scripts/bench/chat.py --model smollm2 --new-tokens 64 --sessions 16 --requests 64

direct: `Engine.generate` with token ids. http, stream: the same prompts as chat requests, each over a session
of its own, from a client in another process. CPU is that of the engine's front-end process, where the server
runs too; the model computes in a third one.
"""

import asyncio
import functools
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

CLIENT = """
import asyncio, json, sys, httpx
url, streams, prompts, keys, count = json.loads(sys.argv[1])
async def main():
    limits = httpx.Limits(max_connections=None)
    print("ready", flush=True)
    sys.stdin.readline()
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        todo = iter(range(count))
        async def session(key):
            for number in todo:
                message = {"role": "user", "content": prompts[number % len(prompts)]}
                body = {"model": "policy", "messages": [message], "stream": streams, "user": str(number)}
                reply = await client.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
                assert reply.status_code == 200, reply.text
        await asyncio.gather(*map(session, keys))
asyncio.run(main())
"""


@dataclass
class Args:
    model: str = "tiny"
    """As in algos/grpo.py."""
    new_tokens: int = 16
    """Tokens of every reply; the end of a turn does not stop it."""
    requests: int = 1024
    """Requests of a round."""
    sessions: int = 256
    """Sessions at once, each with a request at a time."""
    rounds: int = 3
    """Rounds of each kind; the median counts."""
    output: str | None = None
    """A JSON file for the figures."""


async def main(args: Args) -> None:
    from common.agent import encode, render
    from common.chat_server import open_server
    from common.models import load_tokenizer, resolve_dtype, resolve_model
    from common.rollout import Engine, EngineFlags

    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path)
    engine = Engine(path, resolve_dtype(path, "auto", on_gpu=False), 0, EngineFlags(), gpus=0.0)
    await engine.start([tokenizer.eos_token_id])
    engine.make_sampling = functools.partial(engine.make_sampling, ignore_eos=True)
    engine.stop_token_ids = []
    server = await open_server(engine, tokenizer, {})
    texts = [f"{number:04d}" for number in range(64)]
    prompts = [encode(tokenizer, render(tokenizer, [{"role": "user", "content": t}], {})) for t in texts]

    async def direct():
        todo = iter(range(args.requests))
        yield

        async def session() -> None:
            for number in todo:
                await engine.generate(prompts[number % len(prompts)], 1, 1.0, args.new_tokens)

        await asyncio.gather(*(session() for _ in range(args.sessions)))

    async def http(stream: bool):
        sessions = [server.session(["hermes", ""], 1.0, args.new_tokens) for _ in range(args.sessions)]
        for session in sessions:
            await session.__aenter__()
        keys = [session.key for session in sessions]
        told = json.dumps([server.url, stream, texts, keys, args.requests])
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, told, **pipes)
        assert await client.stdout.readline() == b"ready\n"
        yield  # the time starts
        client.stdin.write(b"go\n")
        assert await client.wait() == 0
        tokens = [turn.completion.token_ids for session in sessions for turn in session.recorder.turns]
        assert len(tokens) == args.requests and {len(ids) for ids in tokens} == {args.new_tokens}
        for session in sessions:
            session.close()

    kinds = {"direct": direct, "http": lambda: http(False), "stream": lambda: http(True)}
    rows: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    core = [child for child in psutil.Process().children() if "EngineCore" in " ".join(child.cmdline())]
    for number in range(args.rounds + 1):
        for kind, run in kinds.items():
            stages = run()
            await anext(stages)
            own, computing, start = time.process_time(), cpu(core), time.perf_counter()
            await anext(stages, None)
            wall, own = time.perf_counter() - start, time.process_time() - own
            if number:  # the first round warms up
                rows[kind].append((own, cpu(core) - computing, wall))
    figures = {}
    for kind, values in rows.items():
        own, computing, wall = (statistics.median(column) for column in zip(*values))
        ms = 1000 / args.requests
        figures[kind] = {
            "front_end_cpu_ms": own * ms, "engine_core_cpu_ms": computing * ms, "requests_per_s": args.requests / wall,
        }  # fmt: skip
    alone = sum(figures["direct"][name] for name in ("front_end_cpu_ms", "engine_core_cpu_ms"))
    print(
        f"{args.model}: {args.requests} requests x {args.new_tokens} tokens, {args.sessions} sessions at once"
    )
    for kind, row in figures.items():
        row["server_cpu_ms"] = row["front_end_cpu_ms"] - figures["direct"]["front_end_cpu_ms"]
        row["server_share_of_direct"] = row["server_cpu_ms"] / alone
        print(f"{kind:7}" + "  ".join(f"{name} {value:.3g}" for name, value in row.items()))
    if args.output:
        Path(args.output).write_text(json.dumps({"args": vars(args), "figures": figures}, indent=1) + "\n")
    await server.stop()
    engine.llm.shutdown()
    engine.llm = None  # its finalizer does not survive the interpreter's end


def cpu(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Args)))
