"""SFT: supervised fine-tuning on chat conversations, with the loss on the assistant's turns alone.

    L = -1/N sum_t m_t log p(y_t | y_<t)                 N = sum_t m_t over the step's conversations

y are the tokens of a conversation under the model's chat template; m_t is 1 on what the model has to say
(each assistant turn and the token that ends it) and 0 on everything else.

What is chosen here, and why:
  1. token mean over the step (N = its tokens with loss, all ranks): how it is split into micro-batches and
     ranks changes nothing;
  2. turns are tokenised one by one, as in a rollout: the model learns the tokens that it will have to sample;
  3. every assistant turn has loss, the earlier ones of a conversation too;
  4. conversations are padded, or packed so that none attends to another. One that is too long is left out,
     not cut: a cut answer lacks the token that ends it;
  5. the held-out conversations do not depend on --seed: losses of different seeds can be compared.

Suffixes: B conversations, T tokens, S = T - 1 next-token positions.

    driver main() -- micro-batches of the step --> Trainer x ranks (FSDP2)

Data is a JSONL file whose lines are one of
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"prompt": "..." or [messages], "response": "..."}

One CPU:    python -m algos.sft --model tiny --data reverse
One GPU:    python -m algos.sft --model smollm2 --data chats.jsonl
8 GPUs:     python -m algos.sft --model PATH --data chats.jsonl --num-trainers 8
Many nodes: RAY_ADDRESS=auto python -m algos.sft ... (on the head of a running Ray cluster)

Edit here: data format -> read_conversations | what has loss -> encode_conversation | loss -> sft_loss
           optimizer -> Trainer.train_step | what is trained when -> main
"""

import functools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from annotated_types import Ge, Gt
from tyro.conf import OmitArgPrefixes

from common import checks, cluster
from common.batching import micro_batches, to_device
from common.checkpoint import SaveFlags, load_checkpoint, load_weights, save_checkpoint, starting_point
from common.checks import FlagError
from common.cluster import DeadlineFlags, Run, RunError
from common.envs.jsonl import is_prompt
from common.envs.reverse import Reverse
from common.logger import LogFlags, Logger, mean_of, merge
from common.logprobs import LogprobHead
from common.metrics import Stopwatch, update_metrics
from common.models import load_tokenizer, resolve_model
from common.parallel import ParallelFlags, build_model, clip_gradients, describe, join_world, make_optimizer
from common.parallel import sync_gradients
from common.refit import connect_store, open_store
from common.trackers import open_trackers

HELD_OUT, MAX_HELD_OUT = 0.05, 128  # share of the conversations that is never trained, and its bound
NUM_DEMONSTRATIONS = 2000  # of --data reverse


