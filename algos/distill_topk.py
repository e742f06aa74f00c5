"""On-policy distillation over the teacher's likeliest tokens: reverse KL, exact there, sampled elsewhere.

    L   = 1/N sum_t sum_v sg(c_v log(pi_v / teacher_v)) log pi_v        over top K and the sampled token a_t
    c_v = pi_v for v in top K;   min(pi / mu, cap) for a_t outside of top K

a_t was sampled by mu (the engine, some steps ago), pi is the trainer now, top K are the teacher's K likeliest
tokens there (--teacher-top-k). In distill.py the sampled token is all that is judged. Here pi weighs the top
K, and a_t counts only where the student said something else. The gradient is that of KL(pi, teacher) at any
K, as no tail is cut off or lumped; K sets its variance. K = 0: distill.py less its clip; all: GKD's KL.

Reverse, not forward, KL: on its own samples a student should leave what the teacher would not say (GKD, arXiv
2306.13649; MiniLLM, 2306.08543). A top K without its tail is biased (Sparse Logit Sampling, 2503.16870).
Exact where one can, sampled elsewhere: Rao-Blackwell, 2504.10637.

A copy of cispo.py, whose weight this has. What differs, and why:
  1. the loss above; the advantage of a token is the teacher's verdict on it alone, not on what follows;
  2. no group is compared, and the environment's reward is only reported; no KL to the starting policy;
  3. the teacher's temperature is --temperature too: what is learned is the policy that it would sample with.
The teacher is a frozen model on the trainer's ranks, sharded like the student; it has no engine of its own.

Suffixes: R rollouts of the step, B rows (segments), T tokens, S = T - 1 next-token positions, K likeliest
tokens of the teacher at one, M = 1 + K with the sampled one.

A teacher:  python -m algos.grpo --model tiny --env reverse --output-dir runs/teacher
One CPU:    python -m algos.distill_topk --env reverse --teacher runs/teacher/checkpoints/step_120
One GPU:    python -m algos.distill_topk --model smollm2 --env jsonl:data.jsonl --teacher PATH
8 GPUs:     python -m algos.distill_topk --model PATH --teacher PATH --num-engines 4 --num-trainers 4
Many nodes: RAY_ADDRESS=auto python -m algos.distill_topk ... (on the head of a running Ray cluster)

Edit here: loss and weight -> teacher_loss | the teacher's tokens -> TopLogprobHead, Trainer.look_ahead
           sampling, filtering -> RolloutWorker.produce_group | optimizer, epochs -> Trainer.train_step
           what is trained when, order of the refit, a metric (a key of row) -> main
"""

import asyncio
import json
import time
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Lt
from torch.utils.checkpoint import checkpoint
from tyro.conf import OmitArgPrefixes

from common import checks, cluster
from common.batching import micro_batches, segment_row, to_device
from common.checkpoint import SaveFlags, load_checkpoint, load_weights, save_checkpoint, starting_point
from common.cluster import DeadlineFlags, Run, RunError
from common.debug import DebugFlags, batch_plan, dump_rollouts, read_rollouts, traced
from common.env import EnvFlags
from common.envs.pool import EnvPool
from common.envs import env_name
from common.evaluate import evaluate, score_metrics
from common.logger import LogFlags, Logger
from common.logprobs import CHUNK_BYTES, LogprobHead
from common.metrics import BusyClock, Stopwatch, advice, mismatch_metrics, rank_metrics, rollout_metrics
from common.metrics import timing_metrics, training_metrics, update_metrics
from common.models import load_tokenizer, resolve_dtype, resolve_model
from common.parallel import ParallelFlags, build_model, clip_gradients, describe, join_world, make_optimizer
from common.parallel import sync_gradients
from common.refit import PROBE_TEXT, RefitError, WeightSender, compare_probe, connect_store, open_store
from common.rollout import Engine, EngineFlags, rollout_group, transcript
from common.sample import Rollout
from common.sample_queue import SampleQueue, pack_group, unpack_group
from common.trackers import open_trackers


