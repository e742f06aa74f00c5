"""The two records that cross the queue: `Segment` (one token sequence) and `Rollout` (one episode).

Tokens come first: ids are what the engine returned or what tokenising the context gave once. Nothing in this
project decodes and re-encodes a sampled token. A broken record raises `RecordError`; it is never repaired.
"""

import math
import sys
from dataclasses import dataclass, field

import numpy as np

ARRAYS = {"token_ids": np.int32, "action_mask": np.bool_, "logprobs": np.float32, "versions": np.int32}


class RecordError(ValueError):
    """A sampled token without its id, log-prob or version. The message names rollout, position and reason."""


@dataclass
class Segment:
    """One sequence of T tokens: context and sampled tokens in the order in which the engine saw them.

    All arrays have length T. `action_mask[t]` is True exactly where the engine sampled `token_ids[t]`; there,
    `logprobs[t]` is its log-prob under the policy that sampled it (temperature applied) and `versions[t]`
    that policy's version. Elsewhere logprobs is 0 and versions -1, and both are unused. With --record-top-k,
    `top_k[t]` has the K likeliest tokens of that policy: ids (exact in fp32 below 2^24) and log-probs. With
    --router-replay, `routed_experts[t]` has the experts that each layer of the engine chose for token t when
    it first read it; the last token was not read, and has zeros. `images` has the arrays that the model's
    forward takes for each image, in the order of their placeholders in `token_ids`.
    """

    token_ids: np.ndarray  # int32
    action_mask: np.ndarray  # bool
    logprobs: np.ndarray  # float32
    versions: np.ndarray  # int32
    turn_ends: list[int]  # one past the last sampled token of each turn
    finish_reason: str  # of the last turn: "stop", "length" or "abort"
    top_k: np.ndarray | None = None  # float32 [T, K, 2]
    routed_experts: np.ndarray | None = None  # uint8, or int16 for more than 256 experts, [T, layers, K]
    images: list[dict[str, np.ndarray]] = field(default_factory=list)

    def __post_init__(self):
        length = len(self.token_ids)
        optional = {"top_k": np.float32} if self.top_k is not None else {}
        if self.routed_experts is not None:
            optional["routed_experts"] = np.int16 if np.max(self.routed_experts) > 255 else np.uint8
        for name, dtype in (ARRAYS | optional).items():
            array = np.asarray(getattr(self, name), dtype)  # None becomes NaN
            setattr(self, name, array)
            if len(array) != length:
                end = min(len(array), length)
                raise RecordError(f"position {end}: {name} has length {len(array)}, token_ids has {length}")
        kinds = {"pixel_values": np.float32}  # in a file they are lists
        self.images = [{k: np.asarray(v, kinds.get(k)) for k, v in image.items()} for image in self.images]
        if self.turn_ends and self.turn_ends[-1] > length:
            raise RecordError(f"turn ends at {self.turn_ends[-1]}, past the {length} tokens")
        sampled = np.flatnonzero(self.action_mask)
        bad = sampled[~np.isfinite(self.logprobs[sampled]) | (self.logprobs[sampled] > 1e-4)]
        if len(bad):
            value = self.logprobs[bad[0]]
            raise RecordError(f"position {bad[0]}: log-prob {value} is missing or no log-probability")
        unversioned = sampled[self.versions[sampled] < 0]
        if len(unversioned):
            raise RecordError(f"position {unversioned[0]}: sampled token without a policy version")

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())


