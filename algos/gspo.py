"""GSPO, asynchronous: GRPO whose ratio and clip are those of a whole rollout.

    A_i = (R_i - mean(R)) / std(R)                                        over the G rollouts of one prompt
    L   = -1/R sum_i 1/T_i sum_t w_t min(s_it A_i, clip(s_it, 1 - eps_low, 1 + eps_high) A_i)
    s_i = (prod_t pi_t / old_t)^(1/T_i),   s_it = sg(s_i) pi_t / sg(pi_t),   w = sg(f(old / mu))

mu is the policy that sampled the token (the engine, some steps ago), old the trainer at the start of the
step, pi the trainer now, T_i the trained tokens of rollout i in all its segments, R the rollouts of the
step. Paper: GSPO arXiv 2507.18071. s_it is s_i in value; the mean of its gradients over the tokens is that
of s_i. A step of one update has s = 1, and the clip holds nothing; --minibatches 4 is the paper's.

What differs from the GSPO paper, which has no KL term either, and why:
  1. a rollout of several segments is one sequence; a pass without gradient before each update gathers s_i;
  2. unbiased std (ddof 1), and a group of equal rewards has advantage exactly 0: no epsilon to divide by;
  3. asynchronous: old/mu is corrected, as pi/old alone would be biased: f is truncation, or what
     --correction says, which may also reject whole rollouts (seq-mask, kl-gate).

Suffixes: G rollouts of a group, R of the step, B rows (segments), T tokens, S = T - 1 next-token positions.

    driver main() -- tickets, versions --> SampleQueue <-- groups -- RolloutWorker x engines (vLLM)
         |  rows                                                          ^
         '--> Trainer x ranks (FSDP2) --------- weights, each step -------'

One CPU:    python -m algos.gspo --model tiny --env reverse
One GPU:    python -m algos.gspo --model smollm2 --env jsonl:data.jsonl
8 GPUs:     python -m algos.gspo --model PATH --env jsonl:data.jsonl --num-engines 6 --num-trainers 2
Many nodes: RAY_ADDRESS=auto python -m algos.gspo ... (on the head of a running Ray cluster)

Edit here: advantage -> group_advantages | loss -> policy_loss | ratio of a rollout -> Trainer.mark_ratios
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
from common.logger import LogFlags, Logger
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
    """Prompt groups that a step trains (P). Raise it when the reward jumps about from step to step."""
    group_size: int = 8
    """Rollouts of one prompt (G). Raise it when reward/zero_std_group_frac is high: of more, some differ."""
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
    clip_low: Annotated[float, Gt(0), Le(1)] = 3e-4
    """Lower clip of a rollout's ratio (eps_low): it has no gradient below 1 - eps_low where A < 0."""
    clip_high: Annotated[float, Gt(0)] = 4e-4
    """Upper clip of a rollout's ratio (eps_high). A mean over many tokens is close to 1."""
    correction: Literal["tis", "icepop", "clip", "seq-mask", "kl-gate", "none"] = "tis"
    """Weight of a token for old/mu: truncated, dropped outside, or clamped to [1/cap, cap]; old/mu itself in
    rollouts whose geometric mean of old/mu is in [1/cap, cap] (seq-mask), or whose mean KL is at most the cap
    (kl-gate), and 0 in others; or none."""
    correction_cap: float | None = None
    """The cap of --correction. Default: 2 for tis, icepop and clip, 1.05 for seq-mask, 5e-3 nats a token for
    kl-gate. Lower it when is/max_weight is high and is/ess low."""
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


# --- Advantages


def group_advantages(rewards_G: list[float]) -> list[float]:
    """(R - mean) / std over the valid rollouts of one prompt, std unbiased. Equal rewards give exactly 0."""
    rewards = torch.tensor(rewards_G, dtype=torch.float64)
    if len(rewards) < 2 or rewards.max() == rewards.min():
        return [0.0] * len(rewards)
    return ((rewards - rewards.mean()) / rewards.std(correction=1)).tolist()


# --- Loss


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


# [shared:importance_weights]
GATES = ("seq-mask", "kl-gate")  # corrections that keep or reject a whole rollout


def mark_kept(batches: list[dict], num_rollouts: int, correction: str, cap: float) -> None:
    """Gives each micro-batch `kept`, [B]: whether the gate keeps the rollout (of R in the step) of a row.

    A score's mean over all action tokens of a rollout decides, and its rows may lie on several ranks: a
    collective. seq-mask: log(old / mu), kept in [-log cap, log cap]. kl-gate: the KL, kept up to cap. A NaN
    is kept: with it no rank takes the step, which is counted; it would be rejected here in silence.
    """
    sums_2R = torch.zeros(2, num_rollouts, dtype=torch.float64, device=batches[0]["logprobs"].device)
    for batch in batches:
        mask_BS, mu_BS, old_BS = batch["mask"], batch["logprobs"][:, 1:], batch["old_logprobs"]
        score_BS = bernoulli_kl(mu_BS, old_BS) if correction == "kl-gate" else old_BS - mu_BS
        score_BS = torch.where(mask_BS, score_BS, 0.0).double()
        sums_2R.index_add_(1, batch["rollout_index"], torch.stack([score_BS.sum(1), mask_BS.sum(1)]))
    torch.distributed.all_reduce(sums_2R)
    mean_R = sums_2R[0] / sums_2R[1].clamp(min=1)
    kept_R = ~(mean_R.abs() > (cap if correction == "kl-gate" else np.log(cap)))
    for batch in batches:
        batch["kept"] = kept_R[batch["rollout_index"]]


