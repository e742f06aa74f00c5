"""The job of scripts/bench/race.py on TRL's GRPOTrainer, in TRL's own environment. Writes metrics.jsonl.

What Instar's flags say is said here in TRL's words:

| Instar | TRL | note |
|---|---|---|
| token mean over the step | loss_type="dapo" | |
| unbiased std within a group | scale_rewards="group" | TRL adds 1e-4 to it |
| --clip-low, --clip-high | epsilon, epsilon_high | |
| AdamW, weight decay 0 | the same optimizer object | |
| --lr-warmup-steps, linear to 0 | a LambdaLR of the same rule | the same at each step |
| fp32 on a CPU | bf16=False | |
| no recomputation | gradient_checkpointing=False | TRL's default would be slower |
| order of the prompts | shuffle_dataset=False, the rows in Instar's order | |
| --max-staleness | --ahead: steps_per_generation | rollouts of so many steps at once, then as many steps |

A reward is the environment's own `step`, in a reward function that is async, so that all answers of a batch
wait for the judge at the same time. Evaluation: greedy answers in one batch, on the engine that samples.
"""

import argparse
import asyncio
import inspect
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))
import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from common.envs import load_env


def prompt_order(seed: int, num_tasks: int, count: int) -> list[int]:
    """The first `count` tasks in the order in which Instar goes through them, epoch by epoch."""
    epochs = range(-(-count // num_tasks))
    return [int(i) for e in epochs for i in np.random.default_rng([seed, e]).permutation(num_tasks)][:count]


async def grade(make_env, task: dict, tokenizer, ids: list[int]):
    """What the environment makes of an answer: its text is without the token that ended the turn."""
    env = make_env()
    env.reset(task)
    outcome = env.step(tokenizer.decode(ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids))
    return await outcome if inspect.isawaitable(outcome) else outcome


class Rows(TrainerCallback):
    """Evaluates at the start of every so many steps and after the last; writes one row a step."""

    def __init__(self, path: Path, eval_every: int, evaluate):
        self.file, self.eval_every, self.evaluate, self.row = path.open("w"), eval_every, evaluate, {}

    def on_step_begin(self, args, state, control, **_):
        self.row = {"step": state.global_step}
        if state.global_step % self.eval_every == 0:
            self.row["eval/mean"] = self.evaluate()

    def on_log(self, args, state, control, logs, **_):
        if "learning_rate" not in logs:  # the summary after the last step
            return
        keys = {"reward": "reward/mean", "completions/mean_length": "rollout/len_mean", "learning_rate": "lr"}
        self.row |= {name: logs[key] for key, name in keys.items() if key in logs}
        if state.global_step == state.max_steps:
            self.row["eval_end/mean"] = self.evaluate()
        self.file.write(json.dumps(self.row) + "\n")
        self.file.flush()


def main(args) -> None:
    torch.set_num_threads(args.threads)
    make_env, tokenizer = load_env(args.env), AutoTokenizer.from_pretrained(args.model)
    tasks, eval_tasks = make_env().tasks("train"), make_env().tasks("eval")
    order = prompt_order(args.seed, len(tasks), args.steps * args.prompts)
    prompts = [[{"role": "user", "content": make_env().reset(tasks[i])}] for i in order]
    rollouts, on_gpu = args.prompts * args.group_size, args.device == "cuda"
    config = GRPOConfig(
        output_dir=str(args.output / "trl"), seed=args.seed, max_steps=args.steps, use_cpu=not on_gpu,
        per_device_train_batch_size=rollouts // args.micro, gradient_accumulation_steps=args.micro,
        num_generations=args.group_size, steps_per_generation=args.micro * (1 + args.ahead),
        max_completion_length=args.max_new_tokens, temperature=args.temperature, shuffle_dataset=False,
        loss_type="dapo", scale_rewards="group", epsilon=args.clip_low, epsilon_high=args.clip_high, beta=0.0,
        max_grad_norm=args.max_grad_norm, bf16=on_gpu, gradient_checkpointing=False,
        use_vllm=args.engine == "vllm", vllm_mode="colocate", vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=512,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.to(args.device)  # before the optimizer, which keeps its parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=on_gpu)

    def lr_factor(step: int) -> float:
        return min(1.0, (step + 1) / (args.lr_warmup_steps + 1)) * (1.0 - step / args.steps)

    async def reward(completion_ids, task_index, **_):
        asked = (grade(make_env, tasks[i], tokenizer, ids) for i, ids in zip(task_index, completion_ids))
        return [outcome.reward for outcome in await asyncio.gather(*asked)]

    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts, "task_index": order}),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)),
    )  # fmt: skip
    eval_chats = [[{"role": "user", "content": make_env().reset(task)}] for task in eval_tasks]
    template = {"add_generation_prompt": True, "return_dict": False}
    eval_ids = [tokenizer.apply_chat_template(chat, **template) for chat in eval_chats]

    @torch.no_grad()
    def evaluate() -> float:
        if args.engine == "vllm":
            from vllm import SamplingParams

            trainer.vllm_generation.sync_weights()
            asked = [{"prompt_token_ids": ids} for ids in eval_ids]
            greedy = SamplingParams(temperature=0.0, max_tokens=args.max_new_tokens)
            outputs = trainer.vllm_generation.llm.generate(asked, greedy, use_tqdm=False)
            answers = [list(output.outputs[0].token_ids) for output in outputs]
        else:
            batch = tokenizer.pad({"input_ids": eval_ids}, padding_side="left", return_tensors="pt")
            batch = batch.to(trainer.model.device)
            with torch.autocast(args.device, torch.bfloat16, enabled=on_gpu):
                ids = trainer.model.generate(**batch, do_sample=False, max_new_tokens=args.max_new_tokens)
            answers = [row[row != tokenizer.pad_token_id] for row in ids[:, batch["input_ids"].shape[1] :]]
            answers = [row.tolist() for row in answers]
        scored = [grade(make_env, task, tokenizer, ids) for task, ids in zip(eval_tasks, answers)]

        async def scores() -> list[float]:
            return [outcome.score for outcome in await asyncio.gather(*scored)]

        return float(np.mean(asyncio.run(scores())))

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Rows(args.output / "metrics.jsonl", args.eval_every, evaluate))
    print(f"ready {time.time()}", flush=True)
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("env", "model", "device", "engine"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("seed", "steps", "prompts", "group_size", "max_new_tokens", "lr_warmup_steps", "eval_every"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    for name in ("threads", "micro", "ahead"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("lr", "temperature", "clip_low", "clip_high", "max_grad_norm"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, required=True)
    parser.add_argument("--output", type=Path, required=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    main(parser.parse_args())
