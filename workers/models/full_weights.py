"""All weights of a model as a Hugging Face folder: a trainer writes it, a sampler and
`AutoModelForCausalLM.from_pretrained` read it.

transformers writes the folder, from a model of the same class without memory of its own. transformers knows how a
checkpoint differs from the model in memory (experts are stacked only there), which tensors are tied, and what is too
large for one file.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import cached_file

from app.domain.records import PROCESSOR_FILES, TOKENIZER_FILES
from app.errors import UserOpError
from app.settings import BaseModelSettings
from workers.backends.training.base import Writer
from workers.models import base_model, quantized

Shape = tuple[int, ...]
# vLLM and most stores are quicker with several files than with one large file.
_SHARD = "5GB"
_GENERATION = "generation_config.json"
# Fields of a configuration that change no logit of a model that runs without dropout.
_WITHOUT_EFFECT = frozenset(
    {
        *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "initializer_range"),
        *("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout"),
        *("id2label", "label2id", "num_labels", "problem_type", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "router_aux_loss_coef"),
        *("quantization_config", "attn_implementation", "experts_implementation"),
    }
)


def huggingface_writer(base: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, tokenizer: str) -> Writer:
    """Returns a writer of safetensors of `dtype`, the configuration and the tokenizer, for a folder without subfolders.

    `base` is a transformers PreTrainedModel; its linears may be wrapped and its parameters split over ranks. Only its
    class, configuration and buffers are read. `tensors` are all of its parameters by their names in an unwrapped model,
    on the CPU; the writer owns them from now on. A tensor tied to another is left out; otherwise the written model has
    it untied. `tokenizer` is a folder or a hub id that was loaded before; nothing is downloaded.

    Raises ValueError when a parameter is missing or unknown. The writer raises OSError when the disk is full.
    """
    config = deepcopy(base.config)
    if tensors.keys() & base.all_tied_weights_keys.keys():
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    with torch.device("meta"):  # the skeleton has neither memory nor values
        skeleton = type(base)(config).to(dtype)
    _check_names(tensors, (name for name, _ in skeleton.named_parameters()))
    buffers = {name: base.get_buffer(name).cpu() for name in _persistent_buffers(skeleton)}
    copied = [*_cached(base.name_or_path, [_GENERATION, *PROCESSOR_FILES]), *_cached(tokenizer, TOKENIZER_FILES)]

    def write(folder: Path) -> None:
        state = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        skeleton.save_pretrained(folder, state_dict=state | buffers, max_shard_size=_SHARD)
        for source in copied:
            shutil.copyfile(source, folder / source.name)

    return Writer(write, sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize)


def write_dequantized(settings: BaseModelSettings, folder: Path) -> None:
    """Writes the weights of a quantised or packed base model as plain ones to `folder`, in the dtype it computes with,
    for an engine that does not know the codes.

    Raises SetupError when the base model cannot be loaded, and OSError when the disk is full.
    """
    base = base_model.load(settings)
    model = base.model
    tensors = {
        name: quantized.plain(weight).detach().cpu()
        for name, weight in quantized.weights(model)
        if name not in model.all_tied_weights_keys
    }
    huggingface_writer(model, tensors, base.dtype, base.tokenizer)(folder)


def _check_names(found: Iterable[str], wanted: Iterable[str]) -> None:
    strange = set(found) ^ set(wanted)
    if strange:
        raise ValueError(
            f"{sorted(strange)[0]} and {len(strange) - 1} other tensors are missing or not part of the model"
        )


def _persistent_buffers(model: Any) -> list[str]:
    names = dict(model.named_buffers()).keys()
    return [name for name in model.state_dict() if name in names]


def _cached(source: str, names: Iterable[str]) -> list[Path]:
    """The files among `names` that a folder has, or the hub cache holds."""
    found = (
        cached_file(
            Path(source).expanduser() if source.startswith("~") else source,
            name,
            local_files_only=True,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        for name in names
    )
    return [Path(path) for path in found if path]


def check_fits(folder: Path, model: Any) -> None:
    """Raises UserOpError unless the folder's model has the same parameters as `model`."""
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            stored = base_model.auto_class(config).from_config(config)
    except (OSError, ValueError) as error:
        raise UserOpError(f"{folder.name} holds no model that can be loaded: {error}") from None
    if _shapes(stored) != _shapes(model) or not _files(folder):
        raise UserOpError(f"{folder.name} holds no weights of this base model")
    _check_same(folder, config, model.config)


