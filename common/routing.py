"""Mixtures of experts: the engine's choice of experts replayed in the trainer (R3), and how even it is."""

import math
import re
from functools import partial

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

ROUTER = re.compile(r"(^|FSDP)Gate$|Top[kK]Router$")  # AutoModel's class for all its models; transformers'
MISMATCH_BOUND = 0.5  # of the mismatch with experts drawn at random


def routers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """The routers of a mixture of experts, by the number of their decoder layer."""
    named = [(name, module) for name, module in model.named_modules() if ROUTER.search(type(module).__name__)]
    return {int(re.search(r"layers\.(\d+)\.", name)[1]): module for name, module in named}


class RouterReplay(TorchFunctionMode):
    """The routers of `model`. In a forward for which `set` was given routes, each takes those in place of its
    own top k. "Stabilizing MoE RL by Aligning Training and Inference Routers", arXiv 2510.11370.

    Only the choice is replayed: the weights of the chosen experts are the trainer's own scores of them, so
    the router learns. One way for all models, as each router calls topk on [tokens, experts] once.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.config, self.routers, self.real_N1 = model.config.get_text_config(), routers(model), None
        self.counts: dict[int, torch.Tensor] = {}  # by layer: tokens of each expert, and replayed misses
        for layer, router in self.routers.items():
            router.forward = partial(self._route, layer, router.forward)

    def _route(self, layer: int, forward, *inputs):
        self.layer = layer
        with self:
            return forward(*inputs)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or self.real_N1 is None:
            return result
        scores_NE, own_NK = args[0], result.indices
        if scores_NE.shape != (len(self.real_N1), len(self.routers[self.layer].weight)):
            return result  # a choice between groups of experts
        routes_NK = own_NK if self.routes_NLK is None else self.routes_NLK[:, self.layer].long()
        chosen_NK = torch.where(self.real_N1, routes_NK, own_NK)
        with torch.no_grad():  # out of place, for a layer that is computed again in the backward pass
            tokens_NK = self.real_N1.expand_as(own_NK).double()
            load_E = torch.zeros_like(scores_NE[0], dtype=torch.double)
            load_E = load_E.index_add(0, chosen_NK.flatten(), tokens_NK.flatten())
            missed = ((chosen_NK[:, :, None] != own_NK[:, None]).all(-1) * tokens_NK).sum()
            self.counts[self.layer] = self.counts.get(self.layer, 0) + torch.cat([load_E, missed[None]])
        return torch.return_types.topk((scores_NE.gather(-1, chosen_NK), chosen_NK))

    def set(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor | None, routes_BTLK) -> None:
        """Before a forward of `ids_BS`: which experts each layer chose for these tokens (and others after
        them), or None. Of a row, `lengths_B` tokens count; without, none is replayed or counted.

        Routes stay until the next call, as a backward pass may route again. Raises ValueError where they do
        not fit the model.
        """
        self.real_N1 = self.routes_NLK = None
        if routes_BTLK is not None and not self.routers:
            raise ValueError(f"no known router in a {self.config.model_type}: use --router-replay off")
        if not self.routers or lengths_B is None:
            return
        real_BS = torch.arange(ids_BS.shape[1]) < lengths_B[:, None]
        self.real_N1 = real_BS.flatten()[:, None].to(ids_BS.device)
        if routes_BTLK is not None:
            experts, top = len(next(iter(self.routers.values())).weight), int(routes_BTLK.max())
            model = self.config.num_hidden_layers, self.config.num_experts_per_tok
            if routes_BTLK.shape[2:] != model or top >= experts or int(routes_BTLK.min()) < 0:
                routes = f"{tuple(routes_BTLK.shape[2:])} up to expert {top}"
                raise ValueError(f"routes of (layers, k) {routes}: the model has {model}, {experts} experts")
            self.routes_NLK = routes_BTLK[:, : ids_BS.shape[1]].flatten(0, 1)

    def metrics(self) -> dict:
        """`moe/*` since the last call as (sum, count), equal on all ranks: a collective. Raises ValueError
        where the replayed experts are far from those that the trainer would choose."""
        unseen = self.routers.keys() - self.counts.keys()
        if unseen and self.routes_NLK is not None:
            why = f"the routers of layers {sorted(unseen)} chose by something else than topk"
            raise ValueError(f"a {self.config.model_type}: {why}: use --router-replay off")
        if unseen or not self.routers:
            return {}
        counts = torch.stack([self.counts[layer] for layer in self.routers])
        dist.all_reduce(counts)
        self.counts, load_LE, experts = {}, counts[:, :-1], counts.shape[1] - 1
        share_LE, missed = load_LE / load_LE.sum(1, keepdim=True), float(counts[:, -1].sum() / load_LE.sum())
        chance = 1 - self.config.num_experts_per_tok / experts
        if missed > MISMATCH_BOUND * chance:
            why = f"{missed:.0%} of the replayed experts are not those of the trainer's router"
            raise ValueError(f"{why}; of random ones {chance:.0%} would be: they are not these tokens'")
        entropy = -torch.xlogy(share_LE, share_LE).sum(1).mean() / math.log(experts)
        found = {"moe/load_entropy": (entropy, 1), "moe/max_load": (share_LE.max() * experts, 1)}
        return found | {"moe/route_mismatch": (missed, self.routes_NLK is not None)}
