"""Router replay in the trainer's models, with routes recorded on them or made up. Those of a real engine
are in `tests/test_router_replay.py`.

The oracle takes a router's place: scores, chosen experts and weights from the formulas of the papers.
"""

import json
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from common.batching import collate, segment_row
from common.debug import dump_rollouts, read_rollouts
from common.logprobs import LogprobHead
from common.metrics import mismatch_metrics
from common.models import make_tiny
from common.parallel import ParallelFlags, build_model, clip_gradients, make_optimizer
from common.refit import checkpoint_tensors, open_store, weights_of
from common.sample import Rollout, Segment, extend_segment

KINDS = {
    "qwen3": (True, 4, 2),
    "wide": ("wide", 16, 2),
    "glm4": ("glm4", 8, 2),
    "deepseek": ("deepseek", 8, 2),
}
LENGTHS = torch.tensor([20, 13, 2])


@pytest.fixture(scope="module", autouse=True)
def group():
    store = open_store("127.0.0.1", 60)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_tiny(folder / kind, moe=moe, tied=False) for kind, (moe, _, _) in KINDS.items()}


def load(path: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def some_ids() -> torch.Tensor:
    return torch.randint(5, 100, (3, 20), generator=torch.Generator().manual_seed(1))


def random_routes(experts: int, k: int, shape=(3, 20, 2), seed: int = 2) -> torch.Tensor:
    """Different experts for each token and layer, [*shape, k] in uint8."""
    order = torch.rand(*shape, experts, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[..., :k].to(torch.uint8)


def run(head, model, routes=None, lengths=LENGTHS) -> torch.Tensor:
    """Log-probs, 0 where there is padding."""
    ids = some_ids()
    logprobs, _ = head(model, ids[:, :-1], ids[:, 1:], 0.9, lengths - 1, routes)
    return torch.where(torch.arange(19) < (lengths - 1)[:, None], logprobs, 0.0)


def oracle(model, kind: str, routes: torch.Tensor):
    """`model` with routers that know `routes`, and nothing of common/."""

    def router_of(layer: int, gate):
        def forward(hidden):
            logits = linear(hidden.reshape(-1, hidden.shape[-1]).float(), gate.weight)
            scores = logits.softmax(-1) if kind in ("qwen3", "wide") else logits.sigmoid()
            chosen = routes[:, :19, layer].reshape(-1, routes.shape[-1]).long()
            weights = torch.stack([scores[t, chosen[t]] for t in range(len(chosen))])
            weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights * getattr(gate, "routed_scaling_factor", 1.0), chosen

        return forward

    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "gate"):
            block.mlp.gate.forward = router_of(layer, block.mlp.gate)
    return model


def gradients(model) -> dict:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_experts_get_the_routers_own_scores_and_so_do_gradients(paths, kind):
    routes = random_routes(*KINDS[kind][1:])
    model, other = load(paths[kind]), oracle(load(paths[kind]), kind, routes)
    head = LogprobHead(model)
    logprobs = run(head, model, routes)
    logprobs.sum().backward()
    ids = some_ids()
    logits = other(ids[:, :-1]).logits
    expected = (logits / 0.9).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    expected = torch.where(torch.arange(19) < (LENGTHS - 1)[:, None], expected, 0.0)
    expected.sum().backward()
    assert (logprobs - expected).abs().max() < 1e-5
    ours, theirs = gradients(model), gradients(other)
    for name in theirs:
        assert (ours[name] - theirs[name]).norm() <= 1e-4 * theirs[name].norm() + 1e-6, name
    routers = [name for name in theirs if name.endswith("gate.weight")]
    assert routers and all(theirs[name].norm() > 1e-3 for name in routers)
    with torch.no_grad():
        assert (run(head, model) - expected).abs().max() > 1e-3, "without routes it chooses by itself"


@pytest.mark.parametrize("kind", KINDS)
def test_the_experts_that_compute_are_the_replayed_ones_and_padding_goes_its_own_way(paths, kind):
    model, seen = load(paths[kind]), {}
    own = {}
    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "experts"):
            hook = lambda module, inputs, layer=layer: seen.update({layer: inputs[1].clone()})  # noqa: E731
            block.mlp.experts.register_forward_pre_hook(hook)
    head, routes = LogprobHead(model), random_routes(*KINDS[kind][1:])
    with torch.no_grad():
        run(head, model)
        own |= seen
        run(head, model, routes)
    real = (torch.arange(19) < (LENGTHS - 1)[:, None]).flatten()
    assert seen and not real.all()
    first = min(seen)
    for layer, chosen in seen.items():
        assert torch.equal(chosen[real], routes[:, :19, layer].flatten(0, 1).long()[real])
    assert torch.equal(seen[first][~real], own[first][~real])  # later layers have other inputs
    with torch.no_grad():
        spoiled = routes.clone()
        spoiled[1, 12:] = spoiled[2, 1:] = 0  # the last token, which is not read, and the padding
        assert torch.equal(run(head, model, routes), run(head, model, spoiled))


