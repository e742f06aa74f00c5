"""Refit without vLLM: names, fused and tied layouts, coverage, checksums, the wire, what a failure leaves."""

import asyncio
import math
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import common.refit
from algos.grpo import RolloutWorker
from common.refit import (
    ALIGNMENT,
    Copy,
    Entry,
    RefitError,
    WeightSender,
    Wire,
    check_coverage,
    checkpoint_tensors,
    checksum,
    choose_transport,
    compare_probe,
    connect_store,
    copies_of,
    hash_words,
    lay_out,
    learn_plan,
    open_store,
    place,
)

ATTENTION, EXPERTS = "model.layers.0.self_attn.", "model.layers.0.mlp.experts."
FUSED = {"q_proj": ("qkv", 0, 4), "k_proj": ("qkv", 4, 2), "v_proj": ("qkv", 6, 2)}  # where, row, rows


class ToyEngine(torch.nn.Module):
    """Parameters laid out as in vLLM: fused qkv, stacked w13, a vocabulary padded from 3 to 4 rows.

    `head`: "shared" (one tensor), "copied" (two tensors that the loader fills from the embedding) or "own".
    `forget`: a checkpoint name that the loader silently skips.
    """

    def __init__(self, head: str = "shared", forget: str = ""):
        super().__init__()
        self.head, self.forget = head, forget
        self.qkv = torch.nn.Parameter(torch.zeros(8, 1))
        self.w13, self.w2 = torch.nn.Parameter(torch.zeros(2, 4, 1)), torch.nn.Parameter(torch.zeros(2, 1, 2))
        self.embed = torch.nn.Parameter(torch.zeros(4, 1))
        self.lm_head = self.embed if head == "shared" else torch.nn.Parameter(torch.zeros(4, 1))
        self.mtp = torch.nn.ParameterDict({"lm_head": torch.nn.Parameter(torch.zeros(2, 1))})

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            if name == self.forget:
                continue
            place = name.removeprefix(ATTENTION).removesuffix(".weight")
            if place in FUSED:
                parameter, row, rows = FUSED[place]
                getattr(self, parameter).data.narrow(0, row, rows).copy_(weight)
            elif name.startswith(EXPERTS):
                expert, kind, _ = name.removeprefix(EXPERTS).split(".")
                w13, w2 = self.w13.data[int(expert)], self.w2.data[int(expert)]
                {"gate_proj": w13[:2], "up_proj": w13[2:], "down_proj": w2}[kind].copy_(weight)
            elif name == "model.embed_tokens.weight":
                self.embed.data[: len(weight)].copy_(weight)
                if self.head == "copied":
                    self.lm_head.data[: len(weight)].copy_(weight)
            elif name == "lm_head.weight" and self.head == "own":
                self.lm_head.data[: len(weight)].copy_(weight)
            elif name == "mtp.lm_head.weight":
                self.mtp["lm_head"].data.copy_(weight)
            else:
                raise KeyError(name)

    def padding(self) -> dict[str, int]:
        return {"embed": 3} if self.head == "shared" else {"embed": 3, "lm_head": 3}


def column(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def trainer_weights(shift: float = 0.0, own_head: bool = False) -> list[tuple[str, torch.Tensor]]:
    """The trainer's parameters as Hugging Face names and stacks them."""
    weights = {
        ATTENTION + "q_proj.weight": column(1, 2, 3, 4),
        ATTENTION + "k_proj.weight": column(5, 6),
        ATTENTION + "v_proj.weight": column(7, 8),
        EXPERTS + "gate_up_proj": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.float32)[..., None],
        EXPERTS + "down_proj": torch.tensor([[[10, 11]], [[12, 13]]], dtype=torch.float32),
        "model.embed_tokens.weight": column(20, 21, 22),
        "mtp.lm_head.weight": column(30, 31),
    }
    if own_head:
        weights["lm_head.weight"] = column(40, 41, 42)
    return [(name, tensor + shift) for name, tensor in weights.items()]


def sent(shift: float = 0.0, own_head: bool = False) -> list[tuple[str, torch.Tensor]]:
    return list(checkpoint_tensors(trainer_weights(shift, own_head)))


def learned(engine: ToyEngine, tensors=None):
    """The engine's plan after one load, coverage checked."""
    plan = learn_plan(engine.load_weights, tensors or sent(own_head=engine.head == "own"))
    check_coverage(plan, dict(engine.named_parameters()), engine.padding())
    return plan


