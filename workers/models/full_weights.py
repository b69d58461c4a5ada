"""All weights of a model as a Hugging Face folder: a trainer writes it, a sampler and
`AutoModelForCausalLM.from_pretrained` read it.

transformers writes the folder, from a model of the same class without memory of its own. transformers knows how a
checkpoint differs from the model in memory (experts are stacked only there), which tensors are tied, and what is too
large for one file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import cached_file

from app.domain.records import PROCESSOR_FILES, TEMPLATE_FOLDER, TOKENIZER_FILES
from app.errors import UserOpError
from app.settings import BaseModelSettings
from workers.backends.training.base import Writer
from workers.models import base_model, quantized

Shape = tuple[int, ...]
# vLLM and most stores are quicker with several files than with one large file.
_SHARD = "5GB"
_GENERATION = "generation_config.json"
_TOKENIZER_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
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
# Fields that models read although some of their classes do not declare them.
_UNDECLARED = frozenset(
    {
        *("model_type", "head_dim", "layer_types", "mlp_layer_types", "per_layer_config", "num_kv_shared_layers"),
        *("sliding_window", "attention_chunk_size", "is_causal", "is_decoder", "use_bidirectional_attention"),
        *("rope_parameters", "original_max_position_embeddings", "hidden_act", "swiglu_alpha", "swiglu_limit"),
        *("router_bias", "tie_word_embeddings"),
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
    of_base = cached(base.name_or_path, [_GENERATION, *PROCESSOR_FILES])
    copied = [*of_base, *cached(tokenizer, TOKENIZER_FILES)]
    # A processor reads its template from its file, so that file stays, and further ones cannot be configured beside it.
    templates = {} if any(path.name in PROCESSOR_FILES for path in of_base) else _further_templates(tokenizer)

    def write(folder: Path) -> None:
        state = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        skeleton.save_pretrained(folder, state_dict=state | buffers, max_shard_size=_SHARD)
        for source in copied:
            shutil.copyfile(source, folder / source.name)
        if templates:
            _configure(templates, folder)

    return Writer(write, sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize)


def write_dequantized(settings: BaseModelSettings, dtype: str, folder: Path) -> None:
    """Writes the weights of a quantised or packed base model as plain ones of `dtype` to `folder`, for an engine that
    does not know the codes.

    A packed model is unpacked in host memory, because its plain weights may not fit on a GPU.

    Raises SetupError when the base model cannot be loaded, and OSError when the disk is full.
    """
    if settings.quantized:
        base = base_model.load(settings)
    else:
        base = base_model.load(settings.model_copy(update={"dtype": dtype}), torch.device("cpu"))
    model = base.model
    tensors = {
        name: quantized.plain(weight).detach().cpu()
        for name, weight in quantized.weights(model)
        if name not in model.all_tied_weights_keys
    }
    huggingface_writer(model, tensors, base.dtype, base.tokenizer)(folder)


def weight_shapes(settings: BaseModelSettings) -> dict[str, Shape]:
    """The shapes of the base model's weights by their names in a checkpoint's files, as transformers writes them.

    Experts are left out: a file has them stacked or one by one, and their names would be most of a trainer's report.

    Raises SetupError as `base_model.skeleton` does.
    """
    model = base_model.skeleton(settings)
    weights = {name: weight.detach() for name, weight in model.named_parameters() if ".experts." not in name}
    return _shapes_of(revert_weight_conversion(model, weights))


def _check_names(found: Iterable[str], wanted: Iterable[str]) -> None:
    strange = set(found) ^ set(wanted)
    if strange:
        raise ValueError(
            f"{sorted(strange)[0]} and {len(strange) - 1} other tensors are missing or not part of the model"
        )


def _persistent_buffers(model: Any) -> list[str]:
    names = dict(model.named_buffers()).keys()
    return [name for name in model.state_dict() if name in names]


def cached(source: str, names: Iterable[str]) -> list[Path]:
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


def _further_templates(tokenizer: str) -> dict[str, str]:
    """The chat templates that a tokenizer has in a folder of their own, by name."""
    folders = [path.parent / TEMPLATE_FOLDER for path in cached(tokenizer, [_TOKENIZER_CONFIG])]
    return {path.stem: path.read_text() for folder in folders for path in sorted(folder.glob("*.jinja"))}


def _configure(templates: Mapping[str, str], folder: Path) -> None:
    """Moves all chat templates into the tokenizer's configuration."""
    file, config = folder / _TEMPLATE, json.loads((folder / _TOKENIZER_CONFIG).read_text())
    named = {"default": file.read_text(), **templates} if file.exists() else templates
    config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (folder / _TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2))
    file.unlink(missing_ok=True)


