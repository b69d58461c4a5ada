"""Logprobs and gradients of an LM head against log_softmax on complete fp64 logits; ranks without a micro-batch."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from app.domain.ops import ForwardBackward, LoraSpec
from tests.parity.datums import batch, supervised
from workers.backends.training import lm_head, outputs
from workers.backends.training.architectures import LogitRule
from workers.backends.training.batch_ops import Job
from workers.backends.training.lm_head import ChunkSizes, LmHead, Scored
from workers.backends.training.outputs import PolicyOutputs
from workers.backends.training.passes import Pass
from workers.backends.training.sequence_parallel import ALONE
from workers.models.adapter import Adapter, LoraPair

ROWS, WIDTH, VOCAB = 23, 8, 50
RULES = {"plain": LogitRule(), "scaled": LogitRule(scale=0.25), "capped": LogitRule(scale=2.0, cap=3.0)}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The compiled exponentials. Without Python's headers torch compiles nothing, and runs its own trace of them."""
    found = lm_head._compiled()
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        found = torch.compile(lm_head._exponentials, dynamic=True, backend="aot_eager")
    recorder = Mock(wraps=found)
    monkeypatch.setattr(lm_head, "_compiled", lambda: recorder)
    return recorder


def adapter(seed: int, rank: int) -> Adapter:
    torch.manual_seed(seed)
    pair = LoraPair(nn.Parameter(torch.randn(rank, WIDTH)), nn.Parameter(torch.randn(VOCAB, rank)))
    return Adapter(LoraSpec(rank, alpha=2.0), {"lm_head": pair})


def by_hand(
    hidden: Tensor, weight: Tensor, targets: Tensor, segments: Sequence[tuple[Adapter, int]], rule: LogitRule
) -> Tensor:
    """Differentiable reference, computed in one piece."""
    shares = torch.split(hidden, [count for _, count in segments])
    logits = hidden @ weight.t() + torch.cat(
        [
            one.scaling * x @ one.pairs["lm_head"].a.to(x.dtype).t() @ one.pairs["lm_head"].b.to(x.dtype).t()
            if one.pairs
            else x.new_zeros(len(x), VOCAB)
            for (one, _), x in zip(segments, shares, strict=True)
        ]
    )
    logits = logits * rule.scale
    if rule.cap is not None:
        logits = rule.cap * torch.tanh(logits / rule.cap)
    return torch.log_softmax(logits, -1).gather(-1, targets)


@pytest.mark.parametrize(
    ("rule", "fused"),
    [*((rule, False) for rule in RULES.values()), (LogitRule(), True)],
    ids=[*RULES, "plain, compiled as on a GPU"],
)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("zeros", [0, 3, 20])
@pytest.mark.parametrize(("chunk", "kept"), [(64, 2**26), (7, 2**26), (7, 0)], ids=["one", "several", "made again"])
def test_logprobs_and_all_gradients_equal_log_softmax(
    monkeypatch: pytest.MonkeyPatch,
    compiled: Mock,
    rule: LogitRule,
    fused: bool,
    width: int,
    zeros: int,
    chunk: int,
    kept: int,
) -> None:
    monkeypatch.setattr(outputs, "chunk_sizes", lambda device: ChunkSizes(chunk, 2**18, kept))
    torch.manual_seed(0)
    weight, hidden = torch.randn(VOCAB, WIDTH), torch.randn(ROWS, WIDTH)
    targets, seed = torch.randint(0, VOCAB, (ROWS, width)), torch.randn(ROWS, width)
    targets[:, -1] = targets[:, 0]  # the same token twice
    seed[torch.randperm(ROWS)[:zeros]] = 0
    seed[0, 0], seed[0, 1:] = 1.0, 0.0  # a token of which one target alone has a gradient
    seed[-1, 0] = -seed[-1, 1:].sum() if width > 1 else 1.0  # a row whose gradients cancel
    segments = [(adapter(1, 4), 10), (Adapter(LoraSpec(1), {}), 5), (adapter(2, 2), ROWS - 15)]
    with torch.no_grad():
        read = PolicyOutputs(LmHead(weight, "lm_head", rule, fused=fused), hidden, targets, segments, keep=True)
        gradient = read.gradient(seed)
    assert compiled.called == fused
    found = {
        "hidden": gradient,
        **{f"{i}.{part}": getattr(segments[i][0].pairs["lm_head"], part).grad for i in (0, 2) for part in "ab"},
    }
    for i in (0, 2):
        for tensor in (segments[i][0].pairs["lm_head"].a, segments[i][0].pairs["lm_head"].b):
            tensor.grad = None
    leaf = hidden.double().requires_grad_()
    wanted = by_hand(leaf, weight.double(), targets, segments, rule)
    torch.testing.assert_close(read.scores.double(), wanted, rtol=1e-5, atol=1e-5)
    wanted.backward(seed.double())
    expected = {
        "hidden": leaf.grad,
        **{f"{i}.{part}": getattr(segments[i][0].pairs["lm_head"], part).grad for i in (0, 2) for part in "ab"},
    }
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name].double(), rtol=1e-4, atol=1e-5, msg=name)


