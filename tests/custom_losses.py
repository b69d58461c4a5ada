"""Custom losses for tests: functions as a client writes them, traced and encoded by the SDK itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, as everybody writes it
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, trace_loss
from torch import Tensor

from app.domain.losses import CustomLoss
from app.wire import custom_loss

Returned = tuple[Tensor, dict[str, Tensor]]


def dpo(logprobs: Tensor, chosen: Tensor, rejected: Tensor, reference: Tensor) -> Returned:
    """Direct preference optimisation of a pair in one sequence: two masks, and the reference model's margin."""
    margin = (logprobs * chosen).sum() - (logprobs * rejected).sum() - reference
    loss = -F.logsigmoid(0.1 * margin)
    return loss, {"custom/margin:mean": margin, "custom/right:sum": (margin > 0).float()}


DPO_RANKS = {"logprobs": 1, "chosen": 1, "rejected": 1, "reference": 0}


def sdft(logprobs: Tensor, teacher: Tensor, mask: Tensor) -> Returned:
    """Self-distillation: KL(student || teacher) over the K candidates of each token, both renormalised."""
    student = torch.log_softmax(logprobs, dim=-1)
    per_token = (student.exp() * (student - torch.log_softmax(teacher, -1))).sum(-1)
    tokens = mask.sum().clamp(min=1.0)
    return (per_token * mask).sum() / tokens, {"custom/kl:mean": per_token.mean(), "custom/tokens:sum": tokens}


SDFT_RANKS = {"logprobs": 2, "teacher": 2, "mask": 1}


def square(logprobs: Tensor) -> Returned:
    return logprobs.square().sum(), {}


def body(fn: Callable[..., Any], ranks: Mapping[str, int], session_id: str = "session", seq: int = 0) -> dict[str, Any]:
    """Request body of create_custom_loss, as the SDK sends it."""
    handle = trace_loss(fn, ranks, session_id)
    return {
        "session_id": session_id,
        "custom_loss_seq_id": seq,
        "name": handle.name,
        "inputs": [given.model_dump() for given in handle.inputs],
        "graph": encode_graph(handle).model_dump(mode="json"),
        "type": "create_custom_loss",
    }


def parsed(fn: Callable[..., Any], ranks: Mapping[str, int]) -> CustomLoss:
    """The server's parsed form of the loss."""
    sent = body(fn, ranks)
    return custom_loss.parse(sent["name"], sent["inputs"], sent["graph"])


def handle(fn: Callable[..., Any], ranks: Mapping[str, int]) -> LossHandle:
    return trace_loss(fn, ranks, "session")