@dataclass
class Rollout:
    """One episode: its segments in time order, the reward of each turn, and why it is invalid if it is.

    `ticket` counts the prompt groups of the run (0, 1, 2, ...); `group_id` is shared by the rollouts that one
    prompt got. An invalid rollout takes part in no baseline and no loss; it is counted by its reason.
    """

    rollout_id: str
    group_id: str
    ticket: int
    prompt_id: str
    segments: list[Segment]
    rewards: list[float]  # one a turn
    info: dict = field(default_factory=dict)  # numbers become metrics, strings stay with the transcript
    invalid: str | None = None

    def fail(self, reason: str, detail: str) -> None:
        """Makes the rollout invalid. `reason` is a short name that is counted, `detail` goes to info."""
        self.invalid, self.info["error"] = reason, detail

    @property
    def reward(self) -> float:
        """The episode's reward: the sum over its turns."""
        return math.fsum(self.rewards)

    @property
    def num_actions(self) -> int:
        return sum(segment.num_actions for segment in self.segments)

    @property
    def num_sampled(self) -> int:
        return sum(int((segment.versions >= 0).sum()) for segment in self.segments)

    @property
    def turn_tokens(self) -> list[int]:
        """Sampled tokens of each turn."""
        return [int(t.sum()) for s in self.segments for t in np.split(s.versions >= 0, s.turn_ends)[:-1]]

    @property
    def truncated(self) -> bool:
        """Whether a limit ended its last turn."""
        return bool(self.segments) and self.segments[-1].finish_reason == "length"

    def lags(self, version: int) -> np.ndarray:
        """How many versions each sampled token is behind `version`, [num_actions].

        Raises RecordError where a token claims a version that does not exist yet.
        """
        parts = [segment.versions[segment.action_mask] for segment in self.segments]
        versions = np.concatenate([np.zeros(0, np.int32), *parts])
        if (versions > version).any():
            raise RecordError(f"{self.rollout_id}: sampled by version {versions.max()}, newest is {version}")
        return version - versions


def extend_segment(
    segment: Segment | None, context_ids, token_ids, logprobs, versions, finish_reason, top_k=None,
    routes: np.ndarray | None = None, pictures=(),
) -> Segment:  # fmt: skip
    """One more turn: `context_ids` (unsampled), then what the engine sampled after them, the fields of a
    `Completion`. Returns a new Segment. `pictures` are all that it holds then. `routes` are the experts of
    the tokens that the engine read, or of those from some token on; a token keeps those with which it was
    read first.

    Raises RecordError where the engine's three lists do not describe the same tokens, or a log-prob is
    missing (None); ValueError where the routes leave a gap, which is no one rollout's fault.
    """
    gap = len(context_ids)
    turn = {
        "token_ids": [*context_ids, *token_ids],
        "action_mask": [False] * gap + [True] * len(token_ids),
        "logprobs": [0.0] * gap + list(logprobs),
        "versions": [-1] * gap + list(versions),
    }
    if top_k is not None:
        turn["top_k"] = np.concatenate([np.zeros((gap, *top_k.shape[1:])), top_k])
    if segment is not None:
        turn = {name: np.concatenate([getattr(segment, name), values]) for name, values in turn.items()}
    ends = [*(segment.turn_ends if segment else []), len(turn["token_ids"])]
    if routes is not None:
        read = segment.routed_experts[:-1] if segment else routes[:0]
        known = len(read) - (ends[-1] - 1 - len(routes))  # rows that are on record already
        if not 0 <= known <= len(read):
            raise ValueError(f"experts of {len(routes)} tokens, where {len(read)} to {ends[-1] - 2} are new")
        turn["routed_experts"] = np.concatenate([read, routes[known:], np.zeros_like(routes[:1])])
    return Segment(**turn, turn_ends=ends, finish_reason=finish_reason, images=[p.pixels for p in pictures])


def check_reward(value) -> float:
    """A reward as a float. Raises RecordError for anything that is not a finite number (True and False
    are)."""
    if not isinstance(value, (bool, int, float, np.integer, np.floating, np.bool_)):
        raise RecordError(f"reward is a {type(value).__name__}, not a number")
    if not abs(value) <= sys.float_info.max:  # NaN, infinities, and integers that no float can hold
        raise RecordError(f"reward is {value}")
    return float(value)
