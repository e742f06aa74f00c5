"""Memory, traffic and seconds of a run before it starts: from flags, a model's config.json and a cluster.

    python scripts/plan.py --model Qwen3-4B --num-trainers 4 --num-engines 4 --micro-batch-tokens 8192
    LAUNCH="python scripts/plan.py" bash scripts/recipes/qwen3_4b.sh --gpus 8    any recipe, with its flags

Takes all flags of algos/grpo.py, and those of `Args` below. It says what does not fit, which of our flags
makes it fit, and how the GPUs would be split for trainer and engines to take equally long.

Where the numbers come from. Parameters are counted exactly (scripts/sharding.py builds the same models and
compares). Saved activations are counted from what autograd keeps of each layer, in bytes a token. The six
constants of `Measured` are fitted to the 0.6B and 4B rows of docs/train_step_h200.json and to the rates in
docs/performance.md, all on H200s; 1.7B was left out of that and is what tests/test_plan.py predicts. Other
GPUs are scaled by peak FLOP/s and memory rate. Mixtures of experts, MLA, linear attention and everything over
more than two GPUs are arithmetic that nobody has measured here.
"""

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from algos import grpo
from common.checks import EXPERTS, FlagError, refuse
from common.parallel import ParallelFlags

CONFIGS = Path(__file__).parent / "recipes" / "configs"
GB = 1e9
# bytes of memory that a process can have, dense bf16 FLOP/s, bytes/s of memory in a plain copy
GPUS = {"h100": (85e9, 989e12, 2.8e12), "h200": (149e9, 989e12, 4.0e12)}
GPUS |= {"b200": (191e9, 2250e12, 6.6e12), "b300": (288e9, 2250e12, 6.6e12)}
ROOM = 0.92  # of a GPU: the rest is CUDA's, NCCL's and fragmentation


class Measured:
    """What was fitted. All on an H200, in bf16."""

    MATMUL = 0.75  # share of peak that the layers' products reach, forward and backward
    PASSES = {True: 11.6, False: 27.6}  # bytes moved for each saved byte, with --compile and without
    HEAD_S = (1.5e-3, 25.85e-6)  # of 16,384 tokens and 151,936 words: fixed, and for each hidden size
    OPTIMIZER = 60  # bytes moved for each parameter of a rank: AdamW, norm, clipping, casts
    LAUNCH_S = 12.5e-3  # that the host needs for a layer of a micro-batch without --compile
    TOKEN_S = 53e-6  # that an engine's host needs for a sampled token


@dataclass
class Args(grpo.Args):
    gpu: Literal["h100", "h200", "b200", "b300"] = "h200"
    """The kind of GPU. Only the H200's numbers were measured."""
    gpus: int = 0
    """GPUs of the cluster. 0: as many as --num-trainers and --num-engines take."""
    gpus_per_node: int = 8
    """GPUs that NVLink joins."""
    nvlink_gb_s: float = 360.0
    """GB/s that a GPU sends within a node (measured for large messages between two H200s)."""
    ib_gb_s: float = 45.0
    """GB/s that a GPU sends to other nodes (a 400 Gb/s card for each GPU)."""
    prompt_tokens: int = 512
    """Mean length of a prompt."""
    answer_tokens: int = 0
    """Mean length of an episode without its prompt. 0: half of --max-new-tokens."""
    json: bool = False
    """Prints the plan as JSON."""


# --- The model


@dataclass
class Layer:
    """One layer: parameters by where they live, and what it costs a token."""

    dense: int  # parameters that every rank computes with
    experts: int  # parameters of routed experts
    active: int  # weights that a token is multiplied by
    saved: dict[bool, int]  # bytes that autograd keeps of a token, with --compile and without
    inputs: int  # and of what is left where activations are computed again
    part: dict[bool, int]  # of what is then computed again at a time
    attention: int  # heads x head size of scores, for FLOPs
    cache: int  # elements of the engine's cache for a token


