"""FlashREINFORCE, asynchronous: one rollout a prompt, no critic; what is stale is weighted or rejected.

    A_i = R_i - mean(R)                                                   over the R rollouts of the step
    L   = -1/R sum_i kept_i A_i 1/T_i sum_t sg(pi/mu)_t log pi_t          T_i: action tokens of rollout i
    kept_i = 1 if 1/T_i sum_t KL(mu_t, pi_t) <= delta, else 0             KL of "this token or another one"

mu is the policy that sampled the token (the engine, some steps ago), pi the trainer now. Every batch is fresh
and makes one update, so there is no third policy and nothing to clip. A rejected rollout still counts in R
and in mean(R). delta = inf rejects nothing: plain importance-weighted REINFORCE.
Paper: "FlashREINFORCE: Critic-Free, Single-Rollout, Asynchronous RL for Agentic Language Models" (2026).

What differs from the paper, or is left open there, and why:
  1. a rollout may lie in many rows (history rewritten, thinking stripped): baseline, gate, T_i and R count
     rollouts and not rows, else a failure cut into nine pieces would weigh nine times as much;
  2. log(pi/mu) is held within +-20 in the weight, and probabilities within [1e-6, 1 - 1e-6] in the KL: both
     stay finite in fp32; the weight carries no gradient, so a held token still learns;
  3. --max-weight (off) caps pi/mu: the gate bounds a mean, and one token among many may still weigh 1e5;
  4. the entropy filter of failures (off) takes A_i < 0 as failed, ranks the tokens of the whole rollout that
     are in the loss, keeps all that tie at the border, and leaves T_i and the gate as they are.

Suffixes: R rollouts of the step, B rows (segments), T tokens, S = T - 1 next-token positions, N a list of
tokens. A row knows its rollout (`rollout_index_B`) and that rollout's T_i (`num_actions_B`).

    driver main() -- tickets, versions --> SampleQueue <-- rollouts -- RolloutWorker x engines (vLLM)
         |  rows                                                          ^
         '--> Trainer x ranks (FSDP2) --------- weights, each step -------'

One CPU:    python -m algos.flash_reinforce --model tiny --env reverse
One GPU:    python -m algos.flash_reinforce --model smollm2 --env jsonl:data.jsonl
8 GPUs:     python -m algos.flash_reinforce --model PATH --env jsonl:data.jsonl --num-engines 7
Many nodes: RAY_ADDRESS=auto python -m algos.flash_reinforce ... (on the head of a running Ray cluster)

Edit here: advantage -> batch_advantages | loss -> policy_loss | rejection -> bernoulli_kl, gate
           sampling -> RolloutWorker.produce_group | optimizer -> Trainer.train_step | order, a metric -> main
"""

