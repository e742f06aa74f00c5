"""From rows of tokens to padded micro-batches: bounded by tokens, balanced over ranks, equal in number."""

import numpy as np
import torch

from common.sample import Segment


def segment_row(segment: Segment) -> dict:
    """A segment as a row. What an algorithm adds to it, a number or an array [T], is split along with it."""
    return {name: getattr(segment, name) for name in ("token_ids", "action_mask", "logprobs")}


def micro_batches(rows: list[dict], num_ranks: int, max_tokens: int) -> list[list[dict]]:
    """Splits rows into micro-batches of at most `max_tokens` tokens, padding included, for each rank.

    A row is a dict of arrays of its length T (`token_ids` and `action_mask` among them) and of plain numbers.
    Returns [rank][micro-batch] -> dict of arrays [B, T] (right-padded with zeros) and [B]. Every rank gets
    the same number, since each one is a collective; a rank without work left gets one whose mask is empty. A
    single row longer than `max_tokens` is a micro-batch of its own.
    """
    by_length = sorted(rows, key=lambda row: -len(row["token_ids"]))
    groups: list[list[dict]] = []
    for row in by_length:  # sorted, so the first row of a group is its width
        if groups and len(groups[-1][0]["token_ids"]) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    while len(groups) < num_ranks and max(map(len, groups)) > 1:  # fewer than ranks: halve the fullest
        fullest = max(groups, key=len)
        groups.remove(fullest)
        groups += [fullest[::2], fullest[1::2]]
    ranks: list[list[list[dict]]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    most = -(-len(groups) // num_ranks)
    for group in sorted(groups, key=lambda group: -len(group) * len(group[0]["token_ids"])):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < most), key=load.__getitem__)
        ranks[rank].append(group)
        load[rank] += len(group) * len(group[0]["token_ids"])
    shortest = by_length[-1]
    filler = {**shortest, "action_mask": np.zeros_like(shortest["action_mask"])}
    for rank in ranks:
        rank += [[filler]] * (most - len(rank))
    return [[collate(group) for group in rank] for rank in ranks]


def to_device(batch: dict, device: torch.device) -> dict:
    return {name: torch.tensor(value, device=device) for name, value in batch.items()}


def collate(rows: list[dict]) -> dict:
    """Arrays padded on the right with zeros to the longest row, [B, T]; plain numbers as [B]."""
    width = max(len(row["token_ids"]) for row in rows)
    batch = {}
    for key, first in rows[0].items():
        if isinstance(first, np.ndarray):
            batch[key] = np.stack([np.pad(row[key], (0, width - len(row[key]))) for row in rows])
        else:
            batch[key] = np.asarray([row[key] for row in rows])
    return batch