def packed(tensors) -> tuple[list[Entry], torch.Tensor]:
    """The tensors in one bucket."""
    (entries,) = lay_out(tensors, 1 << 20)
    bucket = torch.zeros(entries[-1].end, dtype=torch.uint8)
    for entry, (_, tensor) in zip(entries, tensors, strict=True):
        entry.view(bucket).copy_(tensor)
    return entries, bucket


def refit(plan, tensors) -> bool:
    """Places the tensors by the plan. Whether the engine then holds the bits that were sent, as the worker
    finds it."""
    entries, bucket = packed(tensors)
    before = checksum(bucket)
    differ = place(*copies_of(plan, entries, bucket))
    return checksum(bucket) == before and not any(differ)


# --- Names and layouts


def test_stacked_experts_are_sent_one_by_one_gate_rows_first():
    tensors = dict(sent())
    for expert, (gate, up, down) in enumerate([([1, 2], [3, 4], [10, 11]), ([5, 6], [7, 8], [12, 13])]):
        assert tensors[f"{EXPERTS}{expert}.gate_proj.weight"].flatten().tolist() == gate
        assert tensors[f"{EXPERTS}{expert}.up_proj.weight"].flatten().tolist() == up
        assert tensors[f"{EXPERTS}{expert}.down_proj.weight"].flatten().tolist() == down
    assert len(tensors) == 5 + 6 and "mtp.lm_head.weight" in tensors, "a nested head is a weight too"


@pytest.mark.parametrize("head", ["shared", "copied", "own"])
def test_the_plan_copies_what_the_loader_would_have_loaded(head):
    engine, reference = ToyEngine(head), ToyEngine(head)
    plan = learned(engine)
    assert engine.qkv.flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert engine.w13.flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    for shift in (0.5, 100.0):  # twice: the places are still those of the parameters
        tensors = sent(shift, own_head=head == "own")
        assert refit(plan, tensors)
        reference.load_weights(tensors)
        for (name, parameter), expected in zip(engine.named_parameters(), reference.parameters()):
            assert torch.equal(parameter, expected), name


def test_the_plan_finds_parts_of_a_tensor_wherever_it_lies_in_a_bucket():
    # the checkpoint's tensor is fused as [v, k, q] and cut up by the loader; it is a view into a bucket
    first, second = torch.arange(20.0), torch.arange(20.0) + 50
    engine = torch.nn.ParameterDict({"qkv": torch.nn.Parameter(torch.zeros(8, 1))})

    def load_weights(weights) -> None:
        for _, fused in weights:
            for row, rows, start in ((0, 4, 4), (4, 2, 2), (6, 2, 0)):
                engine["qkv"].data.narrow(0, row, rows).copy_(fused[start : start + rows])

    plan = learn_plan(load_weights, [("vkq", first[4:12, None])])
    check_coverage(plan, {"qkv": engine["qkv"]}, {})
    assert engine["qkv"].flatten().tolist() == [8, 9, 10, 11, 6, 7, 4, 5]
    fused = second[9:17, None]
    assert refit(plan, [("before", torch.ones(3)), ("vkq", fused)][1:])
    assert engine["qkv"].flatten().tolist() == [63, 64, 65, 66, 61, 62, 59, 60]


def test_a_tied_head_ends_as_the_embedding_whether_the_engine_shares_or_copies_it():
    for head in ("shared", "copied"):
        engine = ToyEngine(head)
        assert refit(learned(engine), sent(7.0))
        expected = checksum(dict(trainer_weights(7.0))["model.embed_tokens.weight"])
        assert checksum(engine.embed[:3]) == checksum(engine.lm_head[:3]) == expected


@pytest.mark.parametrize("lost", ["embed", "lm_head"])
def test_a_weight_that_does_not_stay_where_it_was_put_is_seen(lost):
    # another name goes to the same rows afterwards: of the tensor itself, or of its second place
    engine = ToyEngine("copied")
    plan = learned(engine)
    intruder = Copy(getattr(engine, lost).data[1:2], (1, 1), (1, 1), 0)
    assert refit(plan, sent(3.0))
    assert not refit(plan | {"intruder": [intruder]}, [*sent(3.0), ("intruder", column(99))])


