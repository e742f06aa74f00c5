"""PPO, asynchronous: a critic's values, GAE over the policy's own tokens, clipped policy and value losses.

    delta_k = r_k + gamma V(s_{k+1}) - V(s_k)                    k: the actions of a rollout, in time order
    A_k     = sum_{j >= k} (gamma lambda)^(j-k) delta_j,    R_k = A_k + V(s_k),    A whitened over the step
    L       = -1/N sum_t w_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)
    L_value = 1/N sum_t max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2) / 2
    r       = pi / old,   w = sg(f(old / mu))

mu is the policy that sampled the token (the engine, some steps ago), old and V_old are the trainer at the
start of the step, pi and V now. An action is a sampled token, its state all the tokens before it. Papers: PPO
arXiv 1707.06347; GAE arXiv 1506.02438; truncated importance sampling: "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training" (2025). What differs from the PPO paper, and why:
  1. time runs over actions: prompts and tool output are states and no steps, and nothing decays over them;
  2. a turn's reward stays on its last action, as all of them at the end would pay each turn for every other;
  3. a cut answer ends with V = 0: the limit is part of the task. --bootstrap-truncated takes V there instead;
  4. the critic is a network of its own: a shared trunk needs a weight between two losses of different scale;
  5. whitening is over the action tokens of the step, before minibatches; equal advantages are exactly 0;
  6. token mean over the step (N: its action tokens on all ranks), as 1/|o_i| favours long failures;
  7. asynchronous: old/mu is corrected, as pi/old alone would be biased: f is truncation, or what
     --correction says, which may also reject whole rollouts (seq-mask, kl-gate).

Suffixes: R rollouts, L their tokens with all segments in a row, A their actions, N a list of tokens, B rows
(segments), T tokens, S = T - 1 next-token positions.

    driver main() -- tickets, versions --> SampleQueue <-- groups -- RolloutWorker x engines (vLLM)
         |  rows                                                          ^
         '--> Trainer x ranks (FSDP2), policy and critic -- weights ------'

One CPU:    python -m algos.ppo --model tiny --env reverse
One GPU:    python -m algos.ppo --model smollm2 --env jsonl:data.jsonl
8 GPUs:     python -m algos.ppo --model PATH --env jsonl:data.jsonl --num-engines 5 --num-trainers 3
Many nodes: RAY_ADDRESS=auto python -m algos.ppo ... (on the head of a running Ray cluster)

Edit here: reward of a token -> turn_rewards | advantage -> gae, whiten | losses -> policy_loss, value_loss
           critic -> common/critic.py | optimizers, epochs -> Trainer.train_step | the loop, a metric -> main
"""

import asyncio
import json
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt
from torch.nn.utils.rnn import pad_sequence
from tyro.conf import OmitArgPrefixes