def importance_weights(log_ratio_BS: torch.Tensor, correction: str, cap: float, kept_B=None) -> torch.Tensor:
    """Weight of each token for being sampled by mu instead of old, from log(old / mu). Carries no gradient.

    tis: min(ratio, cap). icepop: the ratio, 0 outside [1/cap, cap]. clip: the ratio clamped to [1/cap, cap].
    seq-mask, kl-gate: the ratio, 0 in rollouts that `mark_kept` rejected.
    """
    ratio_BS = log_ratio_BS.detach().clamp(-20, 20).exp()
    if correction in GATES:
        return torch.where(kept_B[:, None], ratio_BS, 0.0)
    if correction == "tis":
        return ratio_BS.clamp(max=cap)
    if correction == "icepop":
        return torch.where((ratio_BS >= 1 / cap) & (ratio_BS <= cap), ratio_BS, 0.0)
    if correction == "clip":
        return ratio_BS.clamp(1 / cap, cap)
    return torch.ones_like(ratio_BS)


# [/shared:importance_weights]


def policy_loss(logprobs_BS, log_ratio_B, weights_BS, advantages_B, share_BS, clip_low, clip_high):
    """The summed clipped surrogate, of each rollout the mean (the caller divides by the step's rollouts).

    `log_ratio_B` is log s_i of a row's rollout, `share_BS` 1/T_i at its trained tokens and 0 elsewhere, where
    the others may hold anything, also NaN. Returns (loss, {metric: (sum, count)}), counted in rollouts.
    """
    mask_BS, own_BS = share_BS > 0, logprobs_BS - logprobs_BS.detach()  # 0, and all of the gradient
    log_ratio_BS = torch.where(mask_BS, own_BS, 0.0) + log_ratio_B.to(own_BS.dtype).clamp(-20, 20)[:, None]
    ratio_BS, adv_BS = log_ratio_BS.exp(), advantages_B[:, None].to(logprobs_BS.dtype)
    clipped_BS = ratio_BS.clamp(1 - clip_low, 1 + clip_high)
    surrogate_BS = torch.minimum(ratio_BS * adv_BS, clipped_BS * adv_BS)
    loss = -torch.where(mask_BS, torch.where(mask_BS, weights_BS, 0.0) * surrogate_BS * share_BS, 0.0).sum()
    count = share_BS.sum()
    low = share_BS * ((adv_BS < 0) & (ratio_BS < 1 - clip_low))
    high = share_BS * ((adv_BS > 0) & (ratio_BS > 1 + clip_high))
    held = {"ratio/clip_low_frac": (low.sum(), count), "ratio/clip_high_frac": (high.sum(), count)}
    return loss, {"loss/policy": (loss.detach(), count)} | held


# --- Rollout