@dataclass
class Args:
    # experiment
    model: str = "tiny"
    """tiny, smollm2, a local Hugging Face folder, or a Hub id (fetched once)."""
    data: str = "reverse"
    """Conversations to learn: a JSONL file, or reverse (demonstrations of the toy task). The last 5 % of a
    fixed shuffle (1 to 128 conversations) are held out."""
    max_steps: Annotated[int, Ge(1)] = 150
    """Optimizer steps. Epochs follow each other, each in a new order, until these are made."""
    eval_every: Annotated[int, Ge(1)] = 25
    """Steps between evaluations, the loss on what is held out. Step 0 and the end are always evaluated."""
    seed: int = 1
    """Data order."""
    # data
    batch_size: Annotated[int, Ge(1)] = 32
    """Conversations of an optimizer step, over all ranks."""
    max_length: Annotated[int, Ge(2)] = 2048
    """Longest conversation in tokens; longer ones are left out, with a warning that counts them."""
    # optimizer (AdamW)
    lr: Annotated[float | None, Ge(0)] = None
    """Peak learning rate. Default: 2e-3 for tiny, 1e-5 for every other model."""
    lr_warmup_steps: Annotated[int, Ge(0)] = 5
    """Steps of linear warm-up from 0. It and the decay count steps in which an update was made: one without
    rows, or without a finite gradient, uses none up. Raise it when the first steps spoil the policy."""
    lr_end_ratio: Annotated[float, Ge(0)] = 0.0
    """Learning rate at the end over the peak; the decay is linear. 1 keeps it constant."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """Gradients are scaled down to this global L2 norm. Lower it when single steps spoil the policy."""
    # what every algorithm shares
    parallel: Annotated[ParallelFlags, OmitArgPrefixes] = field(default_factory=ParallelFlags)
    deadline: Annotated[DeadlineFlags, OmitArgPrefixes] = field(default_factory=DeadlineFlags)
    save: Annotated[SaveFlags, OmitArgPrefixes] = field(default_factory=SaveFlags)
    log: Annotated[LogFlags, OmitArgPrefixes] = field(default_factory=LogFlags)


# --- Data


def read_conversations(data: str) -> list[tuple[str, list[dict]]]:
    """(where it is from, messages) of each conversation of `--data`; blank lines are skipped.

    Raises FlagError naming file, line number and fix for the first line that is no conversation.
    """
    if data == "reverse":
        tasks = Reverse().tasks("train")[-NUM_DEMONSTRATIONS:]  # tiny has seen the first
        return [("reverse", as_messages({"prompt": t["prompt"], "response": t["answer"]})) for t in tasks]
    if not Path(data).is_file():
        raise FlagError(f"--data {data}: there is no such file; use reverse or the path of a JSONL file")
    conversations = []
    for number, line in enumerate(Path(data).read_bytes().splitlines(), 1):
        if line.strip():
            try:
                conversations.append((f"{data}:{number}", as_messages(json.loads(line))))
            except json.JSONDecodeError as error:
                fix = f"not JSON ({error}); write one JSON object a line"
                raise FlagError(f"--data {data}:{number}: {fix}") from error
            except ValueError as error:
                raise FlagError(f"--data {data}:{number}: {error}") from error
    return conversations


def as_messages(record) -> list[dict]:
    """The chat of one record of a file. Raises ValueError with what is wrong and what would be right."""
    if not isinstance(record, dict):
        raise ValueError('not a JSON object; write {"messages": [...]} or {"prompt": ..., "response": ...}')
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not is_prompt(messages):
            raise ValueError('`messages` must be a list of {"role": ..., "content": ...}')
    elif {"prompt", "response"} <= record.keys():
        prompt, response = record["prompt"], record["response"]
        if not is_prompt(prompt):
            raise ValueError('`prompt` must be a string or a list of {"role": ..., "content": ...}')
        if not isinstance(response, str):
            raise ValueError(f"`response` must be a string, not {response!r}")
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [*prompt, {"role": "assistant", "content": response}]
    else:
        keys = f"neither `messages` nor `prompt` and `response` among {sorted(record)}"
        raise ValueError(f"{keys}; add them or rename what is there")
    parts = [
        part for message in messages if isinstance(message["content"], list) for part in message["content"]
    ]
    if record.get("images") or any(isinstance(part, dict) and part.get("type") == "image" for part in parts):
        raise ValueError("images are not supported here yet; leave the line out")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no turn of the role assistant, so nothing to learn; add one or remove the line")
    return messages


def encode_conversation(tokenizer, messages: list[dict]) -> tuple[list[int], list[int]]:
    """Token ids of a chat and its loss mask, both of length T.

    The mask is 1 exactly on what the model has to say: each assistant turn with the token that ends it, not
    the line break that some templates put after that. Turns are tokenised one by one, as in a rollout, where
    the prompt ends before the answer begins. Raises ValueError where the template cannot be cut into turns.
    """

    def render(turns: list[dict], add_generation_prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    prefixes = []  # the text up to the end of each piece, and whether the loss is on that piece
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            if i == 0:
                raise ValueError(
                    "a conversation cannot begin with an assistant turn: there is nothing to answer"
                )
            prefixes += [
                (render(messages[:i], add_generation_prompt=True), 0),
                (render(messages[: i + 1]), 1),
            ]
    prefixes.append((render(messages), 0))

    ids, mask, done = [], [], ""
    for text, learned in prefixes:
        if not text.startswith(done):
            raise ValueError(
                f"the chat template rewrites earlier turns: {done!r} is not the beginning of {text!r}. Use "
                "conversations of one assistant turn, or a template that leaves earlier turns as they were"
            )
        piece = tokenizer(text[len(done) :], add_special_tokens=False)["input_ids"]
        end = len(piece)
        # Whitespace after the token that ends the turn belongs to the template.
        while end and not tokenizer.decode([piece[end - 1]]).strip():
            end -= 1
        ids += piece
        mask += [learned] * end + [0] * (len(piece) - end)
        done = text
    return ids, mask


def encode_all(conversations: list[tuple[str, list[dict]]], tokenizer, max_length: int) -> list[dict]:
    """Each conversation of at most `max_length` tokens as a row of the batch.

    Raises FlagError naming file and line of one that cannot be learned.
    """
    rows = []
    for where, messages in conversations:
        try:
            ids, mask = encode_conversation(tokenizer, messages)
        except Exception as error:  # templates raise what they like, at roles that they do not know for one
            raise FlagError(f"--data {where}: {type(error).__name__}: {error}") from error
        if not any(mask):
            raise FlagError(f"--data {where}: every answer is empty, so nothing to learn; remove the line")
        if len(ids) <= max_length:
            rows.append({"token_ids": np.array(ids), "action_mask": np.array(mask, dtype=bool)})
    return rows


def split_rows(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows): the latter are the end of a shuffle that is always the same."""
    shuffled = [rows[index] for index in np.random.default_rng(0).permutation(len(rows))]
    held_out = max(1, min(MAX_HELD_OUT, int(HELD_OUT * len(rows))))
    return shuffled[:-held_out], shuffled[-held_out:]


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """The order in which an epoch goes through the conversations."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def step_rows(rows: list[dict], step: int, args: Args) -> list[dict]:
    """The conversations of a step: the next `batch_size` of the epochs, also across the end of one."""
    first = step * args.batch_size
    places = [divmod(number, len(rows)) for number in range(first, first + args.batch_size)]
    return [rows[epoch_order(args.seed, epoch, len(rows))[position]] for epoch, position in places]


# --- Loss


def sft_loss(logprobs_BS: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    """Minus the sum of the log-probs (nats) of the masked tokens, a scalar.

    The caller divides by the number of masked tokens of the whole optimizer step. Values outside the mask,
    NaN too, reach neither the loss nor the gradient.
    """
    return -torch.where(mask_BS.bool(), logprobs_BS, 0.0).sum()


# --- Training


class Trainer:
    """One rank of the trainer: model, optimizer, the optimizer step; a Ray actor per rank."""

    def __init__(self, args: Args, model_path: str, rank: int, on_gpu: bool):
        self.args, self.model_path, self.rank, self.trained = args, model_path, rank, 0
        self.world_size, self.device = args.parallel.num_trainers, torch.device("cuda" if on_gpu else "cpu")

    def setup(self, host: str, port: int) -> str:
        args = self.args
        store = connect_store(host, port, args.deadline.start_timeout_s)
        join_world(self.rank, self.world_size, store, self.device, args.deadline.step_timeout_s)
        torch.manual_seed(args.seed)
        self.model = build_model(self.model_path, self.device, "bfloat16", args.parallel)
        self.optimizer = make_optimizer(self.model, args.weight_decay, args.parallel)
        self.head = LogprobHead(self.model, args.parallel.fp32_head)
        return describe(self.model)

    def load(self, checkpoint: str | None, init_from: str | None) -> None:
        """Goes on from a checkpoint of this run, or starts from the weights of another."""
        if checkpoint:
            self.trained = load_checkpoint(checkpoint, {"policy": (self.model, self.optimizer)})
        elif init_from:
            load_weights(init_from, self.model, self.rank)

    def loss(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss of one micro-batch and its count of tokens. Position s predicts token s + 1."""
        batch = to_device(batch, self.device)
        ids_BT, mask_BS, lengths_B = batch["token_ids"], batch["action_mask"][:, 1:], batch["lengths"] - 1
        logprobs_BS, _ = self.head(self.model, ids_BT[:, :-1], ids_BT[:, 1:], 1.0, lengths_B)
        return sft_loss(logprobs_BS, mask_BS), mask_BS.sum()

    def train_step(self, batches: list[dict], num_tokens: int) -> dict:
        """One optimizer step on this rank's micro-batches; `num_tokens` have loss, over all ranks.

        Returns {metric: (sum, count)}.
        """
        parallel, lr = self.args.parallel, learning_rate(self.trained, self.args)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        sums = []
        for batch in batches:
            sync_gradients(self.model, parallel, last=batch is batches[-1])
            loss, count = self.loss(batch)
            # FSDP averages gradients over ranks: times the ranks, so that the sum is over all tokens
            (loss * parallel.data_ranks / num_tokens).backward()
            sums.append({"loss/sft": (float(loss), int(count))})
        grad_norm = clip_gradients(self.model, self.args.max_grad_norm, parallel)
        if np.isfinite(grad_norm):  # on all ranks or on none
            self.optimizer.step()
            self.trained += 1
        return merge([*sums, update_metrics(grad_norm), {"lr": (lr, 1)}])

    @torch.no_grad()
    def evaluate(self, batches: list[dict]) -> dict:
        """The loss on this rank's share of the held-out conversations, {"loss": (sum, count)}."""
        losses = [self.loss(batch) for batch in batches]
        return merge([{"loss": (float(loss), int(count))} for loss, count in losses])

    def save(self, path: str, progress: dict) -> None:
        parts, progress = {"policy": (self.model, self.optimizer)}, progress | {"trained": self.trained}
        save_checkpoint(path, self.rank, self.model, load_tokenizer(self.model_path), parts, progress)