from common import checks, cluster
from common.batching import micro_batches, segment_row, to_device
from common.checkpoint import SaveFlags, load_checkpoint, load_weights, save_checkpoint, starting_point
from common.cluster import DeadlineFlags, Run, RunError
from common.critic import build_critic, values
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
from common.sample import RecordError, Rollout
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
    prompts_per_step: Annotated[int, Ge(1)] = 128
    """Prompt groups that a step trains (P). Raise it when the reward jumps about from step to step."""
    group_size: Annotated[int, Ge(1)] = 1
    """Rollouts of one prompt (G). The critic is the baseline: any number will do, 1 has the most prompts."""
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
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0
    """Discount of an action. Below 1 a reward at the end of a long answer fades towards its start."""
    lam: Annotated[float, Ge(0), Le(1)] = 1.0
    """GAE's lambda: 1 is the return less the value, unbiased; lower leans on the critic, with less noise."""
    whiten: bool = True
    """Advantages of the step get mean 0 and std 1."""
    bootstrap_truncated: bool = False
    """A rollout cut by a length limit ends with the critic's value of where it was cut, not with 0."""
    value_clip: Annotated[float, Gt(0)] = 0.2
    """How far a value may move from V_old before its gradient stops (in units of the reward). inf: any."""
    critic_lr: Annotated[float | None, Ge(0)] = None
    """The critic's peak learning rate. Default: 1e-3 for tiny, 1e-5 for every other model."""
    critic_warmup_steps: Annotated[int, Ge(0)] = 0
    """First steps that train the critic alone; the policy, and its learning rate, stay as they are."""
    clip_low: Annotated[float, Gt(0), Le(1)] = 0.2
    """Lower clip of pi/old (eps_low): the ratio has no gradient below 1 - eps_low where A < 0."""
    clip_high: Annotated[float, Gt(0)] = 0.28
    """Upper clip of pi/old (eps_high, DAPO's clip-higher). Raise it when loss/entropy falls early."""
    correction: Literal["tis", "icepop", "clip", "seq-mask", "kl-gate", "none"] = "tis"
    """Weight of a token for old/mu: truncated, dropped outside, or clamped to [1/cap, cap]; old/mu itself in
    rollouts whose geometric mean of old/mu is in [1/cap, cap] (seq-mask), or whose mean KL is at most the cap
    (kl-gate), and 0 in others; or none."""
    correction_cap: float | None = None
    """The cap of --correction. Default: 2 for tis, icepop and clip, 1.05 for seq-mask, 5e-3 nats a token for
    kl-gate. Lower it when is/max_weight is high and is/ess low."""
    kl_coef: Annotated[float, Ge(0), Lt(float("inf"))] = 0.0
    """Weight of the KL to the starting policy (k2). Above 0 the trainer keeps a frozen copy of the model.
    Raise it when the reward rises and the evaluation does not."""
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
    engine: Annotated[EngineFlags, OmitArgPrefixes] = field(
        default_factory=lambda: EngineFlags(max_in_flight=128)
    )
    parallel: Annotated[ParallelFlags, OmitArgPrefixes] = field(default_factory=ParallelFlags)
    deadline: Annotated[DeadlineFlags, OmitArgPrefixes] = field(default_factory=DeadlineFlags)
    save: Annotated[SaveFlags, OmitArgPrefixes] = field(default_factory=SaveFlags)
    log: Annotated[LogFlags, OmitArgPrefixes] = field(default_factory=LogFlags)
    debug: Annotated[DebugFlags, OmitArgPrefixes] = field(default_factory=DebugFlags)


# --- Advantages


def turn_rewards(rollout: Rollout) -> np.ndarray:
    """The rewards of a rollout on its tokens, [L]: each turn's on the last action up to the turn's end.

    A single reward for several turns is the episode's: it goes to the last action. A reward before any
    action is left out, since no action could have brought it.
    """
    sampled_L = np.concatenate([segment.versions >= 0 for segment in rollout.segments])
    starts = np.cumsum([0, *(len(segment.token_ids) for segment in rollout.segments)])
    ends = [start + end for start, s in zip(starts, rollout.segments) for end in s.turn_ends]
    ends = ends[-1:] if len(rollout.rewards) == 1 else ends
    if len(ends) != len(rollout.rewards):
        raise RecordError(f"{rollout.rollout_id}: {len(rollout.rewards)} rewards for {len(ends)} turns")
    rewards_L, actions = np.zeros(len(sampled_L), np.float32), np.flatnonzero(sampled_L)
    counts, rewards = np.searchsorted(actions, ends), np.array(rollout.rewards)  # of actions up to each end
    np.add.at(rewards_L, actions[counts[counts > 0] - 1], rewards[counts > 0])
    return rewards_L