import asyncio
import json
import math
import time
from dataclasses import asdict, dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.distributed as dist
from annotated_types import Ge, Gt, Le, Lt
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
from common.logger import LogFlags, Logger, merge
from common.logprobs import LogprobHead
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
    env: str = "reverse"
    """What is trained on: reverse, gym:DATASET, jsonl:FILE, or path/to/file.py:Class."""
    eval_env: str | None = None
    """What is evaluated on, by greedy answers to its eval split. Default: the same as --env."""
    max_steps: Annotated[int, Ge(1)] = 120
    """Updates: each trains a fresh batch of rollouts once."""
    eval_every: Annotated[int, Ge(1)] = 20
    """Steps between evaluations. Step 0 (the untrained policy) and the end are always evaluated.
    Raise it when time/eval is a large part of the run."""
    eval_samples: Annotated[int, Ge(0)] = 0
    """Sampled answers to each evaluation task, for avg@k and pass@k besides the greedy mean.
    Raise it when eval/<env>/ci95 is wider than what is to be told apart."""
    seed: int = 1
    """Data order, sampling and minibatches."""
    # rollout
    prompts_per_step: Annotated[int, Ge(2)] = 128
    """Prompts, and so rollouts, that a step trains (R). Raise it when the reward jumps about."""
    group_size: int = 1
    """Always 1: one rollout a prompt. Groups are what algos/grpo.py is for."""
    temperature: Annotated[float, Gt(0), Lt(float("inf"))] = 1.0
    """Sampling temperature; the trainer's log-probs use the same.
    Raise it when the answers to a prompt are all alike, lower it when few of them make sense."""
    max_new_tokens: Annotated[int, Ge(1)] = 16
    """Longest answer of one turn in tokens. Raise it when rollout/truncated_frac stays high."""
    # asynchrony
    max_staleness: Annotated[int, Ge(0)] = 2
    """Steps that a group may start ahead of the trained policy. 0 is synchronous: no overlap, nothing
    stale. Raise it when time/trainer_wait is a large part of time/step."""
    order: Literal["arrival", "ticket"] = "arrival"
    """Which finished groups a step trains: the oldest ones, or the next tickets in order (waits for the
    slowest)."""
    late: Literal["keep", "mask", "drop"] = "keep"
    """Tokens staler than --max-staleness: keep them, mask them out of the loss, or drop their rollout."""
    # algorithm
    delta: Annotated[float, Gt(0)] = 5e-3
    """Largest mean KL (nats a token) of a rollout to the current policy; beyond, it is rejected."""
    max_weight: Annotated[float, Gt(0)] = math.inf
    """Cap of pi/mu of a token. Not in the paper, off by default (inf)."""
    failure_tokens: Annotated[float, Ge(0), Le(1)] = 1.0
    """Share q of a failed rollout's tokens, the most uncertain ones, that is trained. 1: all of them."""
    epochs: ClassVar[int] = 1
    """Not a flag: a batch is trained once,"""
    minibatches: ClassVar[int] = 1
    """in one update."""
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
    engine: Annotated[EngineFlags, OmitArgPrefixes] = field(
        default_factory=lambda: EngineFlags(max_in_flight=128)
    )
    parallel: Annotated[ParallelFlags, OmitArgPrefixes] = field(default_factory=ParallelFlags)
    deadline: Annotated[DeadlineFlags, OmitArgPrefixes] = field(default_factory=DeadlineFlags)
    save: Annotated[SaveFlags, OmitArgPrefixes] = field(default_factory=SaveFlags)
    log: Annotated[LogFlags, OmitArgPrefixes] = field(default_factory=LogFlags)
    debug: Annotated[DebugFlags, OmitArgPrefixes] = field(default_factory=DebugFlags)


# --- Advantages


def batch_advantages(rewards_R: list[float]) -> list[float]:
    """R - mean over the step's valid rollouts, each counted once. Equal rewards give exactly 0."""
    rewards = torch.tensor(rewards_R, dtype=torch.float64)
    if not len(rewards) or rewards.max() == rewards.min():
        return [0.0] * len(rewards)
    return (rewards - rewards.mean()).tolist()


# --- Gate: a pass without gradient, before the loss, as a rollout may lie in several micro-batches and ranks


# [shared:bernoulli_kl]
def bernoulli_kl(mu_logprobs_BS, logprobs_BS) -> torch.Tensor:
    """KL(mu, pi) of whether the sampled token is drawn: p ln(p/q) + (1-p) ln((1-p)/(1-q)), p of mu, q of pi.

    In fp32. 1 - p is taken from the log-prob by expm1: 1 - exp(-1e-9) would be 0.
    """
    log_p, log_q = (x.float().clamp(np.log(1e-6), np.log1p(-1e-6)) for x in (mu_logprobs_BS, logprobs_BS))
    other_p, other_q = -log_p.expm1(), -log_q.expm1()
    # rounding alone is below 0
    return (log_p.exp() * (log_p - log_q) + other_p * (other_p.log() - other_q.log())).clamp(min=0)


# [/shared:bernoulli_kl]