def test_what_other_ranks_of_an_engine_hold_stays_as_it_was_sent():
    # this rank has rows 2 and 3 of 4 (row-parallel) and columns 0 of 2 (column-parallel)
    rows, columns = torch.zeros(2, 2), torch.zeros(4, 1)
    full = torch.arange(8.0).view(4, 2)
    plan = {"rows": [Copy(rows, (2, 2), (2, 1), 4)], "columns": [Copy(columns, (4, 1), (2, 1), 0)]}
    assert refit(plan, [("rows", full), ("columns", full)])
    assert rows.tolist() == [[4, 5], [6, 7]] and columns.flatten().tolist() == [0, 2, 4, 6]


def test_the_wrong_layout_of_stacked_experts_changes_the_bits():
    engine = ToyEngine()
    learned(engine)
    before = checksum(engine.w13)
    gate_up = dict(trainer_weights())[EXPERTS + "gate_up_proj"]
    halves, alternating = (gate_up[:, :2], gate_up[:, 2:], True), (gate_up[:, 0::2], gate_up[:, 1::2], False)
    for first, second, same in (halves, alternating):
        for expert in (0, 1):
            engine.load_weights([(f"{EXPERTS}{expert}.gate_proj.weight", first[expert]),
                                 (f"{EXPERTS}{expert}.up_proj.weight", second[expert])])  # fmt: skip
        assert (checksum(engine.w13) == before) == same


def test_swapped_and_permuted_weights_change_the_bits():
    engine = ToyEngine()
    learned(engine)
    before = checksum(engine.qkv)
    engine.load_weights([(ATTENTION + "k_proj.weight", column(7, 8))])
    engine.load_weights([(ATTENTION + "v_proj.weight", column(5, 6))])
    assert checksum(engine.qkv) != before


# --- Coverage


def test_an_engine_parameter_that_nothing_was_written_to_is_named():
    engine = ToyEngine()
    short = [(name, tensor) for name, tensor in sent() if "k_proj" not in name and not name.startswith("mtp")]
    with pytest.raises(RefitError, match=r"qkv \(2 of 8 .*mtp.lm_head \(2 of 2") as caught:
        learned(engine, short)
    assert "w13" not in str(caught.value) and "embed" not in str(caught.value)


def test_an_untied_head_that_gets_only_the_embedding_is_named():
    with pytest.raises(RefitError, match="lm_head"):
        learned(ToyEngine("own"), sent())


def test_a_sent_name_that_the_engine_does_not_use_is_named():
    with pytest.raises(RefitError, match=f"no place for {ATTENTION}q_proj.weight"):
        learned(ToyEngine(forget=ATTENTION + "q_proj.weight"))
    with pytest.raises(KeyError, match="model.norm.weight"):
        learned(ToyEngine(), [*sent(), ("model.norm.weight", column(1))])


def test_of_experts_that_are_spread_over_workers_one_may_have_no_place_here_but_nothing_else():
    engine, elsewhere = ToyEngine(), "model.layers.0.mlp.experts.3.up_proj.weight"
    plan = learn_plan(engine.load_weights, sent()) | {elsewhere: []}
    parameters = dict(engine.named_parameters()), engine.padding()
    with pytest.raises(RefitError, match=f"no place for {elsewhere}"):
        check_coverage(plan, *parameters)
    check_coverage(plan, *parameters, ep=True)
    with pytest.raises(RefitError, match="no place for model.norm.weight"):
        check_coverage(plan | {"model.norm.weight": []}, *parameters, ep=True)


def test_a_parameter_that_two_names_write_to_is_named():
    engine = ToyEngine()

    def load_weights(weights) -> None:
        engine.load_weights([(name.removeprefix("old."), weight) for name, weight in weights])

    plan = learn_plan(load_weights, [*sent(), (f"old.{ATTENTION}k_proj.weight", column(5, 6))])
    with pytest.raises(RefitError, match="qkv") as caught:
        check_coverage(plan, dict(engine.named_parameters()), engine.padding())
    assert "w13" not in str(caught.value)


def test_only_padding_rows_may_stay_unwritten():
    engine = ToyEngine()
    plan = learn_plan(engine.load_weights, sent())
    with pytest.raises(RefitError, match=r"embed \(1 of 4"):
        check_coverage(plan, dict(engine.named_parameters()), {})
    check_coverage(plan, dict(engine.named_parameters()), {"embed": 3})


# --- Checksums