@dataclass
class Model:
    name: str
    hidden: int
    vocab: int
    tied: bool
    layers: list[Layer]
    vision: int  # parameters beside the language model
    largest: int  # elements of the largest tensor that a refit gathers
    num_experts: int

    @property
    def experts(self) -> int:
        return sum(layer.experts for layer in self.layers)

    @property
    def root(self) -> int:
        """Embedding, head, last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def dense(self) -> int:
        return self.root + self.vision + sum(layer.dense for layer in self.layers)

    @property
    def parameters(self) -> int:
        return self.dense + self.experts

    @property
    def active(self) -> int:
        return sum(layer.active for layer in self.layers) + self.vocab * self.hidden


def find_config(model: str) -> tuple[str, dict]:
    """Name and config.json of a folder, or of scripts/recipes/configs by the last part of a Hub id."""
    for folder in (Path(model), CONFIGS / Path(model).name):
        if (folder / "config.json").is_file():
            return folder.name, json.loads((folder / "config.json").read_text())
    known = ", ".join(sorted(path.parent.name for path in CONFIGS.glob("*/config.json")))
    raise FlagError(f"--model {model}: no config.json; give its folder, or one of {known}")


def read_model(name: str, config: dict) -> Model:
    """The shape of a Qwen3, Qwen3-MoE, Qwen3.5-MoE or DeepSeek-V3. Raises FlagError for other kinds."""
    text = config.get("text_config") or config
    if text["model_type"] not in ("qwen3", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v3"):
        raise FlagError(f"--model {name}: {text['model_type']} is not written in scripts/plan.py")
    count = next((text[key] for key in EXPERTS if text.get(key)), 0)
    layers = [read_layer(text, index, count) for index in range(text["num_hidden_layers"])]
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    stacked = 2 * count * hidden * text["moe_intermediate_size"] if count else 0
    vision = vision_parameters(config["vision_config"]) if "vision_config" in config else 0
    tied = text.get("tie_word_embeddings", False)
    return Model(name, hidden, vocab, tied, layers, vision, max(stacked, vocab * hidden), count)


def read_layer(text: dict, index: int, num_experts: int) -> Layer:
    """Eager, transformers' norms keep their input in fp32, the normed value and the output (8 bytes an
    element); a projection keeps its input, SwiGLU four values, attention q, k, v and its output. Compiled, a
    norm keeps input and output in bf16 and makes the rest again. Where activations are computed again,
    AutoModel wraps layers of a mixture of experts, of others norms, attention and MLP: four inputs stay."""
    h = text["hidden_size"]
    linear = (text.get("layer_types") or [""] * (index + 1))[index] == "linear_attention"
    if "kv_lora_rank" in text:  # MLA
        heads, rank_q, rank_kv = text["num_attention_heads"], text["q_lora_rank"], text["kv_lora_rank"]
        nope, rope, size_v = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
        weights = h * (rank_q + rank_kv + rope) + rank_q * heads * (nope + rope)
        weights += rank_kv * heads * (nope + size_v) + heads * size_v * h
        small, attention, cache = rank_q + rank_kv, heads * (nope + rope + size_v) // 2, rank_kv + rope
        kept = 4 * heads * (nope + rope) + 6 * heads * size_v
        saved = {False: kept + 8 * small, True: kept + 4 * small}
    elif linear:  # gated delta net: no cache that grows
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        heads, size = text["linear_num_value_heads"], text["linear_value_head_dim"]
        values = heads * size
        weights = h * (2 * keys + 2 * values + 2 * heads) + values * h
        small, attention, cache = (
            (2 * keys + values) * text["linear_conv_kernel_dim"] + 2 * heads + size,
            0,
            0,
        )
        saved = {False: 10 * (2 * keys + 2 * values), True: 6 * (2 * keys + 2 * values)}
    else:
        size, heads, kv = text["head_dim"], text["num_attention_heads"], text["num_key_value_heads"]
        gate = 2 if text["model_type"] == "qwen3_5_moe_text" else 1
        weights = h * size * ((gate + 1) * heads + 2 * kv)
        small, attention, cache = 2 * size, heads * size, 2 * kv * size
        saved = {False: 10 * (heads + kv) * size, True: 6 * (heads + kv) * size}
    mixer, saved = saved, {False: saved[False] + 16 * h, True: saved[True] + 8 * h}
    is_sparse = num_experts and index >= text.get("first_k_dense_replace", 0)
    if not is_sparse or index in text.get("mlp_only_layers", []):
        wide = text["intermediate_size"]
        feed = {False: 8 * wide, True: 6 * wide}
        saved = {compiled: kept + feed[compiled] for compiled, kept in saved.items()}
        part = saved if num_experts else {compiled: max(feed[compiled], mixer[compiled]) for compiled in feed}
        ours = weights + 3 * h * wide
        inputs = 2 * h if num_experts else 8 * h
        return Layer(ours + small + 2 * h, 0, ours, saved, inputs, part, attention, cache)
    wide, top = text["moe_intermediate_size"], text["num_experts_per_tok"]
    shared = text.get("shared_expert_intermediate_size", text.get("n_shared_experts", 0) * wide)
    ours = weights + 3 * h * shared + num_experts * h
    ours += h if "shared_expert_intermediate_size" in text else 0  # a gate of the shared expert
    extra = 8 * shared + top * (4 * h + 8 * wide)
    saved = {compiled: kept + extra for compiled, kept in saved.items()}
    active = ours + top * 3 * h * wide
    experts = num_experts * 3 * h * wide
    return Layer(ours + small + 2 * h, experts, active, saved, 2 * h, saved, attention, cache)


def vision_parameters(v: dict) -> int:
    """A ViT with biases, patches and positions, and the merger into the language model."""
    h, wide, merged = (
        v["hidden_size"],
        v["intermediate_size"],
        v["hidden_size"] * v["spatial_merge_size"] ** 2,
    )
    block = 4 * h * h + 4 * h + 2 * h * wide + wide + h + 4 * h
    patch = v["in_channels"] * v["temporal_patch_size"] * v["patch_size"] ** 2 * h + h
    merger = merged * merged + merged + merged * v["out_hidden_size"] + v["out_hidden_size"] + 2 * h
    return v["depth"] * block + patch + v["num_position_embeddings"] * h + merger


# --- Trainer


def trainer_memory(model: Model, flags: ParallelFlags, batches: int, beside: float = 0.0) -> dict:
    """Bytes of a trainer rank in a step of `batches` micro-batches, by what they are, and its peak: at the
    start of the last backward, in the optimizer's step, or while a refit gathers the largest tensor. `beside`
    is what else lives on the GPU."""
    ranks, tokens, compiled = flags.num_trainers, flags.micro_batch_tokens, flags.compile
    shard = model.parameters / ranks
    whole = model.dense / flags.trainer_tp + model.experts / flags.trainer_ep  # of a rank, unsharded
    if flags.zero == 3 and ranks > 1:
        layer = max(x.dense / flags.trainer_tp + x.experts / flags.trainer_ep for x in model.layers)
        held, sums = 2 * (model.root / flags.trainer_tp + 2 * layer), 4 * (shard + layer)
    else:  # weights in bf16; sums of gradients in fp32, which only wait where there is another micro-batch
        held, sums = 2 * whole, 4 * whole if batches > 1 else 0.0
    saved = [layer.saved[compiled] / flags.trainer_tp for layer in model.layers]
    if flags.activation_checkpointing:
        activations = tokens * sum(layer.inputs for layer in model.layers)
        activations += tokens * max(layer.part[compiled] for layer in model.layers) / flags.trainer_tp
    else:
        activations = tokens * sum(saved)
    dispatch = 0.0
    if model.experts and flags.trainer_ep > 1:  # AutoModel's own dispatcher gives every rank all tokens
        dispatch = 8.0 * flags.trainer_ep * tokens * model.hidden
    vocab = model.vocab / flags.trainer_tp
    logits = min(2 * 5 * 2**28, 2 * 2 * vocab * tokens) + 2 * vocab * model.hidden + 8 * tokens * model.hidden
    averages = 0.0 if flags.offload_optimizer else 8 * shard
    parts = {
        "weights": 4 * shard,
        "optimizer": averages,
        "gathered": held,
        "gradients": max(4 * shard, sums),
        "activations": activations,
        "logits": logits,
        "dispatch": dispatch,
    }
    kept = parts["weights"] + averages
    at_backward = kept + held + activations + logits + dispatch + sums
    at_step = 8 * shard + max(averages, min(8 * shard, 8 * 2**28)) + held
    at_refit = kept + 4 * shard + (4 * model.largest if ranks > 1 else 0) + 2 * 256 * 2**20
    peak = {"backward": at_backward, "optimizer": at_step, "refit": at_refit}
    where = max(peak, key=peak.get)
    return parts | {"peak": peak[where] + beside, "peak_at": where}


def trainer_time(
    model: Model, flags: ParallelFlags, tokens: float, length: float, args: Args
) -> dict[str, float]:
    """Seconds of an optimizer step on `tokens` of each data rank, in rows of `length`, by what they are."""
    _, peak, rate = GPUS[args.gpu]
    batches, again = math.ceil(tokens / flags.micro_batch_tokens), flags.activation_checkpointing
    active = sum(layer.active for layer in model.layers)
    attention = sum(layer.attention for layer in model.layers) * length  # causal, so half of all pairs
    products = (8 if again else 6) * (active + attention) * tokens / flags.trainer_tp
    saved = sum(layer.saved[flags.compile] for layer in model.layers) * tokens / flags.trainer_tp
    fixed, each = Measured.HEAD_S
    head = (fixed + each * model.hidden) * model.vocab / 151_936 * tokens / 16_384 * 989e12 / peak
    gpu = {
        "layers": products / (Measured.MATMUL * peak),
        "memory": Measured.PASSES[flags.compile] * saved * (1.25 if again else 1) / rate,
        "head": head / flags.trainer_tp,
        "optimizer": Measured.OPTIMIZER * model.parameters / flags.num_trainers / rate,
    }
    if flags.offload_optimizer:  # measured at 4B: 1.1 s for 32 GB there and back
        gpu["offload"] = 16 * model.parameters / flags.num_trainers / 59e9
    host = 0.0 if flags.compile else Measured.LAUNCH_S * len(model.layers) * batches * (1.33 if again else 1)
    times = gpu | {"launch": max(0.0, host - sum(gpu.values()))}
    return times | {"traffic": trainer_traffic(model, flags, batches)["s"](args)}


def trainer_traffic(model: Model, flags: ParallelFlags, batches: int) -> dict:
    """Bytes that a rank sends in a step, by what they are, and a function that gives the seconds of that."""
    ranks, ep, tp, tokens = flags.num_trainers, flags.trainer_ep, flags.trainer_tp, flags.micro_batch_tokens
    data, shards = ranks // tp, ranks // ep
    weights = model.dense / tp * (1 - 1 / data) + model.experts / ep * (1 - 1 / shards)
    rounds = batches if flags.zero == 3 else 1
    passes = 2 if flags.zero == 3 else 1  # weights are gathered for the forward and again for the backward
    sent = {"fsdp": rounds * (2 * passes + 4) * weights, "experts": 0.0, "tensor": 0.0}
    if model.experts and ep > 1:
        sparse = sum(bool(layer.experts) for layer in model.layers)
        sent["experts"] = (
            batches
            * sparse
            * (6 if flags.activation_checkpointing else 4)
            * 2
            * (ep * tokens * model.hidden * (1 - 1 / ep))
        )
    if tp > 1:
        sent["tensor"] = batches * len(model.layers) * 4 * 2 * 2 * tokens * model.hidden * (1 - 1 / tp)
    spans = {"fsdp": ranks, "experts": ep, "tensor": tp}

    def seconds(args: Args) -> float:
        rate = {name: link(span, args) for name, span in spans.items()}
        return sum(sent[name] / rate[name] for name in sent)

    return sent | {"s": seconds}


def link(ranks: int, args: Args) -> float:
    """Bytes a second of a group's slowest way: NVLink inside of a node, else the network."""
    return (args.nvlink_gb_s if ranks <= args.gpus_per_node else args.ib_gb_s) * GB


