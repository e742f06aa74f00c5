"""From rows of tokens to micro-batches: bounded by tokens, balanced over ranks, equal in number."""

import heapq

import numpy as np
import torch

from common.parallel import ParallelFlags
from common.sample import Segment


def segment_row(segment: Segment) -> dict:
    """A segment as a row, and whether a refit came between its tokens. What an algorithm adds to it, a number
    or an array [T], is split along with it."""
    routes = [] if segment.routed_experts is None else ["routed_experts"]
    crossed = len(np.unique(segment.versions[segment.action_mask])) > 1
    names = ["token_ids", "action_mask", "logprobs", "images", *routes]
    return {name: getattr(segment, name) for name in names} | {"crossed": crossed}


def micro_batches(rows: list[dict], flags: ParallelFlags) -> list[list[dict]]:
    """Splits rows into micro-batches of at most `flags.micro_batch_tokens` tokens for each trainer rank,
    padding included unless rows are packed.

    A row is a dict of arrays of its length T (`token_ids` and `action_mask` among them) and of plain numbers.
    Returns [rank][micro-batch] -> dict of arrays [B, T] (right-padded with zeros) and [B]. Every rank gets
    the same number, since each one is a collective; a rank without work left gets one whose mask is empty. A
    single row longer than the bound is a micro-batch of its own. Ranks that share a model get the same. If
    one row has `images`, each micro-batch does (for that, one with an empty mask), as its tower's layers are
    collectives too.
    """
    num_ranks, limit = flags.data_ranks, flags.micro_batch_tokens
    rows = sorted(rows, key=lambda row: -len(row["token_ids"]))
    split = balanced_groups if flags.packing == "on" else padded_groups
    groups = split(rows, num_ranks, limit)
    groups.sort(key=lambda group: -sum(len(row["token_ids"]) for row in group))
    short_row = ([row for row in rows if row.get("images")] or rows)[-1]
    filler = {**short_row, "action_mask": np.zeros_like(short_row["action_mask"])}
    if filler.get("images"):
        blind = [group for group in groups if not any(row["images"] for row in group)]
        groups = [group for group in groups if any(row["images"] for row in group)]
        for group in blind:  # with the filler, whose length may be the longest, within the bound too
            size = max(1, limit // max(len(each["token_ids"]) for each in (group[0], filler)) - 1)
            groups += [[*group[at : at + size], filler] for at in range(0, len(group), size)]
    short = {} if flags.packing == "on" else {"lengths": np.array([1])}  # else it would load experts
    groups += [[filler]] * (-len(groups) % num_ranks)
    # dealt forth and back, so that each rank has large ones and small ones, and as large as the others have
    rounds = [groups[start : start + num_ranks] for start in range(0, len(groups), num_ranks)]
    dealt = [each if number % 2 == 0 else each[::-1] for number, each in enumerate(rounds)]
    shares = [[collate(group) | (short if group[0] is filler else {}) for group in r] for r in zip(*dealt)]
    return [share for share in shares for _ in range(flags.trainer_tp)]


def padded_groups(rows: list[dict], num_ranks: int, limit: int) -> list[list[dict]]:
    """Rows of similar lengths together, of which the first is the longest."""
    groups: list[list[dict]] = []
    for row in rows:
        if groups and len(groups[-1][0]["token_ids"]) * (len(groups[-1]) + 1) <= limit:
            groups[-1].append(row)
        else:
            groups.append([row])
    while len(groups) < num_ranks and max(map(len, groups)) > 1:  # fewer than ranks: halve the fullest
        fullest = max(groups, key=len)
        groups.remove(fullest)
        groups += [fullest[::2], fullest[1::2]]
    return groups


def balanced_groups(rows: list[dict], num_ranks: int, limit: int) -> list[list[dict]]:
    """As few groups as the limit allows, a multiple of the ranks, with about as many tokens each: every row,
    from the longest on, goes to the group that has the fewest."""
    tokens = sum(len(row["token_ids"]) for row in rows)
    count = num_ranks * max(1, -(-tokens // (num_ranks * limit)))
    while True:
        heap = [(0, index, []) for index in range(count)]
        for row in rows:
            size, index, group = heapq.heappop(heap)
            heapq.heappush(heap, (size + len(row["token_ids"]), index, [*group, row]))
        if all(size <= limit or len(group) == 1 for size, _, group in heap):
            return [group for _, _, group in heap if group]
        count += num_ranks


def to_device(batch: dict, device: torch.device) -> dict:
    """As tensors. The lengths stay on the CPU: what is packed where is decided there."""
    images = {"images": to_device(batch["images"], device)} if "images" in batch else {}
    rest = {k: v for k, v in batch.items() if k != "images"}
    return {k: torch.tensor(v, device="cpu" if k == "lengths" else device) for k, v in rest.items()} | images


def collate(rows: list[dict]) -> dict:
    """Arrays padded on the right with zeros to the longest row, [B, T]; plain numbers as [B]. `lengths` [B]
    are those without the padding. `images` are the arrays of all images by name, end to end in the order of
    the rows. Raises ValueError where rows have different keys."""
    if any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError("some rows have routes and others none: was --router-replay changed with --resume?")
    batch = {"lengths": np.array([len(row["token_ids"]) for row in rows])}
    width = batch["lengths"].max()
    for key in rows[0]:
        values = [row[key] for row in rows]
        if isinstance(values[0], np.ndarray):
            values = [np.pad(v, [(0, width - len(v))] + [(0, 0)] * (v.ndim - 1)) for v in values]
        batch[key] = end_to_end(sum(values, [])) if key == "images" else np.array(values)
    return batch


def end_to_end(images: list[dict]) -> dict:
    return {name: np.concatenate([image[name] for image in images]) for name in (images or [{}])[0]}
