"""How far the engine's log-probs are from the trainer's after each refit, beside the same without our loop.

    python scripts/bench/mismatch.py --models tiny                       a CPU: fp32, so nearly nothing
    python scripts/bench/mismatch.py --models smollm2 0.6b 4b moe        one GPU: bf16
    python scripts/bench/mismatch.py --models smollm2 4b --flags="--quantization fp8"     its engine in FP8

loop: `algos/grpo.py`, synchronous, so that a step's rollouts and its update have the same weights. Its metrics
have the figures of the ten refits. plain: the checkpoint that it leaves, loaded by `vllm.LLM` and by
transformers (the engine's dtype, sdpa), and the log-probs of as many sampled tokens compared: what two
implementations of a model differ by, whoever moves the weights. No batch-invariant kernels in either.

abs_mean is the mean of |engine - trainer| over sampled tokens; k3 that of exp(d) - 1 - d, with d = trainer - engine.
0.6b, 4b and moe are random weights in known shapes with SmolLM2's tokenizer, on an environment whose reward
is a coin that the answer's text decides, so that there is a gradient.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

COIN = """
import zlib

from common.env import Env, Step


class Coin(Env):
    def tasks(self, split):
        return [{"number": n} for n in (range(500) if split == "train" else range(500, 520))]

    def reset(self, task):
        return f"Say anything about {task['number']}."

    def step(self, action):
        return Step(reward=float(zlib.crc32(action.encode()) % 2))
"""


@dataclass
class Args:
    models: list[str] = field(default_factory=lambda: ["tiny"])
    """tiny, smollm2, or a shape of scripts/bench/random_models.py."""
    refits: int = 10
    """Optimizer steps, each followed by a refit."""
    prompts: int = 16
    """Prompts of a step, with 8 answers each."""
    new_tokens: int = 128
    """Most tokens of an answer."""
    flags: str = ""
    """More flags of the run."""
    out: str = ""
    """File for the figures as JSON."""


def loop(model: str, folder: str, args: Args) -> list[dict]:
    """The run; the figures of its steps, of which step s is sampled after refit s."""
    Path(folder, "coin.py").write_text(COIN)
    command = [sys.executable, "-m", "algos.grpo", "--model", model, "--env", f"{folder}/coin.py:Coin"]
    command += ["--max-staleness", "0", "--max-steps", str(args.refits + 1), "--output-dir", f"{folder}/run"]
    command += ["--prompts-per-step", str(args.prompts), "--group-size", "8", "--lr", "1e-5"]
    command += ["--max-new-tokens", str(args.new_tokens), "--max-model-len", "512", *args.flags.split()]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1200, stdout=subprocess.DEVNULL)
    lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    names = ("abs_mean", "k3", "abs_max", "exact_frac")
    return [{name: row[f"mismatch/{name}"] for name in names} for row in map(json.loads, lines)]


def plain(model: str, args: Args) -> dict:
    """The same figures for the checkpoint in `model`, from vLLM and transformers as they are."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    on_gpu = torch.cuda.is_available()
    dtype = "bfloat16" if on_gpu else "float32"
    llm = LLM(
        model, dtype=dtype, max_model_len=512, logprobs_mode="processed_logprobs", generation_config="vllm",
        kv_cache_memory_bytes=1 << 30, enforce_eager=not on_gpu, gpu_memory_utilization=0.3,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [f"Say anything about {number}." for number in range(args.prompts)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in texts
    ]
    sampling = SamplingParams(n=8, max_tokens=args.new_tokens, logprobs=0, detokenize=False, seed=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    kind = getattr(torch, dtype)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=kind, attn_implementation="sdpa")
    reference.to("cuda" if on_gpu else "cpu").eval()
    differences = []
    for ids, output in zip(prompts, outputs, strict=True):
        for each in output.outputs:
            sampled = torch.tensor([step[i].logprob for step, i in zip(each.logprobs, each.token_ids)])
            whole = torch.tensor([[*ids, *each.token_ids]], device=reference.device)
            with torch.no_grad():
                logits = reference(whole, use_cache=False).logits[0, len(ids) - 1 : -1].float()
            held = logits.log_softmax(-1).gather(-1, whole[0, len(ids) :, None]).squeeze(-1).cpu()
            differences.append(held - sampled)
    d = torch.cat(differences).double()
    return {
        "abs_mean": d.abs().mean().item(), "k3": (d.expm1() - d).mean().item(),
        "abs_max": d.abs().max().item(), "exact_frac": (d == 0).double().mean().item(), "tokens": len(d),
    }  # fmt: skip


def measure(name: str, args: Args) -> dict:
    import torch
    from common.models import resolve_model
    from random_models import SIZES, add_tokenizer, make_checkpoint

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        model = f"{folder}/model" if name in SIZES else resolve_model(name)
        if name in SIZES:
            make_checkpoint(name, model, torch.bfloat16)
            add_tokenizer(model)
        rows = loop(model, folder, args)
        checkpoint = max(Path(folder, "run").glob("checkpoints/*"), key=lambda path: path.stat().st_mtime)
        found = {"loop": rows, "plain": plain(str(checkpoint), args)}
        shutil.rmtree(f"{folder}/run")
    return found


def main(args: Args) -> None:
    results = {}
    for name in args.models:
        if len(args.models) > 1:  # an engine in this process keeps its memory
            with tempfile.NamedTemporaryFile(suffix=".json") as out:
                own = [sys.executable, __file__, "--models", name, "--out", out.name]
                own += ["--refits", str(args.refits), "--prompts", str(args.prompts)]
                own += ["--new-tokens", str(args.new_tokens), f"--flags={args.flags}"]
                subprocess.run(own, check=True, timeout=1800)
                results |= json.loads(Path(out.name).read_text())
        else:
            found = results[name] = measure(name, args)
            for kind in ("abs_mean", "k3"):
                steps = [row[kind] for row in found["loop"]]
                print(f"{name:8} {kind:8} plain {found['plain'][kind]:.3e}  loop, by refit: ", end="")
                print(" ".join(f"{value / found['plain'][kind]:.2f}" for value in steps), "x", flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
