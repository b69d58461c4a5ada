"""Reference results of training, by transformers, the real PEFT and torch's AdamW alone.

Imports nothing of Tinsmith. It starts from a base folder and PEFT files, takes one datum at a time (no padding, no
batching, no shared pass), and implements the published formulas independently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

Datum = Mapping[str, np.ndarray]


class Reference:
    """One adapter on one base model, in the state of its PEFT files.

    float64 is a yardstick for fp32. bfloat16 shows how much precision it loses without any code of Tinsmith. Scores and
    losses are at least fp32.
    """

    def __init__(self, base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> None:
        model = self.load(base)
        self.model = PeftModel.from_pretrained(model, adapter, is_trainable=True).to(dtype).eval()
        self.parameters = {
            name.replace(".modules_to_save.", ".").replace(".default.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self._adamw = torch.optim.AdamW(self.parameters.values())

    def load(self, base: Path) -> PreTrainedModel:
        """Loads the class that config.json names: the Auto classes take other layouts of models that read images."""
        named = getattr(transformers, AutoConfig.from_pretrained(base).architectures[0])
        return named.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")

    def scores(self, datum: Datum) -> Tensor:
        """Model outputs that the loss is a function of."""
        return self.logprobs(datum)

    def logits(self, datum: Datum) -> Tensor:
        return _widened(self.model(torch.from_numpy(datum["tokens"].astype(np.int64))[None]).logits[0])

    def logprobs(self, datum: Datum) -> Tensor:
        """Logprobs of every target, in the shape of target_tokens."""
        return _at_targets(self.logits(datum), datum)

    def forward(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        with torch.no_grad():
            return [self.scores(datum).numpy() for datum in datums]

    def backward(
        self,
        datums: Sequence[Datum],
        loss_fn: str,
        config: Mapping[str, float] | None = None,
        at: Sequence[np.ndarray] | None = None,
    ) -> float:
        """Adds the summed loss's gradient to the parameters' `.grad`; returns the loss.

        `at`: scores at which the loss and its slope are taken, datum by datum, instead of the model's own.
        """
        total = 0.0
        for i, datum in enumerate(datums):
            scores = self.scores(datum)
            if at is not None:
                scores = torch.from_numpy(at[i]) + (scores - scores.detach())
            value = loss(loss_fn, scores, datum, config or {})
            value.backward()
            total += value.item()
        return total

    @torch.no_grad()
    def metrics(
        self, datums: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Every metric of the complete request, entropy included."""
        found = []
        for datum in datums:
            logits = self.logits(datum)
            lp = _at_targets(logits, datum)
            entropy = torch.distributions.Categorical(logits=logits).entropy()
            own = {"loss:sum": loss(loss_fn, lp, datum, config or {}), "tokens:sum": torch.tensor(len(datum["tokens"]))}
            found.append(own | _metrics(loss_fn, lp, entropy, datum, config or {}))
        merge = {"sum": sum, "max": max, "min": min}
        return {name: merge[name.split(":")[1]](float(one[name]) for one in found) for name in found[0]}

    @torch.no_grad()
    def size(self, datums: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None = None) -> float:
        """Sum of the tokens' absolute losses.

        Rounding in the loss is measured relative to it, because tokens of either sign may cancel almost completely.
        """
        parts = [token_losses(loss_fn, self.scores(datum), datum, config or {}) for datum in datums]
        return sum(part.abs().sum().item() for part in parts)

    def gradients(self) -> dict[str, np.ndarray]:
        return {name: _widened(p.grad).numpy().copy() for name, p in self.parameters.items() if p.grad is not None}

    def take_gradients(self) -> dict[str, np.ndarray]:
        """Returns `gradients` and sets them to zero."""
        taken = self.gradients()
        self._adamw.zero_grad()
        return taken

    def weights(self) -> dict[str, np.ndarray]:
        return {name: p.detach().numpy().copy() for name, p in self.parameters.items()}

    def norm(self) -> float:
        return float(np.sqrt(sum((w.astype(np.float64) ** 2).sum() for w in self.weights().values())))

    def step(self, params: Mapping[str, float]) -> float:
        """Runs AdamW with `params`, the adam_params of an optim_step. Returns the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), params["grad_clip_norm"] or torch.inf)
        self._adamw.param_groups[0].update(
            lr=params["learning_rate"],
            betas=(params["beta1"], params["beta2"]),
            eps=params["eps"],
            weight_decay=params["weight_decay"],
        )
        self._adamw.step()
        self._adamw.zero_grad()
        return norm.item()


class CriticReference(Reference):
    """A critic: PEFT on transformers' sequence classifier of one label, whose head is applied to every token.

    The head stays fp32 on a base model in bfloat16.
    """

    def __init__(self, base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(base, adapter, dtype)
        if dtype is torch.bfloat16:
            self.classifier.score.float()

    def load(self, base: Path) -> PreTrainedModel:
        return AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=1, dtype=torch.float32, attn_implementation="eager"
        )

    @property
    def classifier(self) -> nn.Module:
        return self.model.base_model.model

    def scores(self, datum: Datum) -> Tensor:
        classifier = self.classifier
        hidden = classifier.model(torch.from_numpy(datum["tokens"].astype(np.int64))[None]).last_hidden_state[0]
        values: Tensor = classifier.score(_widened(hidden))[:, 0]
        return values

    def pooled(self, tokens: np.ndarray) -> float:
        """The classifier's own output for a sequence."""
        with torch.no_grad():
            return self.model(torch.from_numpy(tokens.astype(np.int64))[None]).logits.item()

    @torch.no_grad()
    def metrics(
        self, datums: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        marked = [datum["weights"] != 0 for datum in datums]
        v, old, r = (
            np.concatenate([row[mark] for row, mark in zip(rows, marked, strict=True)])
            for rows in (self.forward(datums), [d["values"] for d in datums], [d["returns"] for d in datums])
        )
        return {
            "loss:sum": sum(loss(loss_fn, self.scores(d), d, config or {}).item() for d in datums),
            "tokens:sum": sum(len(d["tokens"]) for d in datums),
            "loss_tokens:sum": len(v),
            "value:sum": v.sum(),
            "return:sum": r.sum(),
            "squared_return:sum": (r**2).sum(),
            "squared_error:sum": ((v - r) ** 2).sum(),
            "error:max": np.abs(v - r).max(initial=0),
            "clipped:sum": (np.abs(v - old) > (config or {}).get("value_clip", 0.2)).sum(),
        }


class FullReference(Reference):
    """All weights of a model, in the state of its folder."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        self.model = model.eval()
        self.parameters = dict(self.model.named_parameters())
        self._adamw = torch.optim.AdamW(self.parameters.values())


class FullCriticReference(CriticReference):
    """A critic with all weights trained, from the sequence classifier in its folder."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.parameters = dict(self.model.named_parameters())
        self._adamw = torch.optim.AdamW(self.parameters.values())

    @property
    def classifier(self) -> nn.Module:
        return self.model


def loss(name: str, lp: Tensor, datum: Datum, config: Mapping[str, float]) -> Tensor:
    """Summed loss of one datum."""
    return token_losses(name, lp, datum, config).sum()


def token_losses(name: str, lp: Tensor, datum: Datum, config: Mapping[str, float]) -> Tensor:
    given = _given(datum)
    if name == "cross_entropy":
        return -given["weights"] * lp if "weights" in given else -lp
    if name == "ppo_critic":
        held = given["values"] + (lp - given["values"]).clamp(
            -config.get("value_clip", 0.2), config.get("value_clip", 0.2)
        )
        squares = torch.stack([(lp - given["returns"]) ** 2, (held - given["returns"]) ** 2])
        return given["weights"] * squares.amax(0) / 2
    q, a = given["logprobs"], given["advantages"]
    ratio = ratios(name, lp, given)
    if name == "importance_sampling":
        return -ratio * a
    if name in ("ppo", "gspo"):
        return -torch.minimum(ratio * a, clipped(name, ratio, given, config) * a)
    if name == "cispo":
        return -clipped(name, ratio, given, config).detach() * lp * a
    if name == "dro":
        return -(lp * a - 0.5 * config.get("beta", 0.05) * (lp - q) ** 2)
    raise KeyError(name)


def ratios(name: str, lp: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """Factors of the advantages in the loss, token by token."""
    if name != "gspo":
        return torch.exp(lp - given["logprobs"])
    chosen = given["sequence_ratio_mask"] != 0
    s = torch.exp((lp - given["logprobs"])[chosen].mean())
    return s.detach() * torch.exp(lp) / torch.exp(lp).detach()


def clipped(name: str, ratio: Tensor, given: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    defaults = (0.9997, 1.0004) if name == "gspo" else (0.8, 1.2)
    low, high = (
        given.get(f"clip_{side}_threshold", torch.tensor(config.get(f"clip_{side}_threshold", default)))
        for side, default in zip(("low", "high"), defaults, strict=True)
    )
    return torch.minimum(torch.maximum(ratio, low), high)


def _metrics(name: str, lp: Tensor, entropy: Tensor, datum: Datum, config: Mapping[str, float]) -> dict[str, Tensor]:
    """Metrics of one datum with at least one token in the loss."""
    given = _given(datum)
    if name == "cross_entropy":
        own = given["weights"].reshape(len(lp), -1).any(1) if "weights" in given else torch.ones(len(lp)).bool()
        return {"loss_tokens:sum": own.sum(), "entropy:sum": entropy[own].sum()}
    own = given["advantages"] != 0
    ratio = ratios(name, lp, given)
    found = {
        "loss_tokens:sum": own.sum(),
        "entropy:sum": entropy[own].sum(),
        "ratio:sum": ratio[own].sum(),
        "ratio:max": ratio[own].max() if own.any() else torch.tensor(0.0),
        "ratio:min": ratio[own].min() if own.any() else torch.tensor(torch.inf),
        "kl:sum": (given["logprobs"] - lp)[own].sum(),
    }
    if name in ("ppo", "cispo", "gspo"):
        found["clipped:sum"] = (clipped(name, ratio, given, config) != ratio)[own].sum()
    return found


def _at_targets(logits: Tensor, datum: Datum) -> Tensor:
    targets = torch.from_numpy(datum["target_tokens"])
    wide = targets if targets.ndim == 2 else targets[:, None]
    return torch.log_softmax(logits, -1).gather(-1, wide).view(targets.shape)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


def _given(datum: Datum) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in datum.items() if name not in ("tokens", "target_tokens")}


class DecaysSummedInFp64(TorchFunctionMode):
    """Sums the log decays of a gated delta rule in fp64, and takes the exponentials of their differences from that.

    In fp32 these sums round. On an AVX2 processor gradients of decays then differ by 1.5e-5 from the reference's, and
    both from those in fp64 (1.9e-5 and 1.2e-5).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cumsum and args[0].is_floating_point():
            args = (args[0].double(), *args[1:])
        found = func(*args, **(kwargs or {}))
        return found.float() if func is torch.Tensor.exp else found


def relative_error(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Greatest |found - expected| / |expected| over the tensors, in L2 norms."""
    assert found.keys() == expected.keys()
    return max(
        float(np.linalg.norm(found[name] - expected[name]) / max(np.linalg.norm(expected[name]), 1e-30))
        for name in expected
    )
