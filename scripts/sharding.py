"""The trainer's model as AutoModel and FSDP2 shard it over any number of ranks, on the meta device: bytes of
a rank, and the engine's place for every name that a refit sends.

    python scripts/sharding.py --model DeepSeek-V3 --num-trainers 256 --trainer-ep 256 --zero 3
    bash scripts/recipes/deepseek_v3.sh --dry-run                              any recipe, with its flags
    LAUNCH="python scripts/sharding.py" bash scripts/recipes/deepseek_v3.sh    the same without model or data

With --dry-run the flags are checked first, as a run does, and the arithmetic of its batches is printed.

This process plays rank 0 (whose shard is the largest) of torch's fake process group: meshes, placements and
shards are real, nothing is sent and no weight exists. Names go to a narrow model of vLLM's own class for this
architecture (a dense and a sparse layer, few experts, small), through the loader, the recorder and the check
of coverage that the engines use at the first refit.

Not shown here: that values arrive (the gate of a run's first refit does that), what a GPU's kernels make of
the weights after loading, memory of activations (scripts/plan.py estimates it), and NCCL at this size.
"""

import contextlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.distributed as dist
import tyro
from plan import find_config
from torch.distributed.tensor import DTensor

from algos import grpo
from common.checks import EXPERTS, refuse
from common.models import resolve_model
from common.parallel import CudaIsCpu, ParallelFlags, build_model
from common.refit import RefitError, check_coverage, checkpoint_tensors, learn_plan, weights_of

SMALL = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 256}
SMALL |= {"num_hidden_layers": 2, "num_experts_per_tok": 2, "q_lora_rank": 32, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
SMALL |= dict.fromkeys(EXPERTS, 8) | {"mlp_only_layers": [0], "bos_token_id": 0, "eos_token_id": 1}
SMALL |= {"shared_expert_intermediate_size": 32}
TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
# vLLM's classes for images import torchvision, which the CPU set leaves out, and which names have no need of
NOTHING = """
class Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

class Nothing(metaclass=Kind):
    pass

def __getattr__(name):
    return getattr(Nothing, name)
"""


@contextlib.contextmanager
def fake_ranks(count: int):
    """This process as rank 0 of `count` that do not exist: collectives return at once, with anything."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "WORLD_SIZE": str(count), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def meta_model(config: dict, flags: ParallelFlags) -> torch.nn.Module:
    """What `common.parallel.build_model` makes on GPUs, by that function itself. AutoModel takes the config
    in place of a checkpoint, and its four steps that need a GPU or values are left out."""
    from nemo_automodel import NeMoAutoModelForCausalLM, NeMoAutoModelForImageTextToText
    from nemo_automodel._transformers import infrastructure
    from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
    from transformers import AutoConfig

    def without_weights(kind):
        plain = kind.from_config
        return lambda path, **settings: plain(AutoConfig.from_pretrained(path), **settings)

    move = torch.nn.Module.to
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        Path(folder, "config.json").write_text(json.dumps(config))
        kinds = (NeMoAutoModelForCausalLM, NeMoAutoModelForImageTextToText)
        for where, name, what in (
            *((kind, "from_pretrained", without_weights(kind)) for kind in kinds),
            (torch.cuda, "current_device", lambda: 0),
            (torch.nn.Module, "to", lambda self, *a, **k: self if a and a[0] == 0 else move(self, *a, **k)),
            (Checkpointer, "initialize_model_weights", lambda *a, **k: None),
            (infrastructure, "print_trainable_parameters", lambda model: None),
        ):
            patches.enter_context(mock.patch.object(where, name, what))
        patches.enter_context(CudaIsCpu())
        patches.enter_context(torch.device("meta"))
        return build_model(folder, torch.device("cuda"), flags=flags)


def shard_bytes(model: torch.nn.Module) -> dict:
    """Parameters in all and on this rank, whether each is sharded and without memory, and fp32 bytes of the
    rank: weights, gradients and Adam's averages."""
    parameters = list(model.parameters())
    here = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "local": here,
        "tensors": len(parameters),
        "sharded": sum(isinstance(parameter, DTensor) for parameter in parameters),
        "bytes": 16 * here,
        "largest": max(parameter.numel() for parameter in parameters),
    }


# --- Names


def sent_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What the sender of a refit would send, whole and on the meta device, under the checkpoint's names."""
    whole = [(name, torch.empty(tensor.shape, device="meta")) for name, tensor in weights_of(model)]
    return list(checkpoint_tensors(whole))