def check_config(folder: Path, model: Any) -> None:
    """Raises UserOpError unless the folder's configuration computes what `model` does: the model's own is used."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserOpError(f"{folder.name} holds no model that can be loaded: {error}") from None
    _check_same(folder, config, model.config)


def _check_same(folder: Path, found: Any, wanted: Any) -> None:
    stored, own = found.get_text_config().to_dict(), wanted.get_text_config().to_dict()
    for name in sorted((stored.keys() | own.keys()) - _WITHOUT_EFFECT):
        if stored.get(name) != own.get(name):
            raise UserOpError(
                f"{folder.name} was made with {name} {stored.get(name)!r:.100}, but this base model has "
                f"{own.get(name)!r:.100}"
            )


def tensors_in(folder: Path, wanted: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor, or those of these names, by its name in the files, on the CPU; one at a time is in memory."""
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a handle of safetensors is no dict
                if wanted is None or name in wanted:
                    yield name, file.get_tensor(name)


class Stored:
    """The tensors that a folder with all weights of `model` holds, for an engine that reads the files itself.

    `model` is a transformers PreTrainedModel; its weights may be on the meta device.
    """

    def __init__(self, model: Any) -> None:
        tied = model.all_tied_weights_keys
        own = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        parameters = {name: own[name] for name, _ in model.named_parameters() if name in own}
        # In files an expert has tensors of its own, which are stacked in memory. Some folders have those of memory.
        self._needed = [_shapes_of(revert_weight_conversion(model, parameters)), _shapes_of(parameters)]
        self._known = _shapes_of(own) | _shapes_of(revert_weight_conversion(model, own))

    def names_in(self, folder: Path) -> list[str]:
        """Returns the names of the model's tensors in the files. Others, such as a value head that was trained beside
        the model, are left out. Raises UserOpError when a tensor is missing or has another shape."""
        found = {name: shape for name, shape in _tensors(folder).items() if name in self._known}
        missing = [sorted(needed.keys() - found.keys()) for needed in self._needed]
        if all(missing):
            first = min(missing, key=len)[0]
            raise UserOpError(f"{folder.name} holds no weights of this base model: {first} is missing")
        for name, shape in found.items():
            if shape != self._known[name]:
                raise UserOpError(
                    f"{folder.name} holds no weights of this base model: {name} has the shape {list(shape)}, but this "
                    f"base model needs {list(self._known[name])}"
                )
        return [*found]


def weights_for(model: Any, folder: Path) -> Iterable[tuple[str, Tensor]]:
    """Returns tensors by their names in a transformers model: one by one, or all at once where the files' names differ.

    The names differ for experts, which are one tensor only in memory. Raises UserOpError when some are missing.
    """
    wanted = dict(model.named_parameters()).keys()
    if wanted <= _tensors(folder).keys():
        return ((name, tensor) for name, tensor in tensors_in(folder) if name in wanted)
    try:
        return base_model.read_weights(str(folder), model).items()
    except (OSError, ValueError) as error:
        raise UserOpError(f"{folder.name} holds no weights of this base model: {error}") from None


def _files(folder: Path) -> list[Path]:
    """Lists the weight files. In a training checkpoint the optimizer's tensors lie beside them."""
    return sorted(folder.glob("model*.safetensors"))


def _tensors(folder: Path) -> dict[str, Shape]:
    """The shapes of the tensors by their names in the files."""
    found: dict[str, Shape] = {}
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def _shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _shapes(model: Any) -> dict[str, Shape]:
    return _shapes_of(dict(model.named_parameters()))