@dataclass
class Args:
    # experiment
    model: str = "tiny"
    """tiny, smollm2, a local Hugging Face folder, or a Hub id (fetched once)."""
    teacher: str = ""
    """What is learned from: as --model, and with its tokenizer. Must be given."""
    env: str = "reverse"
    """What is trained on: reverse, gym:DATASET, jsonl:FILE, or path/to/file.py:Class."""
    eval_env: str | None = None
    """What is evaluated on, by greedy answers to its eval split. Default: the same as --env."""
    max_steps: Annotated[int, Ge(1)] = 120
    """Steps of the run: each trains one batch of groups, in --epochs times --minibatches updates."""
    eval_every: Annotated[int, Ge(1)] = 20
    """Steps between evaluations. Step 0 (the untrained policy) and the end are always evaluated.
    Raise it when time/eval is a large part of the run."""
    eval_samples: Annotated[int, Ge(0)] = 0
    """Sampled answers to each evaluation task, for avg@k and pass@k besides the greedy mean.
    Raise it when eval/<env>/ci95 is wider than what is to be told apart."""
    seed: int = 1
    """Data order, sampling and minibatches."""
    # rollout
    prompts_per_step: Annotated[int, Ge(1)] = 16
    """Prompt groups that a step trains (P)."""
    group_size: Annotated[int, Ge(1)] = 8
    """Rollouts of one prompt. Nothing is compared in a group: any number will do, 1 has the most prompts."""
    temperature: Annotated[float, Gt(0), Lt(float("inf"))] = 1.0
    """Sampling temperature; the trainer's log-probs use the same.
    Raise it when the answers to a prompt are all alike, lower it when few of them make sense."""
    max_new_tokens: Annotated[int, Ge(1)] = 16
    """Longest answer of one turn in tokens."""
    # asynchrony
    max_staleness: Annotated[int, Ge(0)] = 2
    """Steps that a group may start ahead of the trained policy. 0 is synchronous: no overlap, nothing
    stale."""
    order: Literal["arrival", "ticket"] = "arrival"
    """Which finished groups a step trains: the oldest ones, or the next tickets in order (waits for the
    slowest)."""
    late: Literal["keep", "mask", "drop"] = "keep"
    """Tokens staler than --max-staleness: keep them, mask them out of the loss, or drop their rollout."""
    # algorithm
    teacher_top_k: Annotated[int, Ge(1)] = 20
    """The teacher's likeliest tokens at a position, over which the KL is exact (K)."""
    max_weight: Annotated[float, Ge(1)] = 5.0
    """Largest weight pi/mu of a sampled token outside of those (cap). Smaller ones stay as they are."""
    epochs: Annotated[int, Ge(1)] = 1
    """Passes over a step's batch. Raise it when rollouts cost more than training (time/trainer_wait)."""
    minibatches: Annotated[int, Ge(1)] = 1
    """Optimizer steps per pass; a rollout is never split over two.
    Raise it when --prompts-per-step is large: more and smaller updates of the same rollouts."""
    # optimizer (AdamW)
    lr: Annotated[float | None, Ge(0)] = None
    """Peak learning rate. Default: 1e-3 for tiny, 1e-6 for every other model.
    Lower it when the reward falls again or loss/entropy falls to 0, raise it when nothing moves."""
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
    data: Annotated[EnvFlags, OmitArgPrefixes] = field(default_factory=EnvFlags)
    engine: Annotated[EngineFlags, OmitArgPrefixes] = field(default_factory=EngineFlags)
    parallel: Annotated[ParallelFlags, OmitArgPrefixes] = field(default_factory=ParallelFlags)
    deadline: Annotated[DeadlineFlags, OmitArgPrefixes] = field(default_factory=DeadlineFlags)
    save: Annotated[SaveFlags, OmitArgPrefixes] = field(default_factory=SaveFlags)
    log: Annotated[LogFlags, OmitArgPrefixes] = field(default_factory=LogFlags)
    debug: Annotated[DebugFlags, OmitArgPrefixes] = field(default_factory=DebugFlags)


# --- Loss


def teacher_loss(logprobs_BSM, teacher_BSM, mu_BS, outside_BS, mask_BS, max_weight: float):
    """The summed loss over the masked positions (the caller divides by the step's token count), and {metric:
    (sum, count)}. Of M = 1 + K tokens the first is the sampled one, which counts where it is `outside_BS`.

    Masked positions may hold anything, also NaN.
    """
    logprobs_BSM, teacher_BSM = (torch.where(mask_BS[..., None], x, 0.0) for x in (logprobs_BSM, teacher_BSM))
    log_p_BSM, outside_BS = logprobs_BSM.detach(), outside_BS & mask_BS
    ratio_BS = torch.where(outside_BS, log_p_BSM[..., 0] - mu_BS, 0.0).clamp(-20, 20).exp()
    weights_BS1 = torch.where(outside_BS, ratio_BS.clamp(max=max_weight), 0.0)[..., None]
    weights_BSM = torch.cat([weights_BS1, log_p_BSM[..., 1:].exp()], -1)
    kl_BSM = weights_BSM * (log_p_BSM - teacher_BSM)
    sums = {"loss/teacher_kl": kl_BSM.sum(), "ratio/clip_high_frac": (ratio_BS > max_weight).sum()}
    sums["teacher/outside_frac"] = outside_BS.sum()
    return (kl_BSM * logprobs_BSM).sum(), {name: (total, mask_BS.sum()) for name, total in sums.items()}