def pattern(name: str) -> str:
    """A name without the numbers of its layer and expert."""
    return re.sub(r"\.\d+(?=\.)", ".N", name)


def narrow(config: dict) -> dict:
    """The same architecture, small; with a dense layer where it can have one, and a layer of each kind."""
    if "vision_config" in config:
        tower = config["vision_config"] | TOWER
        return config | {"text_config": narrow(config["text_config"]), "vision_config": tower}
    small = {key: value for key, value in SMALL.items() if key in config}
    return config | small | {"layer_types": sorted(set(config.get("layer_types") or [])) or None}


@contextlib.contextmanager
def without_torchvision():
    """Where torchvision is missing, a package of that name with nothing in it, for vLLM's processes too."""
    if importlib.util.find_spec("torchvision"):
        yield
        return
    modules = ("", "io", "transforms", "transforms/functional", "transforms/v2", "transforms/v2/functional")
    path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, path):
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, path["PYTHONPATH"]])
        for module in modules:
            place = Path(folder, "torchvision", module)
            place.mkdir(parents=True, exist_ok=True)
            (place / "__init__.py").write_text(NOTHING)
        sys.path.insert(0, folder)
        yield
        sys.path.remove(folder)


def engine_model(config: dict) -> torch.nn.Module:
    """vLLM's model of a config, on the CPU, before anything is packed. Once in a process."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    settings = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 64}
    with tempfile.TemporaryDirectory() as folder, without_torchvision():
        Path(folder, "config.json").write_text(json.dumps(config))
        whole = EngineArgs(model=folder, **settings).create_engine_config()
        with set_current_vllm_config(whole):
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            initialize_model_parallel(1, 1)
            return initialize_model(whole)


def missing_of(engine: torch.nn.Module, sent: list[tuple[str, torch.Tensor]]) -> list[str]:
    """Patterns of engine parameters that would not be written exactly once by `sent`. Raises RefitError for a
    name without a place, KeyError for one that the loader does not know."""
    plan = learn_plan(engine.load_weights, [(name, torch.zeros(like.shape)) for name, like in sent])
    missing = set()
    for name, parameter in engine.named_parameters():
        try:
            check_coverage(plan, {name: parameter}, {})
        except RefitError as error:
            if "no place" in str(error):
                raise
            missing.add(pattern(name))
    return sorted(missing)


def make_report(model: str, flags: ParallelFlags) -> tuple[dict, dict, list]:
    """(bytes, config of the narrow model, what a refit sends of that) for a model over the ranks of `flags`.
    The bytes come with `kinds`, the patterns of all names that the whole model sends."""
    _, config = find_config(model)
    few = ParallelFlags(num_trainers=flags.num_trainers, trainer_ep=min(8, flags.trainer_ep))
    with fake_ranks(flags.num_trainers):
        whole = meta_model(config, flags)
        assert all(parameter.device.type == "meta" for parameter in whole.parameters())
        names = [name for name, _ in sent_tensors(whole)]
        found = shard_bytes(whole) | {"names": len(names), "kinds": sorted(set(map(pattern, names)))}
        small = narrow(config)
        return found, small, sent_tensors(meta_model(small, few))


def main(args: grpo.Args) -> None:
    start, flags = time.monotonic(), args.parallel
    path = args.model
    if args.debug.dry_run:
        grpo.main(args)  # fetches the model
        path = resolve_model(args.model)
    found, small, sent = make_report(path, flags)
    size, part, nbytes = found["parameters"] / 1e9, found["local"] / 1e9, found["bytes"] / 1e9
    ranks = f"{flags.num_trainers} ranks (EP {flags.trainer_ep}, TP {flags.trainer_tp})"
    print(f"{args.model} over {ranks}: {size:.4g}B parameters in {found['tensors']} tensors, ", end="")
    print(f"{found['sharded']} sharded; a rank has {part:.4g}B, {nbytes:.1f} GB with gradients and Adam")
    print(f"a refit sends {found['names']} tensors, {len(found['kinds'])} kinds of names")
    missing = missing_of(engine_model(small), sent)
    unknown = sorted(set(found["kinds"]) - {pattern(name) for name, _ in sent})
    print("  each has a place in the engine" if not unknown else f"  not in the narrow model: {unknown}")
    print(f"  engine parameters that no name fills: {missing or 'none'}; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    try:
        main(tyro.cli(grpo.Args))
    except (ValueError, RefitError) as error:
        refuse(error)