def test_a_checksum_is_over_the_bits_that_are_sent():
    # bf16 has 7 fraction bits: 1 + 1/256 is half way and rounds to even 1, 1 + 3/256 to 1 + 2/128
    masters = torch.tensor([1.00390625, 1.01171875])
    cast = masters.to(torch.bfloat16)
    assert cast.tolist() == [1.0, 1.015625]
    assert checksum(cast) == checksum(torch.tensor([1.0, 1.015625], dtype=torch.bfloat16))
    assert checksum(masters) != checksum(cast) != checksum(cast.float())
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0])), "bits, not values"


def test_a_checksum_does_not_depend_on_memory_layout():
    tensor = torch.arange(12.0).reshape(3, 4)
    assert checksum(tensor.T.contiguous().T) == checksum(tensor) == checksum(torch.stack(list(tensor)))
    assert checksum(tensor.T) != checksum(tensor)
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(0))


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(width=16, allow_nan=False), min_size=1, max_size=40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    chunk=st.sampled_from([1, 3, 8, 1 << 20]),
    pick=st.tuples(st.integers(0, 39), st.integers(0, 39)),
    new=st.floats(width=16, allow_nan=False),
)
def test_any_change_or_swap_of_elements_changes_the_checksum(values, dtype, chunk, pick, new):
    tensor = torch.tensor(values, dtype=dtype)
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}[dtype]
    i, j = (index % len(values) for index in pick)
    changed, swapped = tensor.clone(), tensor.clone()
    changed[i] = new
    swapped[[i, j]] = tensor[[j, i]]
    size, common.refit.CHUNK = common.refit.CHUNK, chunk
    try:
        before = checksum(tensor)
        assert checksum(tensor.clone()) == before
        for other in (changed, swapped):
            assert (checksum(other) == before) == torch.equal(other.view(bits), tensor.view(bits))
    finally:
        common.refit.CHUNK = size


# --- The packed stream


@given(
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=12),
    bucket_bytes=st.sampled_from([64, 128, 300, 1 << 20]),
    half=st.booleans(),
)
def test_packing_keeps_every_tensor_apart_aligned_and_whole(shapes, bucket_bytes, half):
    dtype = torch.bfloat16 if half else torch.float32
    tensors = [(f"t{i}", torch.full(shape, float(i), dtype=dtype)) for i, shape in enumerate(shapes)]
    layout = lay_out(tensors, bucket_bytes)
    assert [entry.name for members in layout for entry in members] == [name for name, _ in tensors]
    sizes = [members[-1].end for members in layout]
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    placed = [(entry, bucket) for members, bucket in zip(layout, buckets) for entry in members]
    for (entry, bucket), (_, tensor) in zip(placed, tensors, strict=True):
        assert entry.offset % ALIGNMENT == 0
        entry.view(bucket).copy_(tensor)
    for (entry, bucket), (_, tensor) in zip(placed, tensors):  # all are written: none overwrote another
        assert torch.equal(entry.view(bucket), tensor)
    assert all(size <= bucket_bytes or len(members) == 1 for size, members in zip(sizes, layout))


# --- The wire


class ToyTrainer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, tensor in trainer_weights():
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(tensor))

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace("/", "."), parameter


class Receiver:
    """An engine worker's side of the wire: (header, checksums, tensors by name) of each pass."""

    def __init__(self, wire: Wire):
        self.wire, self.passes = wire, []

    def refit(self) -> None:
        header = self.wire.share()
        if header["buckets"]:  # the gate: two passes
            self.members = [[Entry(**entry) for entry in members] for members in header["buckets"]]
            self.sizes = [members[-1].end for members in self.members]
            self.wire.map(self.sizes)
        for _ in range(2 if header["buckets"] else 1):
            tensors, hashes = {}, []
            for index, bucket in self.wire.receive(self.sizes):
                hashes.append(int(hash_words(bucket.view(torch.int32))))
                tensors |= {entry.name: entry.view(bucket).clone() for entry in self.members[index]}
            sent_hashes = self.wire.share()["checksums"]
            assert sent_hashes == hashes
            self.passes.append((header, hashes, tensors))


