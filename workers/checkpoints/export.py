"""Writes all of a model's weights as a Hugging Face folder, which `AutoModelForCausalLM.from_pretrained` loads.

transformers writes the folder, from a model of the same class without memory of its own. transformers knows how a
checkpoint differs from the model in memory (experts are stacked only there), which tensors are tied, and what is too
large for one file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import cached_file

from app.domain.base_model import TOKENIZER_FILES
from workers.backends.training.base import Writer

# vLLM and most stores are quicker with several files than with one large file.
_SHARD = "5GB"
_GENERATION = "generation_config.json"


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
    copied = [*_cached(base.name_or_path, [_GENERATION]), *_cached(tokenizer, TOKENIZER_FILES)]

    def write(folder: Path) -> None:
        state = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        try:
            skeleton.save_pretrained(folder, state_dict=state | buffers, max_shard_size=_SHARD)
        except SafetensorError as error:
            # Only the disk can still fail: it is full, or the file is too large for it.
            raise OSError(f"{folder.name} was not written: {error}") from error
        for source in copied:
            shutil.copyfile(source, folder / source.name)

    return write


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