def record(model, head) -> torch.Tensor:
    """The model's own choice on `some_ids`, [3, 20, layers, k]: by hooks, not by what is tested."""
    seen = {}
    hooks = [
        block.mlp.experts.register_forward_pre_hook(
            lambda module, inputs, layer=layer: seen.update({layer: inputs[1].clone()})
        )
        for layer, block in enumerate(model.model.layers)
        if hasattr(block.mlp, "experts")
    ]
    with torch.no_grad():
        model(some_ids())
    for hook in hooks:
        hook.remove()
    zeros = torch.zeros_like(next(iter(seen.values())))
    layers = [seen.get(layer, zeros).unflatten(0, (3, 20)) for layer in range(len(model.model.layers))]
    return torch.stack(layers, 2).to(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_choice_replayed_changes_nothing_and_that_of_other_tokens_ends_the_run(paths, kind):
    model = load(paths[kind])
    head = LogprobHead(model)
    routes = record(model, head)
    lengths = torch.tensor([20, 20, 20])
    with torch.no_grad():
        plain = run(head, model, lengths=lengths)
        head.router.metrics()
        replayed = run(head, model, routes, lengths)
        assert (plain - replayed).abs().max() < 1e-6
        assert head.router.metrics()["moe/route_mismatch"] == (0.0, True)
        order = torch.randperm(60, generator=torch.Generator().manual_seed(3))
        shuffled = routes.flatten(0, 1)[order].unflatten(0, (3, 20))
        assert (plain - run(head, model, shuffled, lengths)).abs().max() > 1e-3
        head.router.counts.clear()
        run(head, model, random_routes(*KINDS[kind][1:]), lengths)
        with pytest.raises(
            ValueError, match="are not those of the trainer's router; of random ones .*% would"
        ):
            head.router.metrics()


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda routes: routes[:, :, :1], r"\(1, 2\) up to expert 15: the model has \(2, 2\), 16 experts"),
        (lambda routes: routes[..., :1], r"\(2, 1\) up to expert 15: the model has \(2, 2\), 16 experts"),
        (lambda routes: routes + 1, r"\(2, 2\) up to expert 16: the model has \(2, 2\), 16 experts"),
        (lambda routes: routes.to(torch.int16) - 1, r"\(2, 2\) up to expert 14: the model"),
    ],
    ids=["layers", "experts a token", "expert 16", "expert -1"],
)
def test_routes_that_do_not_fit_the_model_are_an_error_that_says_how(paths, change, said):
    model = load(paths["wide"])
    with pytest.raises(ValueError, match=said):
        run(LogprobHead(model), model, change(random_routes(16, 2)))


def test_load_is_that_of_the_replayed_experts_over_all_real_tokens(paths):
    model = load(paths["qwen3"])
    head = LogprobHead(model)
    routes = torch.zeros(3, 20, 2, 2, dtype=torch.uint8)
    routes[..., 1] = 1
    routes[0, :10, 1, 0] = 3  # layer 1: 10 of 38 tokens or their halves elsewhere
    head.router.config.num_experts_per_tok = 2
    with torch.no_grad():
        run(head, model, routes)
    counts = torch.stack([head.router.counts[0], head.router.counts[1]])[:, :4]
    tokens = int((LENGTHS - 1).sum())
    assert counts.tolist() == [[tokens, tokens, 0, 0], [tokens - 10, tokens, 0, 10]]
    for layer in (0, 1):  # as if the router had chosen so
        head.router.counts[layer][-1] = 0
    entropies = []
    for row in counts.tolist():
        shares = [value / (2 * tokens) for value in row]
        entropies.append(-sum(share * math.log(share) for share in shares if share))
    found = head.router.metrics()
    assert float(found["moe/load_entropy"][0]) == pytest.approx(sum(entropies) / 2 / math.log(4))
    assert float(found["moe/max_load"][0]) == pytest.approx(2.0)  # half of all, where a quarter is even
    assert head.router.counts == {}, "counted anew"


def test_a_dense_model_has_nothing_to_replay_or_to_count(tmp_path):
    model = load(make_tiny(tmp_path / "dense"))
    head = LogprobHead(model)
    run(head, model)
    assert not head.router.routers and head.router.metrics() == {}
    with pytest.raises(ValueError, match="no known router in a qwen3: use --router-replay off"):
        run(head, model, random_routes(4, 2))


def test_a_router_that_chooses_in_a_way_of_its_own_is_an_error(paths):
    model = load(paths["qwen3"])
    head = LogprobHead(model)
    gate = model.model.layers[1].mlp.gate

    def sorts(hidden):
        scores = linear(hidden.reshape(-1, 64), gate.weight).softmax(-1)
        chosen = scores.argsort(-1, descending=True)[:, :2]
        return scores, scores.gather(-1, chosen), chosen

    gate.forward = sorts
    with torch.no_grad():
        run(head, model, random_routes(4, 2))
    with pytest.raises(
        ValueError, match=r"layers \[1\] chose by something else than topk: use --router-replay off"
    ):
        head.router.metrics()
    with torch.no_grad():
        run(head, model, None)
    assert head.router.metrics() == {}


