"""The whole model an adapter makes of its base: W + scaling · B A for every linear it sits on (Hu et al. 2021, LoRA,
section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from workers import lora
from workers.lora import Adapter, LoraPair
from workers.training.engine import Engine


@torch.no_grad()
def merged(engine: Engine, adapter: Adapter) -> dict[str, Tensor]:
    """Every parameter by its name in an unwrapped model, on the CPU of rank 0; nothing on the others. A collective.

    Computed in fp32 and rounded once, to the base's dtype. A tied head has an entry only when the adapter sits on it.
    """
    model = engine.base.model
    found: dict[str, Tensor] = {}
    for wrapped, parameter in model.named_parameters(remove_duplicate=False):
        name = lora.unwrapped_name(model, wrapped)
        pair = adapter.pairs.get(name.removesuffix(".weight"))
        if pair is None and name in model.all_tied_weights_keys:
            continue
        with engine.whole(parameter):
            if engine.ranks.rank == 0:
                whole = parameter if pair is None else _added(parameter, pair, adapter.scaling)
                found[name] = whole.detach().to("cpu")  # no copy on a CPU: the base is frozen
    return found


def _added(weight: Tensor, pair: LoraPair, scaling: float) -> Tensor:
    return torch.addmm(weight.float(), pair.b, pair.a, alpha=scaling).to(weight.dtype)