# --- The loop


# [shared:learning_rate]
def learning_rate(step: int, args: Args) -> float:
    """Linear warm-up, then linear decay to `lr_end_ratio` of the peak at the last step. `step` counts those
    in which an update was made."""
    warm = min(1.0, (step + 1) / (args.lr_warmup_steps + 1))
    decay = 1.0 - (1.0 - args.lr_end_ratio) * step / args.max_steps
    return args.lr * warm * decay


# [/shared:learning_rate]


def start_run(args: Args, log: Logger, model_path: str, run: Run) -> None:
    """Ray and the trainer's ranks."""
    num_trainers, timeout_s = args.parallel.num_trainers, args.deadline.start_timeout_s
    log.phase(f"ray: starting; trainers: {num_trainers} x FSDP2")
    cluster.start(num_trainers, args.log.output_dir, args.save.grace_s)
    gpus, _, trainer_gpus = cluster.split_gpus(0, 1, num_trainers)
    ranks = [(args, model_path, rank, gpus > 0) for rank in range(num_trainers)]
    run.trainers = run.spawn("trainer", Trainer, ranks, trainer_gpus)
    run.store = open_store(cluster.host(), timeout_s)
    ready = run.ask(run.trainers, "setup", run.store.host, run.store.port)
    log.phase(f"trainer: {run.get(ready, 'trainers starting', timeout_s)[0]}")


