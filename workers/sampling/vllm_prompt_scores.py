"""A repair of vLLM 0.32, for its worker processes: prompt_logprobs under an adapter on lm_head.

vLLM maps rows of the head's input to adapters by the tokens it samples, one for each request. To score a prompt it
runs the head over a slice of the batch's hidden states with that same mapping: on a CPU the shapes clash and the
engine dies, on a GPU rows silently get another adapter or none. The slice is a view, so where it begins says which
tokens of the batch it holds, and vLLM has the adapter of each of those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def repair() -> None:
    """Make vLLM's LoRA kernels add the right adapter to scored prompt tokens."""
    from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    kernels: list[type[PunicaWrapperBase]] = [PunicaWrapperCPU, PunicaWrapperGPU]
    for wrapper in kernels:
        _repair(wrapper)


def _repair(wrapper: Any) -> None:
    sampled = wrapper.add_lora_logits

    def add_lora_logits(
        self: Any, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: Any
    ) -> Any:
        if not is_slice(x, len(self.sampler_indices)):
            return sampled(self, y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs)
        first = x.storage_offset() // x.stride(0)
        add_by_row(y, x, lora_a_stacked, lora_b_stacked, self.token_lora_indices[first : first + len(x)])
        return y

    wrapper.add_lora_logits = add_lora_logits


def is_slice(hidden: Tensor, sampled: int) -> bool:
    """Whether rows [n, H] are a slice of the batch, and not a copy of its `sampled` rows that are sampled from.

    Only a slice that is the whole batch fills its memory as a copy does; it has `sampled` rows only when every token
    is sampled from, and then the two mean the same.
    """
    return len(hidden) != sampled or hidden.untyped_storage().nbytes() != hidden.numel() * hidden.element_size()


def add_by_row(logits: Tensor, hidden: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> None:
    """Add each row's adapter in place: logits [n, V], hidden [n, H], a [S, 1, r, H], b [S, 1, V, r], slots [n].

    A slot of -1 is no adapter. The scaling is part of b.
    """
    for slot in sorted(set(slots.tolist())):
        if slot >= 0:
            rows = slots == slot
            low = hidden[rows].to(torch.float32) @ a[slot, 0].to(torch.float32).t()
            logits[rows] += (low @ b[slot, 0].to(torch.float32).t()).to(logits.dtype)
