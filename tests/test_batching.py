"""Micro-batches: every row once, no more tokens than allowed, as many batches on each rank."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from algos.grpo import Args, make_minibatches
from common.batching import collate, micro_batches
from common.parallel import ParallelFlags


def row(name: int, length: int, masked: bool = False) -> dict:
    """A row that is told by its ids (all `name`) and its advantage; the mask is all but the first token."""
    mask = np.ones(length, bool) & (np.arange(length) > 0) & (not masked)
    return {"token_ids": np.full(length, name, np.int32), "action_mask": mask,
            "logprobs": np.full(length, -name, np.float32), "advantage": float(name)}  # fmt: skip


def flags_for(num_ranks: int, max_tokens: int, **more) -> ParallelFlags:
    return ParallelFlags(num_trainers=num_ranks, micro_batch_tokens=max_tokens, **more)


def lengths_of(batch: dict) -> list[int]:
    return (batch["token_ids"] != 0).sum(1).tolist()  # names start at 1, padding is 0


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 5), max_tokens=st.integers(1, 200))
def test_micro_batches_cut_the_rows_exactly(lengths, num_ranks, max_tokens):
    rows = [row(name, length) for name, length in enumerate(lengths, 1)]
    ranks = micro_batches(rows, flags_for(num_ranks, max_tokens))
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1 and ranks[0], "each micro-batch is a collective"
    seen = {}
    for batch in (batch for rank in ranks for batch in rank):
        size, width = batch["token_ids"].shape
        assert {key: value.shape for key, value in batch.items()} == {
            **dict.fromkeys(("token_ids", "action_mask", "logprobs"), (size, width)),
            **dict.fromkeys(("advantage", "lengths"), (size,)),
        }  # fmt: skip
        assert size * width <= max_tokens or size == 1
        assert width == max(lengths_of(batch)), "no wider than its longest row"
        filler = not batch["action_mask"].any()  # or rows of one token
        assert batch["lengths"].tolist() == ([1] * size if filler else lengths_of(batch))
        for index, length in enumerate(lengths_of(batch)):
            ids, mask = batch["token_ids"][index], batch["action_mask"][index]
            name = int(batch["advantage"][index])
            assert (ids[:length] == name).all() and not ids[length:].any()
            assert not batch["logprobs"][index, length:].any() and not mask[length:].any()
            if mask.any() or lengths[name - 1] == 1:
                seen[name] = seen.get(name, 0) + int(mask.sum())
                assert length == lengths[name - 1] and (batch["logprobs"][index, :length] == -name).all()
    assert seen == {name: length - 1 for name, length in enumerate(lengths, 1)}, "each action token once"


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 5), max_tokens=st.integers(1, 200), tp=st.integers(1, 3))
def test_packed_micro_batches_hold_each_row_once_and_are_bounded_by_real_tokens(
    lengths, num_ranks, max_tokens, tp
):
    rows = [row(name, length) for name, length in enumerate(lengths, 1)]
    flags = flags_for(num_ranks * tp, max_tokens, trainer_tp=tp, packing="on")
    shares = micro_batches(rows, flags)
    assert len(shares) == num_ranks * tp and len({len(share) for share in shares}) == 1
    for rank, share in enumerate(shares):
        for batch, of_first in zip(share, shares[rank - rank % tp], strict=True):
            assert (batch["token_ids"] == of_first["token_ids"]).all(), "ranks of one model train the same"
    batches = [batch for share in shares[::tp] for batch in share]
    assert all(batch["lengths"].sum() <= max_tokens or len(batch["lengths"]) == 1 for batch in batches)
    assert {int(name) for batch in batches for name in batch["advantage"]} == set(range(1, len(lengths) + 1))
    trained = sorted(int(n) for b in batches for n, m in zip(b["advantage"], b["action_mask"]) if m.any())
    assert trained == [name for name, length in enumerate(lengths, 1) if length > 1], "each action token once"


def test_packed_ranks_have_about_as_much_to_do():
    # lognormal lengths, CV 1: 256 rows on 4 ranks
    lengths = np.random.default_rng(0).lognormal(5.5, 0.83, 256).astype(int) + 2
    shares = micro_batches([row(1, length) for length in lengths], flags_for(4, 8192, packing="on"))
    tokens = [[int(batch["lengths"].sum()) for batch in share] for share in shares]
    assert len({len(each) for each in tokens}) == 1 and sum(map(sum, tokens)) == sum(lengths)
    for at_once in zip(*tokens):  # what the ranks do side by side
        assert max(at_once) <= 1.05 * min(at_once)


def test_a_rank_without_work_takes_part_with_an_empty_mask():
    ranks = micro_batches([row(1, 5)], flags_for(3, 100))
    assert [len(rank) for rank in ranks] == [1, 1, 1]
    assert sorted(int(rank[0]["action_mask"].sum()) for rank in ranks) == [0, 0, 4]
    assert all(rank[0]["token_ids"].shape == (1, 5) for rank in ranks), "its shapes are those of real work"


def test_a_row_longer_than_the_bound_is_a_batch_of_its_own():
    ranks = micro_batches([row(1, 50), row(2, 3), row(3, 4)], flags_for(1, 10))
    assert [batch["token_ids"].shape for batch in ranks[0]] == [(1, 50), (2, 4)]


def test_few_rows_are_spread_over_all_ranks_before_any_gets_a_filler():
    ranks = micro_batches([row(name, 5) for name in range(1, 5)], flags_for(4, 1000))
    assert [lengths_of(rank[0]) for rank in ranks] == [[5]] * 4


def test_work_is_balanced_by_tokens():
    # four batches of 40, 30, 20 and 10 tokens on two ranks: 40 + 10 and 30 + 20
    ranks = micro_batches([row(1, 40), row(2, 30), row(3, 20), row(4, 10)], flags_for(2, 10))
    assert sorted(sum(batch["token_ids"].size for batch in rank) for rank in ranks) == [50, 50]


def test_a_mask_that_is_empty_for_all_rows_is_kept_so():
    ranks = micro_batches([row(1, 5, masked=True), row(2, 3, masked=True)], flags_for(2, 5))
    assert not any(batch["action_mask"].any() for rank in ranks for batch in rank)


def test_the_rows_themselves_are_left_alone():
    rows = [row(1, 5), row(2, 3)]
    micro_batches(rows, flags_for(3, 100))
    assert [int(r["action_mask"].sum()) for r in rows] == [4, 2]
    assert [r["advantage"] for r in rows] == [1.0, 2.0]


def test_padding_is_zeros_on_the_right():
    batch = collate([row(3, 4), row(2, 2)])
    assert batch["token_ids"].tolist() == [[3, 3, 3, 3], [2, 2, 0, 0]]
    assert batch["action_mask"].astype(int).tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    assert batch["advantage"].tolist() == [3.0, 2.0]


def args_for(num_trainers: int, minibatches: int, micro_batch_tokens: int = 100) -> Args:
    args = Args(minibatches=minibatches)
    args.parallel.num_trainers, args.parallel.micro_batch_tokens = num_trainers, micro_batch_tokens
    return args


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(2, 20), min_size=1, max_size=3), min_size=4, max_size=12),
    num_ranks=st.integers(1, 3),
    minibatches=st.sampled_from([1, 2, 4]),
)
def test_minibatches_keep_a_rollout_whole_and_know_their_tokens(lengths, num_ranks, minibatches):
    rollouts = [[row(name, length) for length in segments] for name, segments in enumerate(lengths, 1)]
    shares, nums_rollouts = zip(*make_minibatches(rollouts, args_for(num_ranks, minibatches), step=3))
    assert nums_rollouts == (len(rollouts),) * num_ranks
    assert len({len(share) for share in shares}) == 1, "each minibatch is an optimizer step of all ranks"
    owners, total = {}, 0
    for number in range(len(shares[0])):
        assert len({share[number][1] for share in shares}) == 1, "one denominator for all ranks"
        tokens = 0
        for batch in (batch for share in shares for batch in share[number][0]):
            tokens += int(batch["action_mask"].sum())
            assert (batch["rollout_index"] == batch["advantage"] - 1).all(), "a row knows its rollout"
            for name, mask in zip(batch["advantage"], batch["action_mask"]):
                if mask.any():
                    owners.setdefault(int(name), set()).add(number)
        assert shares[0][number][1] == tokens
        total += tokens
    assert total == sum(length - 1 for segments in lengths for length in segments)
    assert all(len(numbers) == 1 for numbers in owners.values()), "a rollout is in one minibatch"
    assert set(owners) == set(range(1, len(lengths) + 1))


def test_fewer_valid_rollouts_than_minibatches_make_fewer_optimizer_steps():
    # --late drop can leave a single rollout of a step
    shares = [share for share, _ in make_minibatches([[row(1, 5)]], args_for(2, 4), step=0)]
    assert [len(share) for share in shares] == [1, 1]
    tokens = sum(int(batch["action_mask"].sum()) for share in shares for batch in share[0][0])
    assert tokens == 4 and [share[0][1] for share in shares] == [4, 4]


def test_minibatches_are_shuffled_by_seed_and_step():
    rollouts = [[row(name, 3)] for name in range(1, 17)]

    def first_minibatch(step: int) -> list[int]:
        ((share, _),) = make_minibatches(rollouts, args_for(1, 4), step)
        return sorted(int(name) for batch in share[0][0] for name in batch["advantage"])

    assert first_minibatch(0) == first_minibatch(0) != first_minibatch(1)


def test_with_images_rows_without_them_stay_within_the_bound_beside_the_one_that_they_borrow():
    image = [{"pixel_values": np.zeros((1, 2), np.float32)}]
    rows = [row(name, 1_000) | {"images": image} for name in range(1, 9)]
    rows += [row(name, 100) | {"images": []} for name in range(9, 129)]
    (share,) = micro_batches(rows, flags_for(1, 8_192, packing="off"))
    assert max(batch["token_ids"].size for batch in share) <= 8_192
    assert all(len(batch["images"]["pixel_values"]) > 0 for batch in share)
    named = [
        int(ids[0])
        for batch in share
        for ids, mask in zip(batch["token_ids"], batch["action_mask"])
        if mask.any()
    ]
    assert sorted(named) == list(range(1, 129))