# --- Engines


def engine_plan(model: Model, args: Args, share: float) -> dict[str, float]:
    """Memory of a GPU of an engine (bytes), and tokens a second of an engine. `share`: of a GPU."""
    capacity, peak, rate = GPUS[args.gpu]
    tp, flags = args.engine.engine_tp, args.engine
    allowed = capacity * (flags.gpu_memory_utilization or 0.8 * share)
    weights, graphs = 2 * model.parameters / tp, 3e9
    context = args.prompt_tokens + answer_tokens(args)
    per_token = 2 * sum(layer.cache for layer in model.layers) / (1 if is_latent(model) else tp)
    room = flags.kv_cache_gb * 2**30 / tp if flags.kv_cache_gb else allowed - weights - graphs
    wanted = flags.max_in_flight * args.group_size
    running = max(0, min(wanted, int(room / (per_token * context)) if per_token else wanted))
    plan = {"weights": weights, "kv": max(0.0, room), "kv_per_token": per_token, "wanted": wanted}
    plan |= {"running": running, "peak": weights + graphs + max(0.0, room), "tokens_per_s": 0.0}
    if running:
        reads = (weights + running * context * per_token) / rate
        products = 2 * model.active * running / tp / (Measured.MATMUL * peak)
        plan["tokens_per_s"] = running / max(reads, products, running * Measured.TOKEN_S)
    return plan


