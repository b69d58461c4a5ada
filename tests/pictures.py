"""Pictures as files, and tiny models that read them, with their image processors: a token stands for 8 x 8 pixels."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image as Pillow
from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from app.domain.images import Image
from tests.parity.architectures import CASES, SHAPE

PLACEHOLDER = 300
_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 64,
    "initializer_range": 0.2,
}
_DEEPSTACK = {**_TOWER, "deepstack_visual_indexes": [0]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_PARTIAL = {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}

# transformers' name of the configuration without "Config", its rotary embedding and its tower. The positions of an
# image's tokens take all three sections of the head.
FAMILIES: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl": ("Qwen3VL", _ROPE, _DEEPSTACK),
    "qwen3-vl-moe": ("Qwen3VLMoe", _ROPE, _DEEPSTACK),
    "qwen3.5": ("Qwen3_5", _PARTIAL, _TOWER),
    "qwen3.5-moe": ("Qwen3_5Moe", _PARTIAL, _TOWER),
}


def tiny_reader(family: str, folder: Path, placeholder: int = PLACEHOLDER, **text: Any) -> Path:
    """Saves a random fp32 model of the family and its image processor in `folder`. `placeholder` is the token of an
    image, and `text` overrides fields of the language model."""
    name, rope, tower = FAMILIES[family]
    own = next(fields["text_config"] for case, fields in CASES.values() if case == name)
    config = getattr(transformers, f"{name}Config")(
        text_config={**SHAPE, **own, "rope_parameters": rope, **text},
        vision_config=tower,
        image_token_id=placeholder,
        video_token_id=PLACEHOLDER + 1,
        vision_start_token_id=PLACEHOLDER + 2,
        vision_end_token_id=PLACEHOLDER + 3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


def processor() -> Any:
    """The image processor of the tiny models. It makes 1 to 64 tokens of an image."""
    return Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    )


def picture(width: int, height: int, seed: int = 0) -> Pillow.Image:
    rng = np.random.default_rng(seed)
    return Pillow.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(found: Pillow.Image, form: str = "png", **options: Any) -> bytes:
    file = io.BytesIO()
    found.save(file, form, **options)
    return file.getvalue()


def stated(width: int, height: int) -> bytes:
    """A small PNG file that says that it is so large."""
    file = encoded(picture(2, 2))
    header = b"IHDR" + struct.pack(">II", width, height) + file[24:29]
    return file[:12] + header + struct.pack(">I", zlib.crc32(header)) + file[33:]


def text(data: bytes) -> str:
    """A file as it is in JSON."""
    return base64.b64encode(data).decode()


def image(width: int, height: int, seed: int = 0, *, datum: int = 0, position: int = 0, form: str = "png") -> Image:
    """An image of as many tokens as the tiny models make of it."""
    tokens = processor().get_number_of_image_patches(height, width, {}) // 4
    return Image(datum, position, tokens, form, encoded(picture(width, height, seed), form))


def decoded(one: Image) -> Pillow.Image:
    return Pillow.open(io.BytesIO(one.data))