class TopLogprobHead(LogprobHead):
    """Takes M targets a position as well, [B, S, M], and `likeliest` = (K, V). It gives M + 1 + 2 K numbers
    then: the first target's log-prob, the entropy, the others' log-probs, and the log-probs and the ids of
    the K likeliest of the first V tokens."""

    likeliest = (0, None)

    def forward(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        if self.targets_BS is None or self.targets_BS.dim() == 2:
            return super().forward(hidden_BSH)
        size = max(1, CHUNK_BYTES[self.head.weight.device.type] // (16 * len(self.head.weight)))
        chunks = zip(hidden_BSH.flatten(0, 1).split(size), self.targets_BS.flatten(0, 1).split(size))
        how = (self.head.weight, self.head.bias, self.temperature, self.fp32, *self.likeliest)
        parts = [checkpoint(top_logprobs, *chunk, *how, use_reentrant=False) for chunk in chunks]
        return torch.cat(parts).unflatten(0, hidden_BSH.shape[:2])


def top_logprobs(hidden_TH, targets_TM, weight_VH, bias_V, temperature: float, fp32: bool, k: int, first):
    """What TopLogprobHead gives, [T, M + 1 + 2 K]. The logits [T, V] are made again in the backward pass."""
    if fp32:
        hidden_TH, weight_VH, bias_V = (x if x is None else x.float() for x in (hidden_TH, weight_VH, bias_V))
    logprobs_TV = (F.linear(hidden_TH, weight_VH, bias_V).float() / temperature).log_softmax(-1)
    entropy_T1 = -(logprobs_TV.exp() * logprobs_TV).sum(-1, keepdim=True)
    targets_TM = logprobs_TV.gather(-1, targets_TM)
    return torch.cat([targets_TM[:, :1], entropy_T1, targets_TM[:, 1:], *logprobs_TV[:, :first].topk(k)], -1)


# --- Rollout

MIN_VALID = 1  # valid rollouts that a group needs, else it is dropped


# [shared:RolloutWorker]
def epoch_order(seed: int, epoch: int, num_tasks: int, shuffle: bool) -> np.ndarray:
    """The order in which an epoch goes through the tasks."""
    return np.random.default_rng([seed, epoch]).permutation(num_tasks) if shuffle else np.arange(num_tasks)


class RolloutWorker:
    """One vLLM engine and the episodes that run on it; an asyncio Ray actor."""

    async def start(self, index: int, args: Args, model_path: str, dtype: str, gpus: float, *store) -> None:
        self.args, self.index, self.busy, self.epoch = args, index, BusyClock(), None
        self.tokenizer = load_tokenizer(model_path)
        self.envs = self.eval_envs = EnvPool()
        await self.envs.start(args.env, args.data, args.engine.max_in_flight * args.group_size)
        if args.eval_env not in (None, args.env):
            self.eval_envs = EnvPool()
            await self.eval_envs.start(args.eval_env, args.data, args.engine.max_in_flight)
        self.settings = {
            "max_new_tokens": args.max_new_tokens,
            "timeout_s": args.deadline.rollout_timeout_s,
            "system_prompt": args.data.system_prompt,
            "template_args": json.loads(args.data.chat_template_args),
        }
        self.engine = Engine(model_path, dtype, args.seed + index, args.engine, gpus, args.parallel.lora_rank)
        await self.engine.start([self.tokenizer.eos_token_id])
        timeouts = (args.deadline.start_timeout_s, args.deadline.refit_timeout_s)
        await self.engine.connect(*store, index, args.parallel.num_trainers, *timeouts)

    async def produce(self, queue) -> None:
        """Keeps `max_in_flight` groups going for as long as the queue gives tickets."""
        await asyncio.gather(*(self.produce_groups(queue) for _ in range(self.args.engine.max_in_flight)))

    async def produce_groups(self, queue) -> None:
        ticket = await queue.next_ticket.remote()
        while True:
            with self.busy:
                group, drop = await self.produce_group(ticket)
            if drop:
                await queue.drop.remote(ticket, *drop)
                ticket = await queue.next_ticket.remote()
            else:
                ticket = await queue.put_and_next.remote(ticket, *pack_group(group))

    async def produce_group(self, ticket: int) -> tuple[list[Rollout], tuple[str, str] | None]:
        """The rollouts of one prompt, and why the group is dropped if it is (reason, detail). Ticket k is
        prompt k of the epochs."""
        num_tasks = self.envs.num_tasks["train"]
        epoch, position = divmod(ticket, num_tasks)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = epoch_order(self.args.seed, epoch, num_tasks, self.args.data.shuffle)
        group = await rollout_group(
            self.engine, self.tokenizer, self.envs, "train", int(self.order[position]),
            ticket=ticket, group_size=self.args.group_size, temperature=self.args.temperature,
            **self.settings,
        )  # fmt: skip
        invalid = [(rollout.invalid, rollout.info["error"]) for rollout in group if rollout.invalid]
        return group, invalid[0] if len(group) - len(invalid) < MIN_VALID else None

    async def evaluate(self) -> list[list[float]]:
        tasks = range(self.index, self.eval_envs.num_tasks["eval"], self.args.engine.num_engines)
        return await evaluate(
            self.engine, self.tokenizer, self.eval_envs, tasks, samples=self.args.eval_samples,
            temperature=self.args.temperature, **self.settings,
        )  # fmt: skip

    async def stats(self) -> dict:
        """Seconds with rollouts in flight, and tokens sampled, since the start."""
        sampled = self.engine.sampled_tokens
        return {"at": time.monotonic(), "busy_s": self.busy.seconds(), "sampled_tokens": sampled}

    async def refit(self, version: int, queue) -> dict:
        """What is in flight freezes, gets the new weights under its feet, and goes on with recomputed KV;
        unless --refit-mode says otherwise."""
        start = time.monotonic()
        await self.engine.pause()  # clears the caches too
        report = await self.engine.receive_weights(version)  # raises before resuming if a check fails
        await queue.set_version.remote(version)  # before any token of this version can arrive there
        await self.engine.resume()
        return report | {"pause_s": time.monotonic() - start}

    async def probe(self, probe_ids: list[int]) -> list[float]:
        return await self.engine.prompt_logprobs(probe_ids)


# [/shared:RolloutWorker]


# --- Training


class Trainer:
    """One rank of the trainer: model, optimizer, the optimizer step; a Ray actor per rank."""

    def __init__(self, args: Args, model_path: str, rank: int, on_gpu: bool):
        self.args, self.model_path, self.rank, self.trained = args, model_path, rank, 0
        self.world_size, self.device = args.parallel.num_trainers, torch.device("cuda" if on_gpu else "cpu")

    def setup(self, host: str, port: int, engine_dtype: str, num_workers: int) -> str:
        """Builds everything, and meets the other ranks and the engines at the store on `host` and `port`."""
        args = self.args
        store = connect_store(host, port, args.deadline.start_timeout_s)
        join_world(self.rank, self.world_size, store, self.device, args.deadline.step_timeout_s)
        torch.manual_seed(args.seed)
        self.model = build_model(self.model_path, self.device, engine_dtype, args.parallel)
        self.optimizer = make_optimizer(self.model, args.weight_decay, args.parallel)
        self.head = TopLogprobHead(self.model, args.parallel.fp32_head)
        self.teacher = build_model(args.teacher, self.device, engine_dtype, args.parallel)
        self.teacher_head = TopLogprobHead(self.teacher.requires_grad_(False), args.parallel.fp32_head)
        num_tokens = len(self.model.get_output_embeddings().weight)
        self.teacher_head.likeliest = (min(args.teacher_top_k, num_tokens), num_tokens)
        self.sender = WeightSender(self.model, self.rank, engine_dtype, args.deadline.refit_timeout_s)
        self.sender.join(store, self.world_size, num_workers)
        return describe(self.model)

    def logprobs(self, batch: dict, model, head, top_ids_BSK) -> tuple[torch.Tensor, ...]:
        """Log-prob of each token given those before it, the entropy there, and log-probs of `top_ids_BSK`:
        [B, S], [B, S], and [B, S, K], behind which the teacher's head has what it finds likeliest."""
        ids_BT, lengths_B = batch["token_ids"].long(), batch["lengths"] - 1  # of what goes in
        targets_BSM = torch.cat([ids_BT[:, 1:, None], top_ids_BSK], -1)
        routes = batch.get("routed_experts") if head is self.head else None  # of no use to a teacher
        logprobs_BS, entropy_BS, *top = head(
            model, ids_BT[:, :-1], targets_BSM, self.args.temperature, lengths_B, routes, batch.get("images")
        )
        return logprobs_BS, entropy_BS, torch.stack(top, -1)

    def load(self, checkpoint: str | None, init_from: str | None) -> None:
        """Goes on from a checkpoint of this run, or starts from the weights of another."""
        if checkpoint:
            self.trained = load_checkpoint(checkpoint, {"policy": (self.model, self.optimizer)})
        elif init_from:
            load_weights(init_from, self.model, self.rank)

    def train_step(self, share: tuple[list, int], trace: str | None) -> dict:
        """One step on this rank's share, which `make_minibatches` made.

        Returns `rank_metrics`. `trace` is a folder for a profile.
        """
        args, (minibatches, _), sums, peaks = self.args, share, [], []
        lr = learning_rate(self.trained, args)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.look_ahead([batch for batches, _ in minibatches for batch in batches])
        with traced(trace and f"{trace}/rank{self.rank}.json"):
            for batches, num_tokens in minibatches * args.epochs:
                self.optimizer.zero_grad()
                for batch in batches:
                    sync_gradients(self.model, args.parallel, last=batch is batches[-1])
                    loss, step_sums, step_peaks = self.loss(batch)
                    # FSDP averages gradients over ranks: times the ranks, it is their sum
                    (loss * args.parallel.data_ranks / max(num_tokens, 1)).backward()
                    sums.append(step_sums)
                    peaks.append(step_peaks)
                grad_norm = clip_gradients(self.model, args.max_grad_norm, args.parallel)
                if np.isfinite(grad_norm):  # on all ranks or on none
                    self.optimizer.step()
                sums.append(update_metrics(grad_norm))
        self.trained += any("grad_norm" in each for each in sums)  # an update was made
        return rank_metrics([*sums, self.head.router.metrics()], [*peaks, {"lr": lr}])

    @torch.no_grad()
    def look_ahead(self, batches: list[dict]) -> None:
        """Once per step: moves the batches to the device and gives them the teacher's likeliest tokens, and
        its log-probs of the sampled token and of those."""
        for batch in batches:
            batch |= to_device(batch, self.device)
            batch["mask"] = batch["action_mask"][:, 1:].bool()
            nothing_BS0 = batch["token_ids"][:, 1:, None][..., :0].long()
            sampled_BS, _, top = self.logprobs(batch, self.teacher, self.teacher_head, nothing_BS0)
            top_BSK, ids_BSK = top.chunk(2, -1)
            batch["top_ids"] = ids_BSK.long()
            batch["teacher_logprobs"] = torch.cat([sampled_BS[..., None], top_BSK], -1)

    def loss(self, batch: dict) -> tuple[torch.Tensor, dict, dict]:
        """The summed loss of one micro-batch, its metrics, and its peaks."""
        mask_BS, mu_BS, ids_BSK = batch["mask"], batch["logprobs"][:, 1:], batch["top_ids"]
        logprobs_BS, entropy_BS, top_BSK = self.logprobs(batch, self.model, self.head, ids_BSK)
        outside_BS = (ids_BSK != batch["token_ids"][:, 1:, None]).all(-1)
        logprobs_BSM = torch.cat([logprobs_BS[..., None], top_BSK], -1)
        row = batch["teacher_logprobs"], mu_BS, outside_BS, mask_BS
        loss, sums = teacher_loss(logprobs_BSM, *row, self.args.max_weight)
        sums["loss/entropy"] = (torch.where(mask_BS, entropy_BS, 0.0).detach().sum(), mask_BS.sum())
        log_ratio_BS = torch.where(mask_BS, logprobs_BS.detach() - mu_BS, 0.0)
        mismatch, peaks = mismatch_metrics(log_ratio_BS, mask_BS, batch.get("crossed", False))
        return loss, sums | mismatch, peaks

    @torch.no_grad()
    def send_weights(self, version: int, probe_ids: list[int]) -> dict:
        """All weights to all engines, and this trainer's log-probs of the probe prompt under them."""
        report = self.sender.send(version)
        ids_BT = torch.tensor([probe_ids], device=self.device)
        logprobs_BS, _ = self.head(self.model, ids_BT[:, :-1], ids_BT[:, 1:], 1.0)
        return report | {"probe": logprobs_BS[0].tolist()}

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


# [shared:mark_late]
def mark_late(rollouts: list[Rollout], version: int, max_staleness: int, late: str) -> tuple[list[int], int]:
    """Lag of every sampled token, and how many are past the bound; applies `late` to those.

    keep: nothing. mask: out of the loss. drop: their rollout is invalid.
    """
    lags = []
    for rollout in rollouts:
        rollout_lags = rollout.lags(version)
        lags += rollout_lags.tolist()
        overdue = (rollout_lags > max_staleness).any()
        if overdue and late == "drop" and not rollout.invalid:
            rollout.invalid = "late"
        if overdue and late == "mask":
            for segment in rollout.segments:
                segment.action_mask = segment.action_mask & (version - segment.versions <= max_staleness)
    return lags, sum(lag > max_staleness for lag in lags)


# [/shared:mark_late]


def make_rows(rollouts: list[Rollout], args: Args) -> tuple[list[list[dict]], dict[str, float]]:
    """The segments of each valid rollout as rows of the batch. Returns (rows by rollout, {}): advantages wait
    for the teacher."""
    valid = [rollout for rollout in rollouts if not rollout.invalid]
    return [[segment_row(segment) for segment in rollout.segments] for rollout in valid], {}


def make_minibatches(rows: list[list[dict]], args: Args, step: int) -> list[tuple[tuple, int]]:
    """Rows by rollout -> for each rank ([(micro-batches, action tokens of the minibatch over all ranks)],
    the step's rollouts over all ranks). A row gets its rollout's number."""
    shuffled, minibatches = np.random.default_rng([args.seed, step]).permutation(len(rows)), []
    for part in np.array_split(shuffled, min(args.minibatches, len(rows))):
        members = [row | {"rollout_index": index} for index in part for row in rows[index]]
        num_tokens = sum(int(row["action_mask"].sum()) for row in members)
        minibatches.append([(share, num_tokens) for share in micro_batches(members, args.parallel)])
    return [(share, len(rows)) for share in zip(*minibatches)]


# [shared:refit]
def refit(run: Run, version: int, timeout_s: float) -> dict:
    """The trainer's weights to every engine as `version`; what is in flight goes on under them.

    Raises RunError or RefitError if a check fails. The probe of a refit runs beside the step that follows,
    and is compared before the next refit.
    """
    check_probe(run)
    sent = run.ask(run.trainers, "send_weights", version, run.probe_ids)
    received = run.ask(run.workers, "refit", version, run.queue)
    reports = run.get(received + sent, f"refit to version {version}", timeout_s)
    engines, sender = reports[: len(run.workers)], reports[len(run.workers)]
    run.last_refit = engines[0] | sender | {"pause_s": max(report["pause_s"] for report in engines)}
    run.probes = run.ask(run.workers, "probe", run.probe_ids)
    return run.last_refit


def check_probe(run: Run) -> None:
    """Log-probs of a fixed prompt: every engine's equal the trainer's since the last refit. Raises
    RefitError."""
    for index, logprobs in enumerate(run.get(run.probes, "the probe")):
        where = f"engine {index}, version {run.last_refit['version']}"
        compare_probe(logprobs, run.last_refit["probe"], run.last_refit["dtype"], where)


# [/shared:refit]


# [shared:start_run]
def start_run(args, log: Logger, worker_class, trainer_class, checkpoint: str | None, progress: dict, run):
    """Ray, queue, engines and trainers, up to the first refit, after which rollouts start. `checkpoint` and
    `progress` are those of the run that goes on, if one does."""
    engine, deadline, num_trainers = args.engine, args.deadline, args.parallel.num_trainers
    num_workers = engine.num_engines * engine.engine_tp
    model_path = resolve_model(args.model)
    log.phase("ray: starting")
    cluster.start(num_workers + num_trainers, args.log.output_dir, args.save.grace_s)
    run.store = open_store(cluster.host(), deadline.start_timeout_s)  # where all processes meet
    store = (run.store.host, run.store.port)
    gpus, engine_gpus, trainer_gpus = cluster.split_gpus(engine.num_engines, engine.engine_tp, num_trainers)
    dtype = resolve_dtype(model_path, engine.rollout_dtype, gpus > 0)
    plan = (args.prompts_per_step, args.max_staleness, args.order, progress["step"], progress["queue"])
    (run.queue,) = run.spawn("queue", SampleQueue, [plan], [{"max_concurrency": 10_000}])
    run.restore(progress["rollouts"])
    log.phase(f"{num_workers} x vLLM ({dtype}), {num_trainers} x FSDP2, {gpus or 'no':.3} GPU for each")
    engines = list(range(engine.num_engines))
    run.workers = run.spawn("engine", worker_class, [()] * len(engines), engine_gpus)
    ranks = [(args, model_path, rank, gpus > 0) for rank in range(num_trainers)]
    run.trainers = run.spawn("trainer", trainer_class, ranks, trainer_gpus)
    started = run.ask_each(run.workers, "start", engines, args, model_path, dtype, gpus, *store)
    started = run.ask(run.trainers, "setup", *store, dtype, num_workers) + started
    log.phase(f"trainer: {run.get(started, 'start-up', deadline.start_timeout_s)[0]}")
    run.probe_ids = load_tokenizer(model_path).encode(PROBE_TEXT)
    sent = refit(run, progress["step"], deadline.refit_timeout_s)  # the gate: what is there must not change
    if checkpoint or args.save.init_from:
        loading = run.ask(run.trainers, "load", checkpoint, args.save.init_from)
        run.get(loading, "loading the checkpoint", deadline.start_timeout_s)
        refit(run, progress["step"], deadline.refit_timeout_s)
        log.phase(f"weights of {checkpoint or args.save.init_from}, policy version {progress['step']}")
    check_probe(run)
    log.phase(f"refit gate passed: {sent['bytes'] / 1e6:.3g} MB by {sent['mode']}")
    if not args.debug.eval_only:
        run.tasks = {ref: f"engine {i}" for i, ref in enumerate(run.ask(run.workers, "produce", run.queue))}


# [/shared:start_run]


def check_flags(args: Args) -> int:
    """Refuses what cannot work, before anything starts, and fills in the teacher's folder. Returns the number
    of training tasks."""
    checks.check_ranges(args)
    if (tp := args.parallel.trainer_tp) > 1:
        raise checks.FlagError(f"--trainer-tp {tp}: needs the whole vocabulary on each rank; use 1")
    checks.check_minibatches(args.prompts_per_step, args.minibatches)
    checks.check_shared(args.model, args.engine, args.parallel, args.data, args.save, args.debug, args.log)
    args.teacher = checks.teacher_path(args.teacher, args.model, args.parallel)
    rollouts = args.prompts_per_step * args.group_size // args.minibatches
    checks.check_ranks(args.parallel.num_trainers, args.parallel.trainer_tp, rollouts)
    environments = (args.model, args.env, args.eval_env, args.data)
    return checks.check_tasks(*environments, args.engine, args.max_new_tokens)


# [shared:main]
def replay(args: Args, log: Logger, checkpoint: str | None, first_step: int) -> None:
    """Trains from recorded rollouts in this very process: no Ray, no engine, and breakpoints work."""
    trainer = Trainer(args, resolve_model(args.model), 0, torch.cuda.is_available())
    store = open_store(cluster.LOOPBACK, args.deadline.start_timeout_s)
    log.phase(trainer.setup(store.host, store.port, "float32", num_workers=0))
    trainer.load(checkpoint, args.save.init_from)
    for step in range(first_step, args.max_steps):
        clock, row, rollouts = Stopwatch(), {"step": step}, read_rollouts(args.debug.replay_rollouts, step)
        lags, num_late = mark_late(rollouts, step, args.max_staleness, args.late)
        rows, advantages = make_rows(rollouts, args)
        if rows:
            (share,) = make_minibatches(rows, args, step)
            row |= training_metrics([trainer.train_step(share, None)])
        clock.lap("time/step")
        if step + 1 == args.max_steps or args.save.save_every and (step + 1) % args.save.save_every == 0:
            path = f"{args.log.output_dir}/checkpoints/step_{step + 1}"
            trainer.save(path, {"step": step + 1, "queue": None, "flags": args.save})
        log.log_step(row | clock.times | rollout_metrics(rollouts, lags, num_late, {}, advantages))
    log.summary({"checkpoint": path})


def main(args: Args) -> None:
    num_tasks = check_flags(args)
    args.lr = args.lr if args.lr is not None else (1e-3 if args.model == "tiny" else 1e-6)
    if args.data.data_epochs:
        args.max_steps = min(args.max_steps, -(-args.data.data_epochs * num_tasks // args.prompts_per_step))
    checks.check_replay(args.debug.replay_rollouts, args.max_steps)
    sizes = (args.prompts_per_step, args.group_size, args.minibatches, args.epochs, args.max_steps)
    plan = f"{batch_plan(*sizes, num_tasks)}\nlr: {args.lr:g}"
    if args.debug.dry_run:
        return print(plan)
    checkpoint, progress = starting_point(args.save.resume, args.log.output_dir, args.max_steps)
    env, empty_steps = env_name(args.eval_env or args.env), 0
    config = asdict(args) | {"tasks": num_tasks}  # a run that goes on warns of what has changed
    headline = ("reward/mean", "staleness/mean", "mismatch/abs_mean", "grad_norm", "time/step")
    trackers = open_trackers(args.log, config, progress["step"])
    log = Logger(args.log.output_dir, config, args.max_steps, headline, progress["step"], trackers)
    with log, Run(args.deadline.step_timeout_s, args.log.output_dir, progress["step"], args.save) as run:
        log.console.print(plan)
        if args.debug.replay_rollouts:
            return replay(args, log, checkpoint, progress["step"])
        start_run(args, log, RolloutWorker, Trainer, checkpoint, progress, run)
        if args.debug.eval_only:
            scores = run.get(run.ask(run.workers, "evaluate"), "evaluation")
            return log.summary(score_metrics(f"eval/{env}", scores))
        tokenizer = load_tokenizer(resolve_model(args.model))

        for step in range(progress["step"], args.max_steps):
            clock, row, last = Stopwatch(), {"step": step}, step + 1 == args.max_steps
            scoring = run.ask(run.workers, "evaluate") if step % args.eval_every == 0 else []
            ticks = [run.ask(run.workers, "stats")]

            # what this step trains
            taken = run.get(run.queue.get.remote(step), f"rollouts of step {step}")
            batch, drops, row["time/straggler_wait"] = taken
            rollouts = [rollout for _, packed in batch for rollout in unpack_group(packed, run.get)]
            clock.lap("time/trainer_wait")
            dump_rollouts(args.debug.dump_rollouts, step, rollouts)
            lags, num_late = mark_late(rollouts, step, args.max_staleness, args.late)
            rows, advantages = make_rows(rollouts, args)
            shown = rollouts[:: args.group_size][: args.log.samples_per_step]  # one of each group
            samples = [transcript(r, tokenizer, advantages.get(r.rollout_id)) for r in shown]
            if step == progress["step"]:
                log.preview(samples)

            # the optimizer step, or epochs x minibatches of them
            ticks += [run.ask(run.workers, "stats")]
            clock.lap("time/prepare")
            training = []
            if rows:
                shares = make_minibatches(rows, args, step)
                profiled = 1 <= step - progress["step"] <= args.debug.profile_steps
                trace = f"{args.log.output_dir}/profile/step_{step}" if profiled else None
                training = run.ask_each(run.trainers, "train_step", shares, trace)
            run.update = step + 1, training
            row |= training_metrics(run.get(training, f"training step {step}")) if rows else {}
            empty_steps = 0 if rows and row.get("skipped_frac", 0) < 1 else empty_steps + 1
            if empty_steps == 3:
                raise RunError("three steps in a row: no valid rollout, or no finite gradient")
            clock.lap("time/train")
            ticks += [run.ask(run.workers, "stats")]

            # a score belongs to one policy: the refit waits for it
            if scoring:
                row |= score_metrics(f"eval/{env}", run.get(scoring, "evaluation"))
            clock.lap("time/eval")
            sent = refit(run, step + 1, args.deadline.refit_timeout_s)
            if not sent["changed"] and row.get("lr", 0) * row.get("grad_norm", 0) > 0:
                raise RefitError(f"step {step} moved the weights, and its refit sent the same as the last")
            clock.lap("time/refit")

            # how it went
            if last or args.save.save_every and (step + 1) % args.save.save_every == 0:
                path = run.save(step + 1, wait=last)
            clock.lap("time/save")
            ticks += [run.ask(run.workers, "stats")]
            if last:
                check_probe(run)
                scores = run.get(run.ask(run.workers, "evaluate"), "evaluation")
                row |= score_metrics(f"eval_end/{env}", scores)
            row |= rollout_metrics(rollouts, lags, num_late, drops, advantages)
            row |= timing_metrics(clock.times, [run.get(refs) for refs in ticks], rollouts, sent)
            log.log_step(row)
            log.log_samples(step, samples)
            for kind, text in advice(row, rollouts, drops, args.group_size, args.max_new_tokens).items():
                log.warn(text, kind)
        log.summary({"checkpoint": path})


# [/shared:main]


if __name__ == "__main__":
    checks.run(main, checks.parse(Args))