def transfers(model, dtype, between, num_engines: int = 2):
    """Sends once before and once after each function of `between`: the reports, and what the engines got."""
    store = open_store("127.0.0.1", 20)
    got: list[list] = [[] for _ in range(num_engines)]

    def engine(index: int) -> None:
        engine_store = connect_store("127.0.0.1", store.port, 20)
        receiver = Receiver(Wire(engine_store, 1 + index, 1, num_engines, torch.device("cpu"), 20))
        for _ in range(len(between) + 1):
            receiver.refit()
        got[index] += receiver.passes

    threads = [threading.Thread(target=engine, args=(index,)) for index in range(num_engines)]
    for thread in threads:
        thread.start()
    sender = WeightSender(model, 0, str(dtype).removeprefix("torch."), 20)
    sender.join(store, 1, num_engines)
    reports = [sender.send(0)]
    for version, change in enumerate(between, 1):
        change()
        reports.append(sender.send(version))
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return reports, got


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_every_engine_gets_the_cast_weights_with_their_checksums(bucket_bytes, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setitem(common.refit.BUCKET_BYTES, "gloo", bucket_bytes)
    model = ToyTrainer()
    reports, got = transfers(model, torch.bfloat16, [lambda: None])
    expected = [(name, tensor.bfloat16()) for name, tensor in sent()]
    for engine in got:
        for version, (header, _, tensors) in zip((0, 0, 1), engine, strict=True):
            assert header["version"] == version
            assert list(tensors) == [name for name, _ in expected]
            assert all(torch.equal(tensors[name], tensor) for name, tensor in expected)
    assert reports[0]["bytes"] == 64 * len(expected)


def test_the_payload_changes_with_a_step_and_only_with_a_step(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    model = ToyTrainer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(gradient: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()

    key, value = (dict(model.named_parameters())[f"{ATTENTION}{kind}_proj.weight"] for kind in "kv")

    def swap() -> None:
        key.data, value.data = value.data, key.data

    between = [lambda: step(0.0), lambda: step(0.5), swap, lambda: None]
    reports, got = transfers(model, torch.float32, between, num_engines=1)
    assert [report["changed"] for report in reports[1:]] == [False, True, True, False]
    sums = [hashes for _, hashes, _ in got[0]]
    assert sums[0] == sums[1] == sums[2] != sums[3] != sums[4] == sums[5]


class QuietWire:
    """A wire without a peer, which breaks if it is told to: after the header, before the weights."""

    transport, member = "gloo", True

    def __init__(self, broken: bool = False):
        self.broken = broken

    def allocate(self, sizes):
        self.bucket = torch.empty(max(sizes), dtype=torch.uint8)

    def send(self, sizes, pack):
        if self.broken:
            raise RuntimeError("connection closed by peer")
        for index, size in enumerate(sizes):
            pack(index, self.bucket[:size])

    def share(self, value):
        return value

    def finish(self):
        pass


def test_a_transfer_that_breaks_raises_and_is_not_remembered_as_sent():
    model = ToyTrainer()
    sender = WeightSender(model, 0, "float32", 1)
    sender.wire = wire = QuietWire()
    sender.send(0)
    next(iter(model.parameters())).data += 1
    wire.broken = True
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        sender.send(1)
    wire.broken = False
    assert sender.send(1)["changed"], "what did not arrive is still a change"
    assert not sender.send(2)["changed"]


def two_wires(timeout_s: float) -> list[Wire]:
    """Both ends, in this process."""
    store, ends = open_store("127.0.0.1", 20), {}

    def join(rank: int) -> None:
        end = connect_store("127.0.0.1", store.port, 20)
        ends[rank] = Wire(end, rank, 1, 1, torch.device("cpu"), timeout_s)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [ends[0], ends[1]]


def test_a_peer_that_never_comes_or_stops_in_the_middle_is_an_error_within_the_deadline(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = open_store("127.0.0.1", 2)
    start = time.monotonic()
    with pytest.raises(Exception, match="(?i)time"):
        Wire(store, 0, 1, 1, torch.device("cpu"), 2)
    sizes = [64, 64, 64]
    with pytest.raises(RuntimeError):  # the engine takes nothing: the sender may not wait for ever
        sender, _ = two_wires(timeout_s=2)
        sender.allocate(sizes)
        sender.send(sizes, lambda index, bucket: None)
        sender.share({})
    with pytest.raises(RuntimeError):  # and the engine waits for a bucket that never comes
        _, receiver = two_wires(timeout_s=2)
        receiver.allocate(sizes)
        next(receiver.receive(sizes))
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("trainers, workers, transport", [
    (["cpu"], ["cpu"], "gloo"),
    (["GPU-1"], ["cpu"], "gloo"),
    (["GPU-1"], [], "nccl"),
    (["GPU-1"], ["GPU-2", "GPU-3"], "nccl"),
    (["GPU-1", "GPU-2"], ["GPU-3"], "nccl"),
    (["GPU-1"], ["GPU-1"], "ipc"),
    (["GPU-1", "GPU-2"], ["GPU-1", "GPU-2"], "ipc"),
    (["GPU-1", "GPU-2"], ["GPU-2", "GPU-1"], "ipc"),
    (["GPU-1"], ["GPU-1", "GPU-2"], None),
    (["GPU-1"], ["GPU-2", "GPU-2"], None),
    (["GPU-1"], ["GPU-1", "GPU-1"], None),
    (["GPU-1", "GPU-2"], ["GPU-1", "GPU-3"], None),
])  # fmt: skip
def test_the_transport_follows_from_where_the_processes_are(trainers, workers, transport):
    if transport:
        assert choose_transport(trainers, workers) == transport
    else:
        with pytest.raises(RefitError, match="shares the GPU of a trainer"):
            choose_transport(trainers, workers)


def test_between_processes_that_share_no_memory_only_the_first_rank_sends(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, passes, others = open_store("127.0.0.1", 20), [], []

    def engine() -> None:
        end = connect_store("127.0.0.1", store.port, 20)
        receiver = Receiver(Wire(end, 2, 2, 1, torch.device("cpu"), 20))
        receiver.refit()
        passes.extend(receiver.passes)

    def second_rank() -> None:
        sender = WeightSender(ToyTrainer(), 1, "float32", 20)
        sender.join(connect_store("127.0.0.1", store.port, 20), 2, 1)
        others.append((sender.send(0), sender.wire.member))

    threads = [threading.Thread(target=each) for each in (engine, second_rank)]
    for thread in threads:
        thread.start()
    first = WeightSender(ToyTrainer(), 0, "float32", 20)
    first.join(store, 2, 1)
    report = first.send(0)
    for thread in threads:
        thread.join(20)
    ((other, member),) = others
    assert not member and other["bytes"] == 0 < report["bytes"]
    assert all(torch.equal(passes[0][2][name], tensor) for name, tensor in sent())


# --- The order of a refit in an engine


class RefitEngine:
    def __init__(self, calls: list, fail: bool = False):
        self.calls, self.fail = calls, fail

    async def pause(self):
        self.calls.append("pause")

    async def receive_weights(self, version):
        self.calls.append(f"receive {version}")
        if self.fail:
            raise RefitError("checksum of lm_head: other bits")
        return {"mode": "plan"}

    async def resume(self):
        self.calls.append("resume")


def refit_calls(fail: bool) -> list[str]:
    calls: list[str] = []

    async def scenario():
        async def set_version(version):
            calls.append(f"version {version}")

        worker = RolloutWorker()
        worker.engine = RefitEngine(calls, fail)
        queue = SimpleNamespace(set_version=SimpleNamespace(remote=set_version))
        return await worker.refit(3, queue)

    if fail:
        with pytest.raises(RefitError, match="checksum of lm_head"):
            asyncio.run(scenario())
    else:
        assert asyncio.run(scenario())["mode"] == "plan"
    return calls


def test_the_version_rises_after_the_weights_and_before_any_new_token():
    assert refit_calls(fail=False) == ["pause", "receive 3", "version 3", "resume"]


def test_an_engine_whose_weights_failed_a_check_is_not_resumed_and_its_version_stays():
    assert refit_calls(fail=True) == ["pause", "receive 3"]


# --- The probe


def test_the_probe_tells_noise_from_another_model():
    assert compare_probe([-1.0, -2.0], [-1.0004, -2.0], "float32", "") == pytest.approx(2e-4, abs=1e-5)
    assert compare_probe([-1.0, -2.0], [-1.1, -2.1], "bfloat16", "engine 0") == pytest.approx(0.1, abs=1e-5)
    with pytest.raises(RefitError, match="engine 0"):
        compare_probe([-1.0, -2.0], [-1.1, -2.1], "float32", "engine 0")
    with pytest.raises(RefitError, match="engine 0"):
        compare_probe([-1.0, -2.0], [-1.5, -2.5], "bfloat16", "engine 0")


@pytest.mark.parametrize("engine", [[math.nan, -2.0], [-math.inf, -2.0], []])
def test_a_probe_without_numbers_fails(engine):
    with pytest.raises(RefitError):
        compare_probe(engine, [-1.0, -2.0][: len(engine)], "bfloat16", "engine 0")


def test_a_probe_of_another_length_fails():
    with pytest.raises((RefitError, RuntimeError, ValueError)):
        compare_probe([-1.0], [-1.0, -1.0, -1.0], "float32", "engine 0")
