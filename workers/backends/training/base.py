"""The training backend protocol: it separates exact bookkeeping (journal, order, fences) from computation.

The worker decides *which* Op runs; a backend only runs it. `apply` is the one way to change a model. So a live run, a
replay after a crash and a pass merged over several tenants run the same code. A backend does no Redis, no object
store and no seq bookkeeping; the paths it receives are local folders. No torch type crosses this protocol.

Every implementation passes tests/conformance/test_training_backend.py.

Rank 0 sends its calls to the other ranks as bytes: `encode_apply` and `encode_call` write them, `decode` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from app.domain import adapters
from app.domain import ops as domain_ops
from app.domain.ops import DropGradients, ForwardBackward, LoraSpec, OptimStep
from app.domain.records import BaseModelInfo
from app.domain.results import Output
from app.errors import OpError

ADAPTER_FILE, ADAPTER_CONFIG_FILE = adapters.TENSORS_FILE, adapters.CONFIG_FILE
OPTIMIZER_FILE = "optimizer.safetensors"
GRADIENTS_FILE = "gradients.safetensors"


@dataclass(frozen=True, slots=True)
class Create:
    """Creates a fresh adapter from its spec, or from a captured folder (then the spec is the checkpoint's).

    `lora` is None for full fine-tuning. A `critic` has a value head in the place of the base's head. With `gradients`
    the model also gets the folder's pending gradient, if that has one.
    """

    lora: LoraSpec | None
    source: Path | None = None
    optimizer: bool = False
    critic: bool = False
    gradients: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Replaces weights from a captured folder. Loads the optimizer state too if `optimizer`; else it is reset.

    Pending gradients are dropped. A folder of another shape (rank, targets) is a UserOpError and changes nothing.
    """

    source: Path
    optimizer: bool


BackendOp = Create | Load | ForwardBackward | OptimStep | DropGradients
Call = tuple[Any, ...]
"""The name of a method, followed by its arguments."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Captured files of `size` bytes, without the small ones beside the tensors.

    A call writes them into a folder, from any thread and at any time. It raises OSError when the disk cannot store
    them.
    """

    write: Callable[[Path], None]
    size: int

    def __call__(self, folder: Path) -> None:
        try:
            self.write(folder)
        except SafetensorError as error:  # only the disk can still fail: it is full, or the file is too large for it
            raise OSError(f"{folder.name} was not written: {error}") from error


class TrainingBackend(Protocol):
    """One base model with many adapters, or with fully fine-tuned models, in one process or one rank group."""

    def open(self) -> BaseModelInfo:
        """Loads the base model. Called once, before anything else. Raises SetupError."""
        ...

    def apply(self, ops: Mapping[str, BackendOp]) -> Mapping[str, Output | OpError]:
        """Runs at most one Op for each model id. Each Op is all-or-nothing: an OpError leaves that model untouched,
        except WeightsOverflow: close that model.

        Ops of different models may share a pass. With one Op in `ops`, the resulting bits depend only on the Op and the
        model's own state; those of an OptimStep always do. An exception other than a returned OpError means that every
        state here is suspect.
        """
        ...

    def capture(self, model_id: str, *, optimizer: bool, gradients: bool = False, rounded: bool = False) -> Writer:
        """Copies the model as it is now, with `optimizer` its moments and step count too; later Ops do not change it.

        The files are an adapter as PEFT files (ADAPTER_FILE, ADAPTER_CONFIG_FILE), or all weights as a Hugging Face
        folder, and OPTIMIZER_FILE. Loading them with the optimizer gives the same bits. With `gradients`, a pending
        gradient is in GRADIENTS_FILE, from which `Create` makes the same bits. With `rounded`, for a sampler, weights
        are in the dtype that the base computes with; all weights without their optimizer always are. Raises
        ServerOpError for an unknown model.
        """
        ...

    def export(self, model_id: str) -> Writer:
        """Copies the full model as it is now, the adapter merged into the base, to be written as a Hugging Face folder.

        The folder has the base's dtype and loads without PEFT. A fully fine-tuned critic gives a folder
        of a sequence classifier. Raises UserOpError for a critic that is an adapter, because PEFT merges no value head,
        and ServerOpError for an unknown model.
        """
        ...

    def close(self, model_id: str) -> None:
        """Forgets a model and frees its memory. Accepts unknown ids, and works on a backend that is not healthy."""
        ...

    def free_memory(self) -> None:
        """Frees cached device memory and pinned host memory that no tensor uses, on every rank. The caller makes no
        other call meanwhile."""
        ...

    def healthy(self) -> bool:
        """Returns False once this process cannot go on: its ranks are out of step, one or a device is lost, or a call
        stalls.

        The worker then exits and is restarted. May be called from any thread.
        """
        ...

    def follow(self) -> None:
        """Takes part in the calls of rank 0 until its `shutdown`. Every other rank runs this after `open`."""
        ...

    def shutdown(self) -> None:
        """Releases the other ranks. Nothing may be called afterwards. Never waits for a backend that is not healthy."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Returns the running configuration as JSON.

        Callers rely on `devices` (names; "cpu" without a GPU) and `micro_batch_tokens`. The rest is for readers.
        """
        ...


def encode_apply(ops: Mapping[str, BackendOp]) -> bytes:
    """Encodes backend calls as bytes for the other ranks of the group: the journal's codec plus Create and Load."""
    return domain_ops.encode(["apply", [[model_id, _pack(op)] for model_id, op in ops.items()]])


def encode_call(method: str, *arguments: str | bool) -> bytes:
    return domain_ops.encode([method, *arguments])


def decode(data: bytes) -> Call:
    """Decodes the bytes of both encoders. An apply's Ops come back as a dict in their order."""
    method, *arguments = domain_ops.decode(data)
    if method == "apply":
        return method, {model_id: _unpack(packed) for model_id, packed in arguments[0]}
    return method, *arguments


def _pack(op: BackendOp) -> list[Any]:
    match op:
        case Create():
            return [
                "create",
                op.lora,
                None if op.source is None else str(op.source),
                op.optimizer,
                op.critic,
                op.gradients,
            ]
        case Load():
            return ["load", str(op.source), op.optimizer]
        case _:
            return ["op", op]


def _unpack(packed: tuple[Any, ...]) -> BackendOp:
    match packed:
        case ("create", lora, source, optimizer, critic, gradients):
            return Create(lora, None if source is None else Path(source), optimizer, critic, gradients)
        case ("load", source, optimizer):
            return Load(Path(source), optimizer)
        case (_, op):
            return op  # type: ignore[no-any-return]
    raise ValueError(f"not a packed Op: {packed[:1]!r}")