def held_out_loss(run: Run, held_out: list[dict], args: Args) -> float:
    """Mean loss per token on the held-out conversations under the current weights."""
    shares = micro_batches(held_out, args.parallel)
    return mean_of(merge(run.get(run.ask_each(run.trainers, "evaluate", shares), "evaluation")))["loss"]


def check_flags(args: Args) -> None:
    """Refuses what cannot work, before anything starts."""
    checks.check_ranges(args)
    checks.check_parallel(args.parallel, args.save.init_from)
    checks.check_layout(args.model, args.parallel)
    checks.check_files(args.save, args.log)


def main(args: Args) -> None:
    check_flags(args)
    args.lr = args.lr if args.lr is not None else (2e-3 if args.model == "tiny" else 1e-5)
    conversations = read_conversations(args.data)
    tokenizer, model_path = checks.check_model(args.model), resolve_model(args.model)
    rows = encode_all(conversations, tokenizer, args.max_length)
    too_long = f"{len(conversations) - len(rows)} of {len(conversations)} conversations are longer than"
    too_long = f"{too_long} --max-length {args.max_length} and left out"
    if len(rows) < 2:
        raise FlagError(f"--data {args.data}: {too_long}; give 2 conversations or more, one is held out")
    train, held_out = split_rows(rows)

    checkpoint, progress = starting_point(args.save.resume, args.log.output_dir, args.max_steps)
    headline, config = ("loss/sft", "grad_norm", "time/step"), asdict(args)
    trackers = open_trackers(args.log, config, progress["step"])
    with (
        Logger(args.log.output_dir, config, args.max_steps, headline, progress["step"], trackers) as log,
        Run(args.deadline.step_timeout_s, args.log.output_dir, progress["step"], args.save) as run,
    ):
        if len(rows) < len(conversations):
            log.warn(too_long)
        epochs = f"{args.max_steps * args.batch_size / len(train):.3g} epochs"
        log.phase(f"{len(train)} conversations, {epochs}; {len(held_out)} held out; lr {args.lr:g}")
        start_run(args, log, model_path, run)
        loading = run.ask(run.trainers, "load", checkpoint, args.save.init_from)
        run.get(loading, "loading", args.deadline.start_timeout_s)

        skipped = 0
        for step in range(progress["step"], args.max_steps):
            clock, row, last = Stopwatch(), {"step": step}, step + 1 == args.max_steps
            if step % args.eval_every == 0:
                row["loss/eval"] = held_out_loss(run, held_out, args)
            clock.lap("time/eval")

            # the optimizer step
            batch = step_rows(train, step, args)
            num_tokens = sum(int(each["action_mask"].sum()) for each in batch)
            shares = micro_batches(batch, args.parallel)
            training = run.ask_each(run.trainers, "train_step", shares, num_tokens)
            run.update = step + 1, training
            row |= mean_of(merge(run.get(training, f"training step {step}")))
            skipped = skipped + 1 if row["skipped_frac"] else 0
            if skipped == 3:
                raise RunError("three steps in a row had no finite gradient")
            clock.lap("time/train")

            # how it went
            if last or args.save.save_every and (step + 1) % args.save.save_every == 0:
                path = run.save(step + 1, wait=last)
            clock.lap("time/save")
            if last:
                row["loss/eval_end"] = held_out_loss(run, held_out, args)
            clock.lap("time/eval")
            step_s = sum(clock.times.values()) - clock.times["time/eval"]
            row |= clock.times | {
                "time/step": step_s,
                "perf/samples_per_s": len(batch) / step_s,
                "perf/train_tokens_per_s": num_tokens / clock.times["time/train"],
            }
            log.log_step(row)
            for each in batch[: args.log.samples_per_step]:
                ids, learned = each["token_ids"], each["token_ids"][each["action_mask"]]
                text = {"transcript": tokenizer.decode(ids), "learned": tokenizer.decode(learned)}
                log.log_samples(step, [text])
        first_eval, last_eval = log.rows[0].get("loss/eval"), log.rows[-1]["loss/eval_end"]
        log.summary({"loss/eval": {"first": first_eval, "end": last_eval}, "checkpoint": path})


if __name__ == "__main__":
    checks.run(main, tyro.cli(Args))
