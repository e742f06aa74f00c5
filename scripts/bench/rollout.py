"""Tokens per second of the rollout loop beside raw vLLM, in turns, on one machine.

    .venv/bin/python scripts/bench/rollout.py                         tiny, 64 new tokens, 8 answers a prompt
    .venv/bin/python scripts/bench/rollout.py --new-tokens 5 --max-in-flight 32
    python scripts/bench/rollout.py --model 0.6b --new-tokens 512 --prompts 64 --max-in-flight 64         a GPU
    python scripts/bench/rollout.py --model 4b --new-tokens 512 --prompts 64 --max-in-flight 64
    python scripts/bench/rollout.py --model 4b ... --engine-flags="--quantization fp8"         what they change
    python scripts/bench/rollout.py --model smollm2 --copy-words 100 --new-tokens 200 --group-size 1 \
        --prompts 16 --max-in-flight 1 --engine-flags="--speculative-tokens 4"

raw: `LLM.generate` with all prompts at once, log-probs on, no text. loop: `rollout_group` as a run has it:
environment processes, chat template, records with masks and versions, packed for the queue. On a GPU both have
decode graphs and share it; the shapes of random_models.py have random weights. With --engine-flags raw vLLM,
which does not get them, works on as many answers at a time as the loop does.
"""

import asyncio
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass
class Args:
    model: str = "tiny"
    """As in algos/grpo.py, or a shape of scripts/bench/random_models.py."""
    new_tokens: int = 64
    """Tokens of every answer; the end of a turn does not stop it."""
    group_size: int = 8
    """Answers to a prompt."""
    prompts: int = 64
    """Prompts of a round."""
    rounds: int = 5
    """Rounds of each kind; the median counts."""
    max_in_flight: int = 16
    """Prompt groups that the loop works on at a time, as --max-in-flight of a run."""
    temperature: float = 1.0
    """Of all answers."""
    copy_words: int = 0
    """Above 0: the prompts ask to repeat a text of that many words, which is what ngram guesses well."""
    engine_flags: str = ""
    """Flags of the loop's engine, such as "--quantization fp8"."""
    out: str = ""
    """File for the figures as JSON."""


def make_raw(args: Args, model_path: str, prompts: list[list[int]], kv_cache_gb: float, on_gpu: bool):
    from vllm import LLM, SamplingParams

    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    kind = (
        {"compilation_config": graphs, "gpu_memory_utilization": 0.4} if on_gpu else {"enforce_eager": True}
    )
    if args.engine_flags:
        kind["max_num_seqs"] = args.max_in_flight * args.group_size
    llm = LLM(
        model_path, max_model_len=2048, kv_cache_memory_bytes=int(kv_cache_gb * 2**30), disable_log_stats=True,
        logprobs_mode="processed_logprobs", generation_config="vllm", **kind,
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=args.temperature, n=args.group_size, max_tokens=args.new_tokens, logprobs=0,
        flat_logprobs=True, detokenize=False, ignore_eos=True,
    )  # fmt: skip

    def once() -> int:
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        return sum(len(each.token_ids) for output in outputs for each in output.outputs)

    return once


async def main(args: Args) -> None:
    import torch
    from common.env import EnvFlags
    from common.envs.pool import EnvPool
    from common.models import load_tokenizer, resolve_dtype, resolve_model
    from common.agent import encode, render
    from common.rollout import Engine, EngineFlags, rollout_group
    from common.sample_queue import pack_group

    from random_models import SIZES, add_tokenizer, make_checkpoint

    on_gpu, folder = torch.cuda.is_available(), tempfile.TemporaryDirectory()
    if args.model in SIZES:
        model_path = folder.name
        make_checkpoint(args.model, model_path, torch.bfloat16)
        add_tokenizer(model_path)
    else:
        model_path = resolve_model(args.model)
    kv_cache_gb = 24.0 if on_gpu else 0.25
    tokenizer, envs = load_tokenizer(model_path), EnvPool()
    texts = [f"{number:04d}" for number in range(args.prompts)]
    env, dice = "reverse", random.Random(0)
    if args.copy_words:
        words = "river stone paper green light seven mountain table window garden silver orange".split()
        told = [" ".join(dice.choices(words, k=args.copy_words)) for _ in texts]
        texts = [f"Repeat this text word for word: {text}" for text in told]
        tasks = [{"prompt": text, "answer": "none", "split": "train"} for text in texts]
        rows = map(json.dumps, [*tasks, tasks[0] | {"split": "eval"}])
        Path(folder.name, "copy.jsonl").write_text("\n".join(rows) + "\n")
        env = f"jsonl:{folder.name}/copy.jsonl"
    await envs.start(env, EnvFlags(), args.max_in_flight)
    prompts = [
        encode(tokenizer, render(tokenizer, [{"role": "user", "content": text}], {})) for text in texts
    ]
    raw = make_raw(args, model_path, prompts, kv_cache_gb, on_gpu)
    sizes = {"max_in_flight": args.max_in_flight, "max_model_len": 2048, "kv_cache_gb": kv_cache_gb}
    flags = tyro.cli(EngineFlags, args=args.engine_flags.split(), default=EngineFlags(**sizes))
    dtype = resolve_dtype(model_path, "auto", on_gpu)
    engine = Engine(model_path, dtype, 0, flags, gpus=0.4 if on_gpu else 0.0)
    await engine.start([tokenizer.eos_token_id])
    engine.make_sampling = functools.partial(engine.make_sampling, ignore_eos=True)
    engine.stop_token_ids = []

    async def loop() -> int:
        before, todo = engine.sampled_tokens, iter(range(args.prompts))

        async def slot() -> None:
            for index in todo:
                group = await rollout_group(
                    engine, tokenizer, envs, "train", index, ticket=index, group_size=args.group_size,
                    temperature=args.temperature, max_new_tokens=args.new_tokens, timeout_s=600.0,
                    system_prompt=None, template_args={},
                )  # fmt: skip
                pack_group(group)

        await asyncio.gather(*(slot() for _ in range(args.max_in_flight)))
        return engine.sampled_tokens - before

    rates: dict[str, list[float]] = {"raw": [], "loop": []}
    for number in range(args.rounds + 1):
        for kind in rates:
            start = time.perf_counter()
            tokens = raw() if kind == "raw" else await loop()
            if number:  # the first round warms up
                rates[kind].append(tokens / (time.perf_counter() - start))
    print(f"{args.prompts} prompts x {args.group_size} answers x {args.new_tokens} tokens, {args.model}")
    for kind, values in rates.items():
        print(f"{kind:5} tokens/s: {statistics.median(values):8.0f}   rounds: {[round(v) for v in values]}")
    ratios = [ours / theirs for ours, theirs in zip(rates["loop"], rates["raw"])]
    print(f"loop / raw: {statistics.median(ratios):.3f}   rounds: {[round(r, 3) for r in ratios]}")
    if engine.guessed:
        print(f"{engine.accepted / engine.guessed:.1%} of {engine.guessed} guesses accepted")
    if args.out:
        found = vars(args) | {"tokens_per_s": rates, "guessed": engine.guessed, "accepted": engine.accepted}
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
    envs.close()
    engine.llm.shutdown()
    engine.llm = None  # its finalizer does not survive the interpreter's end


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Args)))