def gae(rewards_RL, values_RL, mask_RL, last_values_R, gamma: float, lam: float):
    """(advantages, returns), both [R, L]: GAE over the masked slots, which are the actions; 0 elsewhere.

    `values_RL` has at each action the value of the state it was taken in, `last_values_R` that of the state
    after a rollout's last action: 0 where the episode ended. Other slots may hold anything, also NaN. In
    numpy, on a CPU. The recursion A_k = delta_k + gamma lambda A_{k+1} is summed by doubling, in log2(A)
    passes: a sum of n terms, and (gamma lambda)^n times the one n later, are the sum of 2n terms.
    """
    advantages_RL, returns_RL = torch.zeros_like(values_RL), torch.zeros_like(values_RL)
    for index, mask_L in enumerate(mask_RL.numpy()):
        rewards_A, values_A = rewards_RL[index].numpy()[mask_L], values_RL[index].numpy()[mask_L]
        sums_A = rewards_A + gamma * np.append(values_A, last_values_R[index])[1:] - values_A
        for reach in (2**power for power in range(len(sums_A).bit_length())):
            sums_A[:-reach] += (gamma * lam) ** reach * sums_A[reach:]
        advantages_RL.numpy()[index, mask_L], returns_RL.numpy()[index, mask_L] = sums_A, sums_A + values_A
    return advantages_RL, returns_RL


def whiten(advantages_RL: torch.Tensor, mask_RL: torch.Tensor) -> torch.Tensor:
    """(A - mean) / std over all masked tokens, std unbiased; 0 elsewhere. Equal advantages give exactly 0."""
    masked = advantages_RL.masked_select(mask_RL).double()
    if len(masked) < 2 or masked.max() == masked.min():
        return torch.zeros_like(advantages_RL)
    return torch.where(mask_RL, (advantages_RL - masked.mean()) / masked.std(correction=1), 0.0)


def explained_variance(returns_N: torch.Tensor, values_N: torch.Tensor) -> tuple[float, float]:
    """1 - Var(return - V_old) / Var(return) as (sum, count); count 0 where the returns do not vary.

    1: foreseen but for a constant; 0: no better than a constant.
    """
    returns_N = returns_N.double()
    variance, rest = returns_N.var(correction=0), (returns_N - values_N).var(correction=0)
    return (float(1 - rest / variance), 1) if variance > 1e-12 * returns_N.square().mean() else (0.0, 0)


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


def policy_loss(logprobs_BS, old_BS, weights_BS, advantages_BS, mask_BS, clip_low: float, clip_high: float):
    """The summed clipped surrogate over the masked tokens (the caller divides by the step's token count).

    Returns (loss, {metric: (sum, count)}). Masked positions may hold anything, also NaN. Log-ratios are
    clamped to +-20, where exp is finite in fp32 and far outside of any clip range.
    """
    log_ratio_BS = torch.where(mask_BS, logprobs_BS - old_BS, 0.0).clamp(-20, 20)
    ratio_BS, adv_BS = log_ratio_BS.exp(), torch.where(mask_BS, advantages_BS, 0.0).to(logprobs_BS.dtype)
    clipped_BS = ratio_BS.clamp(1 - clip_low, 1 + clip_high)
    surrogate_BS = torch.minimum(ratio_BS * adv_BS, clipped_BS * adv_BS)
    loss = -(torch.where(mask_BS, weights_BS, 0.0) * surrogate_BS).sum()
    count = mask_BS.sum()
    low = mask_BS & (adv_BS < 0) & (ratio_BS < 1 - clip_low)
    high = mask_BS & (adv_BS > 0) & (ratio_BS > 1 + clip_high)
    held = {"ratio/clip_low_frac": (low.sum(), count), "ratio/clip_high_frac": (high.sum(), count)}
    return loss, {"loss/policy": (loss.detach(), count)} | held


def value_loss(values_BS, old_BS, returns_BS, mask_BS, clip: float):
    """The summed clipped squared error of the values over the masked tokens, halved.

    Returns (loss, {metric: (sum, count)}). Masked positions may hold anything, also NaN. A value that left
    V_old +- clip on the side of its return has no gradient.
    """
    values_BS, old_BS, returns_BS = (torch.where(mask_BS, x, 0.0) for x in (values_BS, old_BS, returns_BS))
    error_BS = (values_BS - returns_BS).square()
    clipped_BS = (old_BS + (values_BS - old_BS).clamp(-clip, clip) - returns_BS).square()
    loss, count = 0.5 * torch.maximum(error_BS, clipped_BS).sum(), mask_BS.sum()
    held = mask_BS & ((values_BS - old_BS).abs() > clip) & (clipped_BS > error_BS)
    return loss, {"loss/value": (loss.detach(), count), "value/clip_frac": (held.sum(), count)}