def test_given_logits_are_read_like_a_heads_and_left_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB).mul_(5)
    before = logits.clone()
    targets, seed = torch.randint(0, VOCAB, (ROWS, 2)), torch.randn(ROWS, 2)
    leaf = logits.double().requires_grad_()
    wanted = torch.log_softmax(leaf, -1).gather(-1, targets)
    wanted.backward(seed.double())
    read = PolicyOutputs(
        LmHead(None, "lm_head", LogitRule()), logits, targets, [(Adapter(LoraSpec(1), {}), ROWS)], keep=True
    )
    torch.testing.assert_close(read.scores.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(read.gradient(seed).double(), leaf.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_exponentials_are_those_of_the_loop(dtype: torch.dtype) -> None:
    """As a GPU computes them."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(VOCAB, WIDTH).to(dtype), torch.randn(ROWS, WIDTH).to(dtype)
    targets, segments = torch.randint(0, VOCAB, (ROWS, 2)), [(adapter(1, 4), ROWS)]
    with torch.no_grad():
        loop, compiled = (
            LmHead(weight, "lm_head", LogitRule(), fused=fused).score(hidden, targets, segments)
            for fused in (False, True)
        )
    for name in ("logprobs", "exps", "total"):
        found, wanted = getattr(compiled, name), getattr(loop, name)
        assert found.dtype is wanted.dtype
        torch.testing.assert_close(found, wanted)


def test_bfloat16_logits_are_reduced_in_fp32_and_confident_targets_keep_their_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, 4096).bfloat16()
    targets = torch.randint(0, 4096, (ROWS, 1))
    logits.scatter_(1, targets, 18.0)  # probabilities within 1e-4 of 1
    read = PolicyOutputs(
        LmHead(None, "lm_head", LogitRule()), logits, targets, [(Adapter(LoraSpec(1), {}), ROWS)], keep=True
    )
    leaf = logits.double().requires_grad_()
    wanted = torch.log_softmax(leaf, -1).gather(-1, targets)
    assert read.scores.dtype is torch.float32
    # fp32 numbers about 18, from which the scores are subtracted, are 2^-19 = 1.9e-6 apart.
    torch.testing.assert_close(read.scores.double(), wanted.detach(), rtol=1e-4, atol=2e-6)
    wanted.sum().backward()
    found = read.gradient(torch.ones(ROWS, 1)).double()
    assert leaf.grad is not None
    assert (found - leaf.grad).norm() < 0.01 * leaf.grad.norm()


@pytest.mark.parametrize(("vocabulary", "rows"), [(2**17, 256), (2**18, 128)])
def test_the_logits_of_a_chunk_stop_growing_with_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, rows: int
) -> None:
    sizes: list[int] = []
    score = LmHead.score

    def noted(head: LmHead, hidden: Tensor, *others: Any, **named: Any) -> Scored:
        sizes.append(len(hidden))
        return score(head, hidden, *others, **named)

    monkeypatch.setattr(LmHead, "score", noted)
    head = LmHead(torch.zeros(vocabulary, 1), "lm_head", LogitRule())
    hidden, targets = torch.zeros(300, 1), torch.zeros(300, 1, dtype=torch.int64)
    PolicyOutputs(head, hidden, targets, [(Adapter(LoraSpec(1), {}), 300)], keep=False)
    assert sum(sizes) == 300
    assert max(sizes) == rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_entropy_is_that_of_the_whole_distribution(
    monkeypatch: pytest.MonkeyPatch, rule: LogitRule, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(outputs, "chunk_sizes", lambda device: ChunkSizes(7, 2**18, 2**26))
    torch.manual_seed(0)
    given, targets = torch.randn(ROWS, VOCAB).mul(5).to(dtype), torch.randint(0, VOCAB, (ROWS, 1))
    found = PolicyOutputs(LmHead(None, "lm_head", rule), given, targets, [], keep=False, entropy=True).entropy
    logits = given.double() * rule.scale
    if rule.cap is not None:
        logits = rule.cap * torch.tanh(logits / rule.cap)
    assert found is not None
    torch.testing.assert_close(found[:, 0], torch.distributions.Categorical(logits=logits).entropy().float())


def test_an_entropy_without_choice_is_zero() -> None:
    certain = torch.tensor([[0.0, -torch.inf, -torch.inf], [300.0, 0.0, -300.0]])
    targets = torch.zeros(2, 1, dtype=torch.int64)
    found = PolicyOutputs(LmHead(None, "lm_head", LogitRule()), certain, targets, [], keep=False, entropy=True).entropy
    assert found is not None
    assert found.flatten().tolist() == [0.0, 0.0]


class SecondRank:
    """The engine of the second of two ranks; `seen` holds the tokens that it runs."""

    packed, collective_passes, sequence, routed = True, True, ALONE, (0, 0)
    base = SimpleNamespace(device=torch.device("cpu"), images=None)
    ranks = SimpleNamespace(rank=1, size=2, sum_=lambda tensors: None)

    def __init__(self) -> None:
        self.hidden_states, self.seen = self, list[list[int]]()

    def __call__(self, tokens: Tensor, *_: object, **__: object) -> Tensor:
        self.seen.append(tokens.tolist())
        return torch.zeros(len(tokens), WIDTH)

    def head(self) -> Any:
        return nullcontext()

    def rest(self) -> None:
        pass


def test_a_rank_without_a_micro_batch_runs_a_token_of_the_batch_and_no_padding() -> None:
    engine: Any = SecondRank()
    datums = supervised(0, (5, 9))
    op = ForwardBackward(batch(datums), "cross_entropy", {}, forward_only=True)
    job = Job.of(op, Mock(adapter=None), torch.device("cpu"))
    Pass(engine, [job], 64).run(lambda: None)
    assert engine.seen in [[[int(datum["tokens"][0])]] for datum in datums]
    assert engine.seen != [[0]]