def check_fits(folder: Path, model: Any) -> None:
    """Raises UserOpError unless the folder's model has the same parameters as `model`, and computes what `model` does
    with them: its configuration and buffers are not read."""
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            stored = base_model.auto_class(config).from_config(config)
    except (OSError, ValueError) as error:
        raise UserOpError(f"{folder.name} holds no model that can be loaded: {error}") from None
    if _shapes(stored) != _shapes(model) or not _files(folder):
        raise UserOpError(f"{folder.name} holds no weights of this base model")
    _check_same(folder, config, model.config)
    _check_buffers(folder, model)


def check_config(folder: Path, model: Any) -> None:
    """Raises UserOpError unless the folder's configuration and buffers compute what `model` does: its own are used."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserOpError(f"{folder.name} holds no model that can be loaded: {error}") from None
    _check_same(folder, config, model.config)
    _check_buffers(folder, model)


def _check_same(folder: Path, found: Any, wanted: Any) -> None:
    text = wanted.get_text_config()
    stored, own = found.get_text_config().to_dict(), text.to_dict()
    read = {field.name for field in fields(text)} | {*text.attribute_map, *text.attribute_map.values()} | _UNDECLARED
    for name in sorted((stored.keys() | own.keys()) & read - _WITHOUT_EFFECT):
        if stored.get(name) != own.get(name):
            raise UserOpError(
                f"{folder.name} was made with {name} {stored.get(name)!r:.100}, but this base model has "
                f"{own.get(name)!r:.100}"
            )


def _check_buffers(folder: Path, model: Any) -> None:
    """Compares the buffers of a checkpoint, such as a router's bias, in the coarser of their dtypes. A model without
    memory has none to compare: vLLM, which it stands for, reads those of the folder."""
    own = {name: model.get_buffer(name) for name in _persistent_buffers(model)}
    own = revert_weight_conversion(model, {name: buffer for name, buffer in own.items() if not buffer.is_meta})
    for name, found in sorted(tensors_in(folder, own)):
        dtype = min(found.dtype, own[name].dtype, key=lambda dtype: dtype.itemsize)
        if not torch.equal(found.to(dtype), own[name].to("cpu", dtype)):
            raise UserOpError(
                f"{folder.name} has a buffer {name} that differs from this base model's, and only weights are read; "
                "serve the folder as a base model of its own"
            )


def tensors_in(folder: Path, wanted: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor, or those of these names, by its name in the files, on the CPU; one at a time is in memory."""
    for path in _files(folder):
        with _opened(path) as file:
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
    """Returns tensors by their names in a transformers model: one by one, or all at once where the files have other
    names or shapes.

    These differ for experts, which are one tensor only in memory. Raises UserOpError when some are missing.
    """
    wanted = _shapes(model)
    if wanted.items() <= _tensors(folder).items():
        return ((name, tensor) for name, tensor in tensors_in(folder) if name in wanted)
    try:
        return base_model.read_weights(str(folder), model).items()
    except (OSError, ValueError) as error:
        raise UserOpError(f"{folder.name} holds no weights of this base model: {error}") from None


def _opened(path: Path) -> Any:
    """Opens a file of safetensors. Raises UserOpError when it is damaged."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UserOpError(f"{path.name} is damaged: {error}") from None


def _files(folder: Path) -> list[Path]:
    """Lists the weight files. In a training checkpoint the optimizer's tensors lie beside them."""
    return sorted(folder.glob("model*.safetensors"))


def _tensors(folder: Path) -> dict[str, Shape]:
    """The shapes of the tensors by their names in the files."""
    found: dict[str, Shape] = {}
    for path in _files(folder):
        with _opened(path) as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def _shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _shapes(model: Any) -> dict[str, Shape]:
    return _shapes_of(dict(model.named_parameters()))