def kl_loss(logprobs_BS, ref_logprobs_BS, mask_BS) -> torch.Tensor:
    """The summed k2 estimate of KL(pi, ref) over the masked tokens; on-policy its gradient is the KL's."""
    return 0.5 * torch.where(mask_BS, logprobs_BS - ref_logprobs_BS, 0.0).square().sum()


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
    """One rank of the trainer: policy and critic, their optimizers, the optimizer step; a Ray actor per
    rank."""

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
        self.critic = build_critic(self.model_path, self.device, args.parallel)
        models, settings = {"policy": self.model, "critic": self.critic}, (args.weight_decay, args.parallel)
        self.parts = {name: (model, make_optimizer(model, *settings)) for name, model in models.items()}
        self.head = LogprobHead(self.model, args.parallel.fp32_head)
        if args.kl_coef > 0:
            self.ref_model = build_model(self.model_path, self.device, engine_dtype, args.parallel)
            self.ref_head = LogprobHead(self.ref_model.requires_grad_(False), args.parallel.fp32_head)
        self.sender = WeightSender(self.model, self.rank, engine_dtype, args.deadline.refit_timeout_s)
        self.sender.join(store, self.world_size, num_workers)
        return describe(self.model)

    def logprobs(self, batch: dict, model, head) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of each token given those before it, and the entropy there: [B, S]; s is token s + 1. Both
        have gradients."""
        ids_BT, rest = batch["token_ids"].long(), (batch.get("routed_experts"), batch.get("images"))
        return head(model, ids_BT[:, :-1], ids_BT[:, 1:], self.args.temperature, batch["lengths"] - 1, *rest)

    def load(self, checkpoint: str | None, init_from: str | None) -> None:
        """Goes on from a checkpoint of this run, or starts from the policy's weights of another."""
        if checkpoint:
            self.trained = load_checkpoint(checkpoint, self.parts)
        elif init_from:
            load_weights(init_from, self.model, self.rank)

    def train_step(self, share: tuple[list, dict], trace: str | None) -> dict:
        """One step on this rank's share, which `make_minibatches` made: policy, then critic, in each update.

        Returns `rank_metrics`. `trace` is a folder for a profile.
        """
        # `alone`: how many more steps train the critic alone; the policy's schedule begins after them
        args, (minibatches, episodes), alone = self.args, share, self.args.critic_warmup_steps - self.trained
        rates = {"policy": learning_rate(max(-alone, 0), args)}
        rates["critic"] = learning_rate(self.trained, replace(args, lr=args.critic_lr))
        measured = [(self.look_ahead([b for batches, _ in minibatches for b in batches], episodes), {})]
        with traced(trace and f"{trace}/rank{self.rank}.json"):
            for batches, num_tokens in minibatches * args.epochs:
                for name, loss_of in (("policy", self.loss), ("critic", self.critic_loss)):
                    model, optimizer = self.parts[name]
                    for group in optimizer.param_groups:
                        group["lr"] = rates[name]
                    optimizer.zero_grad()
                    for batch in batches:
                        sync_gradients(model, args.parallel, last=batch is batches[-1])
                        loss, sums, peaks = loss_of(batch)
                        # FSDP averages gradients over ranks: times the ranks, it is their sum
                        (loss * args.parallel.data_ranks / max(num_tokens, 1)).backward()
                        measured.append((sums, peaks))
                    grad_norm = clip_gradients(model, args.max_grad_norm, args.parallel)
                    # in the warm-up, the policy went this far for its metrics alone
                    if name == "critic" or alone <= 0:
                        if np.isfinite(grad_norm):  # on all ranks or on none
                            optimizer.step()
                        measured.append((update_metrics(grad_norm, name == "critic", alone > 0), {}))
        # an update was made, of the policy if it is trained
        self.trained += any(("value/grad_norm" if alone > 0 else "grad_norm") in sums for sums, _ in measured)
        return rank_metrics(*zip(*measured, (self.head.router.metrics(), {"lr": rates["policy"]})))

    @torch.no_grad()
    def look_ahead(self, batches: list[dict], episodes: dict) -> dict:
        """Once per step, before the weights move: moves the batches to the device and gives them advantages,
        returns and old values, [B, S], and the gate's verdict if there is one.

        GAE needs all rows of a rollout, and they may lie on several ranks: each rank gets the values of all,
        and computes the same. Returns metrics, on rank 0.
        """
        args, (num_rollouts, length) = self.args, episodes["rewards"].shape
        values_RL = torch.full((num_rollouts, length + 1), -torch.inf, device=self.device)
        for batch in batches:
            batch |= to_device(batch, self.device)
            batch["mask"] = batch["action_mask"][:, 1:].bool()
            values_BT = values(self.critic, batch["token_ids"].long(), batch["lengths"], batch["images"])
            values_RL[batch["rollout_index"][:, None], batch["next_place"]] = values_BT
        torch.distributed.all_reduce(values_RL, torch.distributed.ReduceOp.MAX)  # a filler is there twice
        values_RL, mask_RL = values_RL.cpu(), episodes["action_mask"]
        last_R = torch.where(episodes["cut_at"] > 0, values_RL[range(num_rollouts), episodes["cut_at"]], 0.0)
        values_RL, rewards_RL, sampled_RL = values_RL[:, :-1], episodes["rewards"], episodes["sampled"]
        advantages_RL, returns_RL = gae(rewards_RL, values_RL, sampled_RL, last_R, args.gamma, args.lam)
        sums = {"value/explained_var": explained_variance(returns_RL[mask_RL], values_RL[mask_RL])}
        sums["advantage/abs_mean"] = advantages_RL[mask_RL].abs().sum(), mask_RL.sum()
        advantages_RL = whiten(advantages_RL, mask_RL) if args.whiten else advantages_RL
        columns = {"advantages": advantages_RL, "returns": returns_RL, "old_values": values_RL}
        for batch in batches:
            places = batch["rollout_index"].cpu()[:, None], batch["next_place"].cpu()[:, 1:] - 1
            batch |= {name: column_RL[places].to(self.device) for name, column_RL in columns.items()}
            if args.correction in GATES or args.epochs * args.minibatches > 1:
                batch["old_logprobs"] = self.logprobs(batch, self.model, self.head)[0]
            if args.kl_coef > 0:
                batch["ref_logprobs"] = self.logprobs(batch, self.ref_model, self.ref_head)[0]
        if args.correction in GATES:
            mark_kept(batches, num_rollouts, args.correction, args.correction_cap)
        return sums if self.rank == 0 else {}

    def loss(self, batch: dict) -> tuple[torch.Tensor, dict, dict]:
        """The policy's summed loss of one micro-batch, its metrics, and its peaks."""
        args, mask_BS, clip = self.args, batch["mask"], (self.args.clip_low, self.args.clip_high)
        logprobs_BS, entropy_BS = self.logprobs(batch, self.model, self.head)
        old_BS = batch.get("old_logprobs", logprobs_BS.detach())
        log_ratio_BS = torch.where(mask_BS, old_BS - batch["logprobs"][:, 1:], 0.0)
        weights_BS = importance_weights(log_ratio_BS, args.correction, args.correction_cap, batch.get("kept"))
        loss, sums = policy_loss(logprobs_BS, old_BS, weights_BS, batch["advantages"], mask_BS, *clip)
        count, masked = mask_BS.sum(), weights_BS[mask_BS]
        sums["loss/entropy"] = (torch.where(mask_BS, entropy_BS, 0.0).detach().sum(), count)
        if args.kl_coef > 0:
            kl = kl_loss(logprobs_BS, batch["ref_logprobs"], mask_BS)
            loss, sums["loss/kl"] = loss + args.kl_coef * kl, (kl.detach(), count)
        mismatch, peaks = mismatch_metrics(log_ratio_BS, mask_BS, batch.get("crossed", False))
        sums["is/dropped_frac"] = ((masked == 0).sum(), count)
        sums["is_weight"], sums["is_weight_squared"] = (masked.sum(), count), (masked.square().sum(), count)
        peaks["is/max_weight"] = masked.max() if count else 0.0
        return loss, sums | mismatch, peaks

    def critic_loss(self, batch: dict) -> tuple[torch.Tensor, dict, dict]:
        """The same of the critic, which has no peaks."""
        values_BS = values(self.critic, batch["token_ids"].long(), batch["lengths"], batch["images"])[:, :-1]
        old_BS, returns_BS, mask_BS = batch["old_values"], batch["returns"], batch["mask"]
        return *value_loss(values_BS, old_BS, returns_BS, mask_BS, self.args.value_clip), {}

    @torch.no_grad()
    def send_weights(self, version: int, probe_ids: list[int]) -> dict:
        """All weights to all engines, and this trainer's log-probs of the probe prompt under them."""
        report = self.sender.send(version)
        ids_BT = torch.tensor([probe_ids], device=self.device)
        logprobs_BS, _ = self.head(self.model, ids_BT[:, :-1], ids_BT[:, 1:], 1.0)
        return report | {"probe": logprobs_BS[0].tolist()}

    def save(self, path: str, progress: dict) -> None:
        tokenizer, progress = load_tokenizer(self.model_path), progress | {"trained": self.trained}
        save_checkpoint(path, self.rank, self.model, tokenizer, self.parts, progress)


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
    """The segments of each valid rollout as rows of the batch, whose tokens know their place in the rollout.

    `next_place` is the place after a token, where the value of its state belongs: 1 to L, and 0 in padding.
    `cut_at` is that place of the token after which a rollout was cut, and 0 if it ended.
    Returns (rows by rollout, {}): advantages wait for the critic, in the trainer.
    """
    rows: list[list[dict]] = []
    for rollout in [rollout for rollout in rollouts if not rollout.invalid]:
        ends = np.cumsum([len(segment.token_ids) for segment in rollout.segments])
        cut = args.bootstrap_truncated and rollout.truncated
        own = {"rollout_index": len(rows), "cut_at": ends[-1] if cut else 0}
        rewards = np.split(turn_rewards(rollout), ends[:-1])
        places = np.split(np.arange(1, ends[-1] + 1), ends[:-1])
        rows.append([])
        for segment, part, place in zip(rollout.segments, rewards, places):
            tokens = {"sampled": segment.versions >= 0, "rewards": part, "next_place": place}
            rows[-1].append(segment_row(segment) | own | tokens)
    return rows, {}


