"""The API's count of an image's tokens against transformers' own image processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoImageProcessor

from app.services.openai.images import read

_NAME = "preprocessor_config.json"
_TYPE = {"image_processor_type": "Qwen2VLImageProcessor"}
_QWEN2_5 = {**_TYPE, "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}
_QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "merge_size": 2,
}
# The files of Qwen2.5-VL, and of Qwen3-VL and Qwen3.5; a file as transformers 5 saves it, beside an older one; and a
# file that leaves all to the defaults.
FILES: dict[str, dict[str, Any]] = {
    "qwen2.5-vl": {_NAME: _QWEN2_5},
    "qwen3-vl": {_NAME: _QWEN3},
    "older sizes": {_NAME: {**_QWEN2_5, "size": {"min_pixels": 1, "max_pixels": 2}}},
    "both sizes": {_NAME: {**_QWEN3, "min_pixels": 4096, "max_pixels": 1048576}},
    "nested": {_NAME: _QWEN2_5, "processor_config.json": {"image_processor": _QWEN3}},
    "defaults": {_NAME: _TYPE},
    "few pixels": {_NAME: {**_QWEN2_5, "min_pixels": 784, "max_pixels": 7840}},
}
LENGTHS = (1, 7, 16, 27, 28, 32, 41, 42, 48, 80, 100, 199, 224, 333, 512, 1000, 1023, 1920, 4096)


@pytest.mark.parametrize("case", FILES)
def test_the_api_counts_as_transformers_does(tmp_path: Path, case: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "image_token_id": 7}))
    for name, content in FILES[case].items():
        (tmp_path / name).write_text(json.dumps(content))
    counted, processor = read(tmp_path), AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    sizes = [(w, h) for w in LENGTHS for h in LENGTHS if max(w, h) <= 200 * min(w, h)]
    wanted = [processor.get_number_of_image_patches(h, w, {}) // processor.merge_size**2 for w, h in sizes]
    assert [counted.count(w, h) for w, h in sizes] == wanted
    assert len(set(wanted)) > 5