@pytest.mark.parametrize("freeze", [False, True])
def test_a_frozen_router_stays_as_it_is_and_all_else_learns(paths, freeze):
    flags = ParallelFlags(freeze_router=freeze)
    model = build_model(paths["glm4"], torch.device("cpu"), flags=flags)
    optimizer = make_optimizer(model, 0.1, flags)
    optimizer.param_groups[0]["lr"] = 0.1
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    run(LogprobHead(model), model, random_routes(8, 2)).sum().backward()
    assert clip_gradients(model, 1.0, flags) > 0
    optimizer.step()
    still = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert still == ({"model.layers.1.mlp.gate.weight"} if freeze else set())


def test_the_bias_that_chooses_is_refitted_and_saved_in_single_precision(paths):
    sent = dict(checkpoint_tensors(weights_of(load(paths["glm4"]))))
    assert sent["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert sent["model.layers.1.mlp.gate.e_score_correction_bias"].std() > 0.01


# --- On record


def turn(before, context: int, sampled: int, routes, version: int = 0) -> Segment:
    ids, logprobs = list(range(sampled)), [-1.0] * sampled
    return extend_segment(before, [9] * context, ids, logprobs, [version] * sampled, "stop", routes=routes)


def numbered(start: int, stop: int, layers: int = 2, add: int = 0) -> np.ndarray:
    """Routes that tell the token and the layer: [stop - start, layers, 2]."""
    token = np.arange(start, stop)[:, None, None] + add
    return (token + np.zeros((1, layers, 2), int)).astype(np.uint8)


def test_a_token_keeps_the_routes_with_which_it_was_read_first():
    first = turn(None, 4, 3, numbered(0, 6))  # 7 tokens, of which the last one is not read
    assert first.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert first.routed_experts.dtype == np.uint8 and first.routed_experts.shape == (7, 2, 2)
    told = turn(first, 2, 2, numbered(6, 10))  # only what is new
    whole = turn(first, 2, 2, numbered(0, 10))
    assert told.routed_experts[:, 1, 1].tolist() == [*range(10), 0]
    assert np.array_equal(told.routed_experts, whole.routed_experts)
    again = numbered(0, 10, add=100)  # a refit in between: the prompt goes other ways now
    assert turn(first, 2, 2, again).routed_experts[:, 0, 0].tolist() == [*range(6), 106, 107, 108, 109, 0]


@pytest.mark.parametrize("start, stop", [(7, 10), (8, 10), (0, 11)])
def test_routes_that_leave_a_gap_or_are_too_many_end_the_run(start, stop):
    first = turn(None, 4, 3, numbered(0, 6))
    with pytest.raises(ValueError, match="where 6 to 9 are new") as error:
        turn(first, 2, 2, numbered(start, stop))
    assert type(error.value) is ValueError  # a RecordError would drop this one rollout


def test_more_than_256_experts_take_two_bytes_and_survive_a_file(tmp_path):
    wide = numbered(0, 6).astype(np.uint16) * 60
    segment = turn(None, 4, 3, wide)
    assert segment.routed_experts.dtype == np.int16 and segment.routed_experts[5, 0, 0] == 300
    rollout = Rollout("0.0", "g0", 0, "0", [segment, turn(None, 4, 3, numbered(0, 6))], [1.0])
    dump_rollouts(str(tmp_path), 0, [rollout])
    (back,) = read_rollouts(str(tmp_path), 0)
    for ours, theirs in zip(rollout.segments, back.segments, strict=True):
        assert np.array_equal(ours.routed_experts, theirs.routed_experts)
        assert ours.routed_experts.dtype == theirs.routed_experts.dtype
    assert json.loads((tmp_path / "step_000000.jsonl").read_text())["segments"][0]["routed_experts"]


def test_rows_carry_their_routes_and_whether_a_refit_came_between_their_tokens():
    short = turn(None, 2, 2, numbered(0, 3))
    long = turn(turn(None, 4, 3, numbered(0, 6)), 2, 2, numbered(6, 10), version=1)
    batch = collate([segment_row(short), segment_row(long)])
    assert batch["routed_experts"].shape == (2, 11, 2, 2) and batch["routed_experts"].dtype == np.uint8
    assert batch["routed_experts"][0, :, 0, 0].tolist() == [0, 1, 2, *[0] * 8]
    assert batch["crossed"].tolist() == [False, True]
    plain = turn(None, 2, 2, None)
    assert "routed_experts" not in segment_row(plain)


def test_the_mismatch_of_rows_that_cross_a_refit_is_told_apart():
    log_ratio = torch.tensor([[0.1, 0.3], [0.5, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    sums, _ = mismatch_metrics(log_ratio, mask, torch.tensor([False, True]))
    assert [float(x) for x in sums["mismatch/crossed_abs_mean"]] == [0.5, 1.0]
    assert [float(x) for x in sums["mismatch/abs_mean"]] == pytest.approx([0.9, 3.0])
    none, _ = mismatch_metrics(log_ratio, mask, torch.tensor([False, False]))
    assert float(none["mismatch/crossed_abs_mean"][1]) == 0