def is_latent(model: Model) -> bool:
    """MLA's cache has no heads, so every worker of an engine keeps all of it."""
    return model.layers[0].cache == 576


def answer_tokens(args: Args) -> int:
    return args.answer_tokens or max(1, args.max_new_tokens // 2)


# --- The plan


def make_plan(args: Args) -> dict:
    """Everything that is printed, as a dict. Raises FlagError for what cannot be planned."""
    if args.parallel.lora_rank:
        why = "adapters are not in the plan, which is of full training and its memory"
        raise FlagError(f"--lora-rank {args.parallel.lora_rank}: {why}; leave it out")
    for flag, value, plain in (
        ("--quantization", args.engine.quantization, "none"),
        ("--speculative-tokens", args.engine.speculative_tokens, 0),
    ):
        if value != plain:
            why = "not in the plan, which is of an engine in bfloat16 that guesses nothing"
            raise FlagError(f"{flag} {value}: {why}; leave it out")
    model, flags = read_model(*find_config(args.model)), args.parallel
    workers, trainers = args.engine.num_engines * args.engine.engine_tp, flags.num_trainers
    gpus = args.gpus or (trainers if workers == trainers == 1 else workers + trainers)
    shared = workers == trainers == gpus
    if not shared and workers + trainers > gpus:
        raise FlagError(
            f"--gpus {gpus}: {workers} engine workers and {trainers} trainers need more; raise it"
        )
    if model.experts and model.num_experts % flags.trainer_ep:
        raise FlagError(f"--trainer-ep {flags.trainer_ep}: does not divide {model.num_experts} experts")
    rollouts, length = args.prompts_per_step * args.group_size, args.prompt_tokens + answer_tokens(args)
    tokens = rollouts * length / flags.data_ranks
    engine = engine_plan(model, args, 0.5 if shared else 1.0)
    batches = math.ceil(tokens / flags.micro_batch_tokens)
    memory = trainer_memory(model, flags, batches, engine["peak"] if shared else 0.0)
    capacity = GPUS[args.gpu][0] * ROOM
    time = trainer_time(model, flags, tokens, length, args)
    sent = {k: v for k, v in trainer_traffic(model, flags, batches).items() if k != "s"}
    plan = {
        "model": model.name,
        "parameters": model.parameters,
        "active": model.active,
        "gpus": gpus,
        "trainer": memory | {"fits": memory["peak"] <= capacity},
        "engine": engine | {"fits": engine["running"] > 0},
        "sent": sent,
        "time": time | {"train": sum(time.values())},
        "capacity": capacity,
    }
    plan["time"] |= {"refit": 2 * model.parameters / min(290e9, link(gpus, args))}
    made = engine["tokens_per_s"] * args.engine.num_engines
    plan["time"]["rollout"] = rollouts * answer_tokens(args) / made if made else math.inf
    slower = sum if shared else max  # on one GPU they take turns
    plan["time"]["step"] = slower((plan["time"]["train"], plan["time"]["rollout"])) + plan["time"]["refit"]
    return plan


def trainer_advice(args: Args) -> str | None:
    """The first set of our flags, cheapest in time first, with which the trainer fits; None if none does."""
    flags, changes = args.parallel, []
    tries = [("compile", True), ("zero", 3), ("activation_checkpointing", True)]
    while flags.micro_batch_tokens >> len(tries) - 2 >= 512:
        tries.append(("micro_batch_tokens", flags.micro_batch_tokens >> len(tries) - 2))
    tries += [("offload_optimizer", True)]
    tries += [("num_trainers", flags.num_trainers << more) for more in range(1, 9)]
    for name, value in tries:
        if vars(flags)[name] == value or (name == "zero" and flags.num_trainers == 1):
            continue
        flags = replace(flags, **{name: value})
        text = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        changes = [change for change in changes if change.split()[0] != text.split()[0]] + [text]
        if make_plan(replace(args, parallel=flags, gpus=0))["trainer"]["fits"]:
            return " ".join(changes)
    return None


def engine_advice(args: Args) -> str | None:
    """The smallest --engine-tp of a node with which an engine fits; None if none does."""
    for tp in (1, 2, 4, 8):
        if args.engine.engine_tp < tp <= args.gpus_per_node:
            engine = replace(args.engine, engine_tp=tp)
            if make_plan(replace(args, engine=engine, gpus=0))["engine"]["fits"]:
                return f"--engine-tp {tp}"
    return None


def best_split(args: Args, gpus: int) -> tuple[int, int, float] | None:
    """(trainers, engines, seconds a step) of the split of `gpus` that is fastest and fits."""
    found, rollouts = [], args.prompts_per_step * args.group_size
    tp, unit = args.engine.engine_tp, math.lcm(args.parallel.trainer_tp, args.parallel.trainer_ep)
    for trainers in range(unit, gpus, unit):
        engines, left = divmod(gpus - trainers, tp)
        if not engines or left or trainers // args.parallel.trainer_tp > rollouts:
            continue
        flags, engine = (
            replace(args.parallel, num_trainers=trainers),
            replace(args.engine, num_engines=engines),
        )
        plan = make_plan(replace(args, parallel=flags, engine=engine, gpus=gpus))
        if plan["trainer"]["fits"] and plan["engine"]["fits"]:
            found.append((plan["time"]["step"], trainers, engines))
    return (lambda best: (best[1], best[2], best[0]))(min(found)) if found else None


def show(plan: dict, args: Args) -> str:
    """The plan in some twenty lines."""
    trainer, engine, time, sent = plan["trainer"], plan["engine"], plan["time"], plan["sent"]
    size, active = plan["parameters"] / 1e9, plan["active"] / 1e9
    parts = ("weights", "optimizer", "gathered", "gradients", "activations", "logits", "dispatch")
    lines = [
        f"{plan['model']}: {size:.4g}B parameters, {active:.3g}B of a token",
        f"{plan['gpus']} x {args.gpu} with {plan['capacity'] / GB:.0f} GB to use",
        "trainer rank, GB: "
        + ", ".join(f"{name} {trainer[name] / GB:.3g}" for name in parts if trainer[name]),
        f"  peak {trainer['peak'] / GB:.1f} GB ({trainer['peak_at']}): "
        + verdict(trainer, args, trainer_advice),
        f"engine GPU, GB: weights {engine['weights'] / GB:.3g}, KV {engine['kv'] / GB:.3g} "
        f"({engine['kv_per_token'] / 1e3:.3g} kB a token)",
        f"  {engine['running']} of {engine['wanted']} answers at once, "
        f"{engine['tokens_per_s']:.0f} tokens/s: " + verdict(engine, args, engine_advice),
        "a rank sends in a step, GB: "
        + (", ".join(f"{k} {v / GB:.3g}" for k, v in sent.items() if v) or "nothing"),
        "seconds: " + ", ".join(f"{name} {value:.3g}" for name, value in time.items() if value),
    ]
    if plan["gpus"] > 1 and (split := best_split(args, plan["gpus"])):
        lines.append(
            f"fastest split: --num-trainers {split[0]} --num-engines {split[1]}, {split[2]:.3g} s a step"
        )
    return "\n".join(lines)


def verdict(role: dict, args: Args, advice) -> str:
    if role["fits"]:
        return "fits"
    fix = advice(args)
    return f"DOES NOT FIT; {'with ' + fix + ' it does' if fix else 'no flag of ours makes it fit'}"


def main(args: Args) -> None:
    try:
        plan = make_plan(args)
        print(json.dumps(plan) if args.json else show(plan, args))
    except FlagError as error:
        refuse(error)


if __name__ == "__main__":
    main(tyro.cli(Args))
