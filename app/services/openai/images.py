"""Images in chats: their files in the messages, their numbers of tokens, and their places in the prompt.

The API counts tokens from the files of the base model's image processor, without transformers. It opens no URL and
decodes no image. The worker compares each count with the model's own.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.errors import BadRequest
from app.services.base_models import BaseModels
from app.services.openai.tokenizer import find_in, read_json
from app.stores.hub_cache import HubCache
from app.wire.images import ModelInput, check_file

_QWEN = "Qwen2VLImageProcessor"
"""The image processor of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5. Some files add "Fast" or "Pil"."""
_DEFAULTS = {"patch_size": 14, "merge_size": 2, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
"""The values of this processor that its file may leave out."""
_MAX_RATIO = 200
"""This processor takes no image with a side longer than this many times the other."""
_FORMATS = {"data:image/png;base64": "png", "data:image/jpeg;base64": "jpeg"}
_DETAILS = (None, "auto", "high")
"""The values of `detail` that ask for the image as it is."""


class ImageFile(NamedTuple):
    """The file of an image; `where` names it in messages of errors."""

    where: str
    format: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Counts and places the tokens of one base model's images.

    A token stands for `side` x `side` pixels, after a resize to between `least` and `most` pixels. `placeholder`: the
    token that the chat template has in the place of an image.
    """

    placeholder: int
    side: int
    least: int
    most: int

    def count(self, width: int, height: int) -> int:
        """The number of tokens, to the last bit as transformers' `smart_resize` computes it."""
        rows, columns = round(height / self.side), round(width / self.side)
        pixels = rows * columns * self.side**2
        if pixels > self.most:
            scale = math.sqrt(height * width / self.most)
            rows, columns = (max(1, math.floor(length / scale / self.side)) for length in (height, width))
        elif pixels < self.least:
            scale = math.sqrt(self.least / (height * width))
            rows, columns = (math.ceil(length * scale / self.side) for length in (height, width))
        return rows * columns

    def place(self, tokens: np.ndarray, files: Sequence[ImageFile]) -> ModelInput:
        """A prompt int32 [n] with each placeholder replaced by the image of the same rank. Raises BadRequest."""
        places = np.flatnonzero(tokens == self.placeholder)
        if len(places) != len(files):
            raise BadRequest(
                f"the messages hold {len(files)} images, but the prompt has {len(places)} placeholders for them: the "
                "chat template leaves images of some roles out, or a text holds a placeholder itself"
            )
        found = ModelInput("prompt")
        begin = 0
        for place, file in zip(places.tolist(), files, strict=True):
            found.add_text(tokens[begin:place])
            found.add_image(file.data, file.format, self._checked_count(file))
            begin = place + 1
        found.add_text(tokens[begin:])
        return found

    def _checked_count(self, file: ImageFile) -> int:
        width, height = check_file(file.data, file.format, file.where)
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise BadRequest(
                f"{file.where} has {width} x {height} pixels; the model takes no image with a side over {_MAX_RATIO} "
                "times the other"
            )
        return self.count(width, height)


class ImageTokensOf:
    """The ImageTokens of the base models served, each read on first use."""

    def __init__(self, bases: BaseModels, cache: HubCache) -> None:
        self._bases, self._cache = bases, cache
        self._read: dict[str, ImageTokens] = {}

    def __call__(self, base_model: str) -> ImageTokens:
        """Raises BadRequest for a model with images that the API cannot count, and Unavailable when its files cannot be
        fetched now."""
        if base_model not in self._read:
            source = self._bases.tokenizer(base_model)
            self._read[base_model] = read(self._cache.folder(source), source)
        return self._read[base_model]


def read(folder: Path, source: str = "") -> ImageTokens:
    """The ImageTokens of a model, from the files beside its tokenizer in a folder. `source` names it in messages of
    errors. Raises BadRequest."""
    find = find_in(folder)
    try:
        config = read_json(find, "config.json")
        # The same order of files as in transformers.
        nested = read_json(find, "processor_config.json").get("image_processor")
        return _of(config, nested or read_json(find, "preprocessor_config.json"))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadRequest(f"the image processor of {source or str(folder)!r} cannot be read: {error}") from None


def _of(config: Mapping[str, Any], processor: Mapping[str, Any]) -> ImageTokens:
    kind, placeholder = str(processor.get("image_processor_type")), config.get("image_token_id")
    if not kind.startswith(_QWEN) or placeholder is None:
        raise BadRequest(
            f"chats with images are not supported for models of the family {config.get('model_type', 'unknown')!r}: "
            f"the API cannot count their tokens (image_processor_type {kind}, image_token_id {placeholder}); send the "
            "images as the SDK's image chunks"
        )
    size = processor.get("size") or {}
    sizes = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    given = {name: value for fields in (sizes, processor) for name, value in fields.items() if value is not None}
    patch, merge, least, most = (int({**_DEFAULTS, **given}[name]) for name in _DEFAULTS)
    return ImageTokens(int(placeholder), patch * merge, least, most)


def image_files(messages: Sequence[Mapping[str, Any]]) -> list[ImageFile]:
    """The images of messages in OpenAI's form, in their order. Raises BadRequest for a URL without the file in it."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    images = (part for part in parts if isinstance(part, dict) and part.get("type") == "image_url")
    return [_file(part.get("image_url"), f"image {number}") for number, part in enumerate(images, 1)]


def _file(image_url: Any, where: str) -> ImageFile:
    url = image_url.get("url") if isinstance(image_url, dict) else None
    if not isinstance(url, str):
        raise BadRequest(f"{where}: image_url must be an object with a url")
    if image_url.get("detail") not in _DETAILS:
        raise BadRequest(f"{where}: image_url.detail must be 'auto' or 'high'; make the image smaller yourself")
    head, _, data = url.partition(",")
    if head not in _FORMATS:
        raise BadRequest(
            f"{where}: the URL begins with {head[:40]!r}; it must be a data: URL of image/png or image/jpeg in base64, "
            "because this server fetches nothing"
        )
    try:
        return ImageFile(where, _FORMATS[head], base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        raise BadRequest(f"{where} is not valid base64") from None
