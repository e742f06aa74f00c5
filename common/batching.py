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
    rows = sorted(rows, key=lambda row: -len(row["token_ids"]))
    groups: list[list[dict]] = []
    for row in rows:  # sorted, so the first row of a group is its width
        if groups and len(groups[-1][0]["token_ids"]) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    while len(groups) < num_ranks and max(map(len, groups)) > 1:  # fewer than ranks: halve the fullest
        fullest = max(groups, key=len)
        groups.remove(fullest)
        groups += [fullest[::2], fullest[1::2]]
    groups.sort(key=lambda group: -len(group) * len(group[0]["token_ids"]))
    filler = {**rows[-1], "action_mask": np.zeros_like(rows[-1]["action_mask"])}
    groups += [[filler]] * (-len(groups) % num_ranks)
    # dealt forth and back, so that each rank has large ones and small ones, and as large as the others have
    rounds = [groups[start : start + num_ranks] for start in range(0, len(groups), num_ranks)]
    dealt = [each if number % 2 == 0 else each[::-1] for number, each in enumerate(rounds)]
    return [[collate(group) for group in rank] for rank in zip(*dealt)]


def to_device(batch: dict, device: torch.device) -> dict:
    return {name: torch.tensor(value, device=device) for name, value in batch.items()}


def collate(rows: list[dict]) -> dict:
    """Arrays padded on the right with zeros to the longest row, [B, T]; plain numbers as [B]."""
    width = max(len(row["token_ids"]) for row in rows)
    batch = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        if isinstance(values[0], np.ndarray):
            values = [np.pad(v, [(0, width - len(v))] + [(0, 0)] * (v.ndim - 1)) for v in values]
        batch[key] = np.array(values)
    return batch