def kl_sums(logprobs_BS, mu_logprobs_BS, mask_BS, rollout_index_B, num_rollouts: int):
    """(summed KL, action tokens) of every rollout in this micro-batch, both [R] in float64, to be added up.

    Masked positions may hold anything, also NaN. Rollouts that are not in this micro-batch have 0 and 0.
    """
    kl_BS = torch.where(mask_BS, bernoulli_kl(mu_logprobs_BS, logprobs_BS.detach()), 0.0)
    zeros_R = torch.zeros(num_rollouts, dtype=torch.float64, device=kl_BS.device)
    sums_R = zeros_R.index_add(0, rollout_index_B, kl_BS.sum(-1, dtype=torch.float64))
    return sums_R, zeros_R.index_add(0, rollout_index_B, mask_BS.sum(-1).double())


def gate(sums_R, counts_R, delta: float) -> torch.Tensor:
    """Which rollouts are kept: those whose mean KL over all their action tokens is at most delta.

    A NaN is kept: with it no rank takes the step, which is counted; it would be rejected here in silence.
    """
    return ~(sums_R / counts_R.clamp(min=1) > delta)


def gate_metrics(kept_R) -> dict:
    """{metric: (sum, count)} per rollout; one rank adds it, once a step. R divides `loss/policy`."""
    return {"gate/rejected_frac": ((~kept_R).sum(), len(kept_R)), "loss/policy": (0.0, len(kept_R))}


# --- Entropy filter of failures


def entropy_floors(entropy_N, rollout_index_N, num_rollouts: int, q: float) -> torch.Tensor:
    """Entropy of the ceil(q T_i)-th most uncertain token of every rollout, [R]; q = 0 gives inf.

    N: all action tokens of the step, from all micro-batches and ranks, each with its rollout.
    """
    floors = []
    for index in range(num_rollouts):
        entropy = entropy_N[rollout_index_N == index]
        num_kept = math.ceil(q * len(entropy) - 1e-9)  # .07 * 100 is a little above 7
        floors.append(entropy.topk(num_kept).values[-1] if num_kept else entropy_N.new_tensor(math.inf))
    return torch.stack(floors)


def without_confident_failures(mask_BS, entropy_BS, floors_B, advantages_B) -> torch.Tensor:
    """The mask less those tokens of failed rollouts (A < 0) whose entropy is below their rollout's floor."""
    return mask_BS & ~((advantages_B < 0)[:, None] & (entropy_BS < floors_B[:, None]))


# --- Loss


