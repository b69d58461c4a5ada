"""A TrainingBackend with three numbers per model: microseconds per Op, exact to the bit, or noisy on demand.

With noise, each run of a forward_backward gives different gradients, as a GPU may. Only then does a missing guard show:
a deterministic zombie computes the same bits again and hides it. A shared pass rounds a little differently. Each state
also lists the batches it was made from, so that every effect can be counted. The backend passes test_vector_backend.py,
as the real one does.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.domain.ops import AdamParams, Batch, DropGradients, ForwardBackward, OptimStep, Ragged
from app.domain.records import BaseModelInfo
from app.domain.results import Done, ForwardBackwardOutput, OptimStepOutput, Output
from app.errors import OpError, UserOpError
from tests.property.faults import DeviceError
from workers.backends.training.base import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    GRADIENTS_FILE,
    OPTIMIZER_FILE,
    BackendOp,
    Create,
    Load,
    Writer,
)

POISON, BREAKING = "poison", "breaking"
# Added to a gradient for each further model in a pass.
_ROUNDING = 1e-9


@dataclass
class State:
    """State of a model.

    `pending` and `steps` hold the batches behind the gradient, and behind each step since a create or load.
    """

    rank: int
    weight: float
    moment: float = 0.0
    gradient: float = 0.0
    pending: list[int] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)


def batch(number: int) -> Batch:
    """A batch that its number identifies."""
    return Batch(Ragged.of([np.array([number])], np.int32), {"target_tokens": Ragged.of([np.array([1])], np.int64)})


def backward(number: int, loss_fn: str = "cross_entropy", *, forward_only: bool = False) -> ForwardBackward:
    """Computes a gradient. `loss_fn` POISON fails as a user's fault does, BREAKING as a device's."""
    return ForwardBackward(batch(number), loss_fn, forward_only=forward_only)


def optim_step(rate: float = 0.125) -> OptimStep:
    return OptimStep(AdamParams(learning_rate=rate))


@dataclass
class VectorBackend:
    """Backend of three numbers per model.

    With `fragile` a device error makes the process useless, as with several ranks. `done` counts passes with Ops of
    several models ("shared"), and models that were made with a pending gradient ("gradients restored").
    """

    noise: random.Random | None = None
    fragile: bool = False
    broken: bool = False
    done: Counter[str] = field(default_factory=Counter)
    states: dict[str, State] = field(default_factory=dict)

    def open(self) -> BaseModelInfo:
        raise NotImplementedError("its tests know what it is")

    def apply(self, ops: Mapping[str, BackendOp]) -> Mapping[str, Output | OpError]:
        self.done["shared"] += len(ops) > 1
        rounding = _ROUNDING * (len(ops) - 1)
        return {model_id: self._one(model_id, op, rounding) for model_id, op in ops.items()}

    def capture(self, model_id: str, *, optimizer: bool, gradients: bool = False, rounded: bool = False) -> Writer:
        state = self.states[model_id]
        content: dict[str, Any] = {
            ADAPTER_FILE: {"weight": state.weight.hex(), "steps": state.steps},
            ADAPTER_CONFIG_FILE: {"r": state.rank},
        }
        if optimizer:
            content[OPTIMIZER_FILE] = {"moment": state.moment.hex()}
        if gradients and state.pending:
            content[GRADIENTS_FILE] = {"gradient": state.gradient.hex(), "pending": state.pending}
        files = {name: json.dumps(fields) for name, fields in content.items()}

        def write(folder: Path) -> None:
            for name, text in files.items():
                (folder / name).write_text(text)

        return Writer(write, sum(map(len, files.values())))

    def export(self, model_id: str) -> Writer:
        content = json.dumps({"weight": self.states[model_id].weight.hex()})
        return Writer(lambda folder: (folder / "config.json").write_text(content), len(content))

    def close(self, model_id: str) -> None:
        self.states.pop(model_id, None)

    def healthy(self) -> bool:
        return not (self.fragile and self.broken)

    def free_memory(self) -> None:
        """Does nothing: it is in host memory."""

    def follow(self) -> None:
        raise NotImplementedError("there is one rank")

    def shutdown(self) -> None:
        self.states.clear()

    def describe(self) -> Mapping[str, Any]:
        return {"models": len(self.states), "devices": ["cpu"], "micro_batch_tokens": 1024}

    def _one(self, model_id: str, op: BackendOp, rounding: float) -> Output | OpError:
        if isinstance(op, Create):
            return self._create(model_id, op)
        state = copy.deepcopy(self.states[model_id])
        try:
            output = self._change(state, op, rounding)
        except OpError as error:
            return error
        self.states[model_id] = state
        return output

    def _create(self, model_id: str, op: Create) -> Output | OpError:
        fresh = State(op.lora.rank, 1.0 + op.lora.seed)
        try:
            self.states[model_id] = _read(op.source, op.optimizer, op.gradients) if op.source else fresh
        except OpError as error:
            return error
        self.done["gradients restored"] += bool(self.states[model_id].pending)
        return Done()

    def _change(self, state: State, op: BackendOp, rounding: float) -> Output:
        match op:
            case ForwardBackward():
                return self._backward(state, op, rounding)
            case OptimStep():
                return _step(state, op)
            case DropGradients():
                state.gradient, state.pending = 0.0, []
            case Load():
                loaded = _read(op.source, op.optimizer)
                if loaded.rank != state.rank:
                    raise UserOpError(f"the checkpoint has rank {loaded.rank}, the model {state.rank}")
                state.__dict__.update(loaded.__dict__)
            case _:
                raise TypeError(op)
        return Done()

    def _backward(self, state: State, op: ForwardBackward, rounding: float) -> Output:
        number = int(op.batch.tokens.values[0])
        gradient = float(np.sin(number + state.weight)) + (self.noise.gauss(0, 1) if self.noise else 0.0) + rounding
        if not op.forward_only:
            state.gradient += gradient
            state.pending.append(number)
        if op.loss_fn == POISON:
            raise UserOpError("datum 0 has no finite loss")
        if op.loss_fn == BREAKING:
            self.broken = True
            for other in self.states.values():
                other.weight = float("nan")
            raise DeviceError("out of memory")
        seen = np.array([gradient, state.weight, state.moment, state.gradient]).view(np.float32)
        return ForwardBackwardOutput(Ragged.of([seen], np.float32), {"loss:sum": gradient})


def _step(state: State, op: OptimStep) -> Output:
    state.moment = 0.75 * state.moment + state.gradient
    state.weight -= op.params.learning_rate * state.moment
    state.steps.append(state.pending)
    state.gradient, state.pending = 0.0, []
    return OptimStepOutput({"weight": state.weight})


def _read(folder: Path, optimizer: bool, gradients: bool = False) -> State:
    try:
        adapter = json.loads((folder / ADAPTER_FILE).read_bytes())
        rank = json.loads((folder / ADAPTER_CONFIG_FILE).read_bytes())["r"]
        moment = json.loads((folder / OPTIMIZER_FILE).read_bytes())["moment"] if optimizer else (0.0).hex()
        has_gradients = gradients and (folder / GRADIENTS_FILE).exists()
        found = json.loads((folder / GRADIENTS_FILE).read_bytes()) if has_gradients else {}
    except (OSError, ValueError) as error:
        raise UserOpError(f"the checkpoint in {folder.name} cannot be loaded: {type(error).__name__}") from None
    numbers = (float.fromhex(text) for text in (adapter["weight"], moment, found.get("gradient", "0")))
    return State(rank, *numbers, found.get("pending", []), adapter["steps"])