MIN_VALID = 2  # a group with fewer valid rollouts is dropped: no baseline without a second one


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

    def logprobs(self, batch: dict, model, head) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of each token given those before it, and the entropy there: [B, S]; s is token s + 1. Both
        have gradients."""
        ids_BT, rest = batch["token_ids"].long(), (batch.get("routed_experts"), batch.get("images"))
        return head(model, ids_BT[:, :-1], ids_BT[:, 1:], self.args.temperature, batch["lengths"] - 1, *rest)

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
        args, (minibatches, num_rollouts), sums, peaks = self.args, share, [], []
        lr = learning_rate(self.trained, args)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.look_ahead([batch for batches, _ in minibatches for batch in batches], num_rollouts)
        with traced(trace and f"{trace}/rank{self.rank}.json"):
            for batches, size in minibatches * args.epochs:
                if args.epochs * args.minibatches > 1:
                    self.mark_ratios(batches, num_rollouts)
                self.optimizer.zero_grad()
                for batch in batches:
                    sync_gradients(self.model, args.parallel, last=batch is batches[-1])
                    loss, step_sums, step_peaks = self.loss(batch)
                    # FSDP averages gradients over ranks: times the ranks, it is their sum
                    (loss * args.parallel.data_ranks / size).backward()
                    sums.append(step_sums)
                    peaks.append(step_peaks)
                grad_norm = clip_gradients(self.model, args.max_grad_norm, args.parallel)
                if np.isfinite(grad_norm):  # on all ranks or on none
                    self.optimizer.step()
                sums.append(update_metrics(grad_norm))
        self.trained += any("grad_norm" in each for each in sums)  # an update was made
        return rank_metrics([*sums, self.head.router.metrics()], [*peaks, {"lr": lr}])

    @torch.no_grad()
    def look_ahead(self, batches: list[dict], num_rollouts: int) -> None:
        """Once per step, before the weights move: moves the batches to the device and gives them old
        log-probs and the gate's verdict, where one of them is asked for."""
        args = self.args
        for batch in batches:
            batch |= to_device(batch, self.device)
            batch["mask"] = batch["action_mask"][:, 1:].bool()
            if args.correction in GATES or args.epochs * args.minibatches > 1:
                batch["old_logprobs"] = self.logprobs(batch, self.model, self.head)[0]
        if args.correction in GATES:
            mark_kept(batches, num_rollouts, args.correction, args.correction_cap)

    @torch.no_grad()
    def mark_ratios(self, batches: list[dict], num_rollouts: int) -> None:
        """Gives each micro-batch `log_ratio`, [B]: log s_i, the mean log(pi / old) over all trained tokens of
        the rollout of a row. Its rows may lie on several ranks: a collective."""
        sums_2R = torch.zeros(2, num_rollouts, dtype=torch.float64, device=self.device)
        for batch in batches:
            mask_BS, logprobs_BS = batch["mask"], self.logprobs(batch, self.model, self.head)[0]
            log_ratio_BS = torch.where(mask_BS, logprobs_BS - batch["old_logprobs"], 0.0).double()
            sums_2R.index_add_(1, batch["rollout_index"], torch.stack([log_ratio_BS.sum(1), mask_BS.sum(1)]))
        torch.distributed.all_reduce(sums_2R)
        for batch in batches:
            batch["log_ratio"] = (sums_2R[0] / sums_2R[1].clamp(min=1))[batch["rollout_index"]]

    def loss(self, batch: dict) -> tuple[torch.Tensor, dict, dict]:
        """The summed loss of one micro-batch, its metrics, and its peaks."""
        args, mask_BS, clip = self.args, batch["mask"], (self.args.clip_low, self.args.clip_high)
        logprobs_BS, entropy_BS = self.logprobs(batch, self.model, self.head)
        old_BS = batch.get("old_logprobs", logprobs_BS.detach())
        log_ratio_BS = torch.where(mask_BS, old_BS - batch["logprobs"][:, 1:], 0.0)
        weights_BS = importance_weights(log_ratio_BS, args.correction, args.correction_cap, batch.get("kept"))
        share_BS = mask_BS / batch["num_actions"].clamp(min=1)[:, None]
        log_ratio_B = batch.get("log_ratio", torch.zeros_like(batch["advantage"]))  # of one update: s = 1
        loss, sums = policy_loss(logprobs_BS, log_ratio_B, weights_BS, batch["advantage"], share_BS, *clip)
        count, masked = mask_BS.sum(), weights_BS[mask_BS]
        sums["loss/entropy"] = (torch.where(mask_BS, entropy_BS, 0.0).detach().sum(), count)
        mismatch, peaks = mismatch_metrics(log_ratio_BS, mask_BS, batch.get("crossed", False))
        sums["is/dropped_frac"] = ((masked == 0).sum(), count)
        sums["is_weight"], sums["is_weight_squared"] = (masked.sum(), count), (masked.square().sum(), count)
        peaks["is/max_weight"] = masked.max() if count else 0.0
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
    """Reward to advantage within each group, then the segments of each valid rollout as rows of the batch.

    Every segment has its rollout's advantage and T_i. Returns (rows by rollout, advantages by rollout id).
    """
    advantages: dict[str, float] = {}
    for group_id in dict.fromkeys(rollout.group_id for rollout in rollouts):
        valid = [r for r in rollouts if r.group_id == group_id and not r.invalid]
        values = group_advantages([rollout.reward for rollout in valid])
        advantages |= {rollout.rollout_id: value for rollout, value in zip(valid, values, strict=True)}
    rows = []
    for rollout in [rollout for rollout in rollouts if rollout.rollout_id in advantages]:
        own = {"advantage": advantages[rollout.rollout_id], "num_actions": rollout.num_actions}
        rows.append([segment_row(segment) | own for segment in rollout.segments])
    return rows, advantages


def make_minibatches(rows: list[list[dict]], args: Args, step: int) -> list[tuple[tuple, int]]:
    """Rows by rollout -> for each rank ([(micro-batches, rollouts of the minibatch over all ranks)], the
    step's rollouts over all ranks). A row gets its rollout's number."""
    shuffled, minibatches = np.random.default_rng([args.seed, step]).permutation(len(rows)), []
    for part in np.array_split(shuffled, min(args.minibatches, len(rows))):
        members = [row | {"rollout_index": index} for index in part for row in rows[index]]
        minibatches.append([(share, len(part)) for share in micro_batches(members, args.parallel)])
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
    """Refuses what cannot work, before anything starts, and fills in --correction-cap. Returns the number of
    training tasks."""
    checks.check_ranges(args)
    args.correction_cap = checks.correction_cap(args.correction, args.correction_cap)
    checks.check_group_size(args.group_size)
    checks.check_minibatches(args.prompts_per_step, args.minibatches)
    checks.check_shared(args.model, args.engine, args.parallel, args.data, args.save, args.debug, args.log)
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