def policy_loss(
    logprobs_BS, mu_logprobs_BS, advantages_B, num_actions_B, kept_B, mask_BS, max_weight=math.inf
):
    """R times this micro-batch's share of the loss (the caller divides by the step's R).

    `num_actions_B`: T_i of the row's rollout, over all its rows, before any gate or filter. Where gradients
    are averaged over ranks, backward() goes through loss * ranks / R, one micro-batch after the other.
    Returns (loss, {metric: (sum, count)}, {metric: max}); the count of `loss/policy` is in gate_metrics.
    Masked positions, and all of a masked row, may hold anything, also NaN.
    """
    trained_BS = mask_BS & kept_B[:, None]
    log_ratio_BS = torch.where(trained_BS, logprobs_BS.detach() - mu_logprobs_BS, 0.0)
    weights_BS = torch.where(trained_BS, log_ratio_BS.clamp(-20, 20).exp().clamp(max=max_weight), 0.0)
    scale_B = (advantages_B / num_actions_B.clamp(min=1)).to(logprobs_BS.dtype)
    factor_BS = torch.where(trained_BS, weights_BS * scale_B[:, None], 0.0)  # -dL/d(log pi), but for R
    loss = -(factor_BS * torch.where(trained_BS, logprobs_BS, 0.0)).sum()
    count, num_trained = mask_BS.sum(), trained_BS.sum()
    sums = {"loss/policy": (loss.detach(), 0), "is/dropped_frac": (count - num_trained, count)}
    squared = weights_BS.square().sum()
    sums |= {"is_weight": (weights_BS.sum(), num_trained), "is_weight_squared": (squared, num_trained)}
    return loss, sums, {"is/max_weight": weights_BS.max()}


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
        self.head = LogprobHead(self.model, args.parallel.fp32_head)
        self.sender = WeightSender(self.model, self.rank, engine_dtype, args.deadline.refit_timeout_s)
        self.sender.join(store, self.world_size, num_workers)
        return describe(self.model)

    def logprobs(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of each token given those before it, and the entropy there: [B, S]; s is token s + 1. Both
        have gradients."""
        ids_BT, rest = batch["token_ids"].long(), (batch.get("routed_experts"), batch.get("images"))
        inputs = (ids_BT[:, :-1], ids_BT[:, 1:], self.args.temperature, batch["lengths"] - 1, *rest)
        return self.head(self.model, *inputs)

    def load(self, checkpoint: str | None, init_from: str | None) -> None:
        """Goes on from a checkpoint of this run, or starts from the weights of another."""
        if checkpoint:
            self.trained = load_checkpoint(checkpoint, {"policy": (self.model, self.optimizer)})
        elif init_from:
            load_weights(init_from, self.model, self.rank)

    def train_step(self, share: tuple[list[dict], int, bool, bool], trace: str | None) -> dict:
        """One step on this rank's share: (micro-batches, R over all ranks, whether every rollout is one row,
        whether there is anything to learn).

        Returns `rank_metrics`. `trace` is a folder for a profile.
        """
        (batches, num_rollouts, one_row_each, has_signal), parallel = share, self.args.parallel
        sums, peaks = [{"gate/no_op": (float(not has_signal), 1)}], []
        lr = learning_rate(self.trained, self.args)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with traced(trace and f"{trace}/rank{self.rank}.json"):
            batches = [to_device(batch, self.device) for batch in batches]
            kept_R = floors_R = None
            if not one_row_each or self.args.failure_tokens < 1:
                kept_R, floors_R = self.whole_rollouts(batches, num_rollouts)
                sums += [gate_metrics(kept_R)] * (self.rank == 0)
            self.optimizer.zero_grad()
            for batch in batches:
                sync_gradients(self.model, parallel, last=batch is batches[-1])
                loss, step_sums, step_peaks = self.loss(batch, kept_R, floors_R)
                # FSDP averages gradients over ranks: times the ranks, it is their sum
                (loss * parallel.data_ranks / num_rollouts).backward()
                sums.append(step_sums)
                peaks.append(step_peaks)
            grad_norm = clip_gradients(self.model, self.args.max_grad_norm, parallel)
            if 0 < grad_norm < np.inf:  # at 0 AdamW would move the weights by its momentum alone
                self.optimizer.step()
                self.trained += 1
            sums.append(update_metrics(grad_norm))
        return rank_metrics([*sums, self.head.router.metrics()], [*peaks, {"lr": lr}])

    @torch.no_grad()
    def whole_rollouts(self, batches: list[dict], num_rollouts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A pass without gradient for what needs all rows of a rollout, wherever they lie: which rollouts are
        kept, and their entropy floors, both [R]."""
        kl_2R, tokens = torch.zeros(2, num_rollouts, dtype=torch.float64, device=self.device), []
        for batch in batches:
            logprobs_BS, entropy_BS = self.logprobs(batch)
            mask_BS, index_B = batch["action_mask"][:, 1:].bool(), batch["rollout_index"]
            mu_BS = batch["logprobs"][:, 1:]
            kl_2R += torch.stack(kl_sums(logprobs_BS, mu_BS, mask_BS, index_B, num_rollouts))
            owner_BS = index_B[:, None].expand_as(mask_BS)
            tokens.append(torch.stack([entropy_BS[mask_BS].double(), owner_BS[mask_BS].double()]))
        dist.all_reduce(kl_2R)
        parts = [None] * self.world_size
        dist.all_gather_object(parts, torch.cat(tokens, dim=1).cpu())
        parts = parts[:: self.args.parallel.trainer_tp]  # ranks of one model have the same tokens
        entropy_N, owner_N = torch.cat(parts, dim=1).to(self.device)
        floors_R = entropy_floors(entropy_N, owner_N, num_rollouts, self.args.failure_tokens)
        return gate(*kl_2R, self.args.delta), floors_R

    def loss(self, batch: dict, kept_R, floors_R) -> tuple[torch.Tensor, dict, dict]:
        """R times the loss of one micro-batch, its metrics, and its peaks. Without `kept_R` every rollout is
        one row, so that its gate needs no pass of its own."""
        args, mask_BS, mu_BS = self.args, batch["action_mask"][:, 1:].bool(), batch["logprobs"][:, 1:]
        logprobs_BS, entropy_BS = self.logprobs(batch)
        whole_BS, index_B = mask_BS, batch["rollout_index"]
        if kept_R is None:
            rows_B = torch.arange(len(mask_BS), device=self.device)
            kept_B = gate(*kl_sums(logprobs_BS, mu_BS, mask_BS, rows_B, len(rows_B)), args.delta)
            sums = gate_metrics(kept_B[mask_BS.any(-1)])
        else:
            kept_B, sums = kept_R[index_B], {}
            mask_BS = without_confident_failures(mask_BS, entropy_BS, floors_R[index_B], batch["advantage"])
        row = batch["advantage"], batch["num_actions"], kept_B
        loss, loss_sums, peaks = policy_loss(logprobs_BS, mu_BS, *row, mask_BS, args.max_weight)
        log_ratio_BS = torch.where(whole_BS, logprobs_BS.detach() - mu_BS, 0.0)
        mismatch, mismatch_peaks = mismatch_metrics(log_ratio_BS, whole_BS, batch.get("crossed", False))
        sums["loss/entropy"] = (torch.where(whole_BS, entropy_BS, 0.0).detach().sum(), whole_BS.sum())
        return loss, merge([sums, loss_sums, mismatch]), peaks | mismatch_peaks

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
    """Reward to advantage over the step's valid rollouts, then their segments as rows of the batch.

    T_i (`num_actions`) counts all sampled tokens, also those that --late mask took out of the loss. Returns
    (rows by rollout, advantages by rollout id).
    """
    valid = [rollout for rollout in rollouts if not rollout.invalid]
    advantages = batch_advantages([rollout.reward for rollout in valid])
    rows = []
    for index, (rollout, advantage) in enumerate(zip(valid, advantages, strict=True)):
        own = {"advantage": advantage, "num_actions": rollout.num_sampled, "rollout_index": index}
        rows.append([segment_row(segment) | own for segment in rollout.segments])
    return rows, {rollout.rollout_id: value for rollout, value in zip(valid, advantages)}


def make_minibatches(rows: list[list[dict]], args: Args, step: int) -> list[tuple]:
    """Rows by rollout -> for each rank what `Trainer.train_step` takes."""
    members = [row for rollout in rows for row in rollout]
    one_row_each, has_signal = len(members) == len(rows), any(row["advantage"] for row in members)
    shares = micro_batches(members, args.parallel)
    return [(share, len(rows), one_row_each, has_signal) for share in shares]


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
    """Refuses what cannot work, before anything starts. Returns the number of training tasks."""
    checks.check_ranges(args)
    if args.group_size != 1:
        raise checks.FlagError(f"--group-size {args.group_size}: always 1 here; algos/grpo.py trains groups")
    checks.check_shared(args.model, args.engine, args.parallel, args.data, args.save, args.debug, args.log)
    checks.check_ranks(args.parallel.num_trainers, args.parallel.trainer_tp, args.prompts_per_step)
    return checks.check_tasks(
        args.model, args.env, args.eval_env, args.data, args.engine, args.max_new_tokens
    )


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