def make_minibatches(rows: list[list[dict]], args: Args, step: int) -> list[tuple[list, dict]]:
    """Rows by rollout -> for each rank ([(micro-batches, action tokens of the minibatch over all ranks)], the
    step's rollouts for GAE, [R, L] and [R])."""
    shuffled, minibatches = np.random.default_rng([args.seed, step]).permutation(len(rows)), []
    for part in np.array_split(shuffled, min(args.minibatches, len(rows))):
        members = [row for index in part for row in rows[index]]
        num_tokens = sum(int(row["action_mask"].sum()) for row in members)
        minibatches.append([(share, num_tokens) for share in micro_batches(members, args.parallel)])
    episodes = {"cut_at": torch.tensor([own[0]["cut_at"] for own in rows])}
    for name in ("rewards", "sampled", "action_mask"):
        columns = [np.concatenate([row[name] for row in own]) for own in rows]
        episodes[name] = pad_sequence([torch.from_numpy(column) for column in columns], batch_first=True)
    return [(share, episodes) for share in zip(*minibatches)]


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
    """Refuses what cannot work, before anything starts, and fills in --correction-cap and --critic-lr.
    Returns the number of training tasks."""
    checks.check_ranges(args)
    args.correction_cap = checks.correction_cap(args.correction, args.correction_cap)
    checks.check_minibatches(args.prompts_per_step, args.minibatches)
    checks.check_shared(args.model, args.engine, args.parallel, args.data, args.save, args.debug, args.log)
    args.critic_lr = (1e-3 if args.model == "tiny" else 1e-5) if args.critic_lr is None else args.critic_lr
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
