"""`python -m tests.parity.fused CASE...`, under TRITON_INTERPRET=1: fused kernels beside transformers' own layers.

A case is one of tests/parity/architectures.py, or "CASE: ACTIVATION" for another activation than its own.

Prints as JSON, for each case, the relative errors of hidden states and of their gradient in the embeddings, and the
kernels that ran. It has a process of its own, because Triton chooses its interpreter when kernels are defined.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import liger_kernel.ops.geglu
import liger_kernel.ops.rms_norm
import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from tests.parity import architectures
from workers.models import fused, lora

_TOKENS = 8
_converted = interpreter._implicit_cvt
_run = interpreter.InterpretedFunction.run


def _with_floats(argument: Any) -> Any:
    """The interpreter leaves a float as it is. The compiler makes fp32 of it."""
    if isinstance(argument, float):
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
    return _converted(argument)


def _prepare(ran: Counter[str]) -> None:
    """Lets the kernels run on a CPU, with functions of CUDA's library in Triton's own terms, and counts them."""
    interpreter._implicit_cvt = _with_floats
    liger_kernel.ops.rms_norm.rsqrt = lambda x: 1.0 / tl.sqrt(x)
    liger_kernel.ops.geglu.tanh = lambda x: 2.0 * tl.sigmoid(2.0 * x) - 1.0
    fused._on_gpu = lambda tensor: True

    def counted(function: Any, *arguments: Any, **named: Any) -> Any:
        ran[function.fn.__name__] += 1
        return _run(function, *arguments, **named)

    interpreter.InterpretedFunction.run = counted


def _hidden(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states of the language model, and the gradient of a weighted sum of them in the embeddings."""
    body = getattr(model.model, "language_model", model.model)
    embeddings = model.get_input_embeddings()(tokens).detach().requires_grad_()
    hidden = body(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), embeddings.grad


def _measured(case: str, ran: Counter[str]) -> dict[str, Any]:
    with TemporaryDirectory() as made:
        name, _, act = case.partition(": ")
        folder = architectures.build(name, Path(made), **({"hidden_act": act} if act else {}))
        auto = architectures.auto_class(type(architectures.config_of(name)))
        model = auto.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones or zeros, which would hide a wrong use of them
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        lora.wrap(model)
        tokens = torch.randint(0, 256, (1, _TOKENS))
        own = _hidden(model, tokens)
        known = fused.fuse(model)
        found, kernels = _counted(model, tokens, ran)
        another = auto.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    another.load_state_dict(weights)
    lora.wrap(another)
    fused._on_gpu = lambda tensor: False
    again, of_another = _counted(another, tokens, ran)
    fused._on_gpu = lambda tensor: True
    return {
        "fused": known,
        "errors": [float((one - other).norm() / one.norm()) for one, other in zip(own, found, strict=True)],
        "kernels": kernels,
        "another has the same bits": all(map(torch.equal, own, again)),
        "kernels of another": of_another,
    }


def _counted(model: Any, tokens: Tensor, ran: Counter[str]) -> tuple[tuple[Tensor, Tensor], dict[str, int]]:
    ran.clear()
    return _hidden(model, tokens), dict(ran)


if __name__ == "__main__":
    ran: Counter[str] = Counter()
    _prepare(ran)
    print(json.dumps({case: _measured(case, ran) for case in sys.argv[1:]}))
