"""The reader of images: which models have one, and the bounds that hold before an image is decoded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image as Pillow
from PIL.PngImagePlugin import PngImageFile

from app.errors import SetupError, UserOpError
from app.settings import BaseModelSettings
from tests import pictures
from tests.models import tiny_qwen3
from tests.pictures import image
from workers.models import base_model
from workers.models.base_model import LoadedBase


def loaded(folder: Path) -> LoadedBase:
    return base_model.load(BaseModelSettings(name="tiny", path=str(folder), dtype="float32"), torch.device("cpu"))


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory) -> LoadedBase:
    return loaded(pictures.tiny_reader("qwen3-vl", tmp_path_factory.mktemp("vl")))


def test_a_model_reads_images_with_a_tower_and_a_processor_beside_it(vl: LoadedBase, tmp_path: Path) -> None:
    assert vl.info.reads_images
    text, bare = tiny_qwen3(tmp_path / "text"), pictures.tiny_reader("qwen3-vl", tmp_path / "bare")
    (bare / "preprocessor_config.json").rename(text / "preprocessor_config.json")
    for base in (loaded(text), loaded(bare)):
        assert not base.info.reads_images
        with pytest.raises(UserOpError, match="tiny is served without images"):
            base.check_images([image(8, 8)], "prompt")


def test_a_processor_named_as_published_is_read(tmp_path: Path) -> None:
    folder = pictures.tiny_reader("qwen3.5", tmp_path)
    config = json.loads((folder / "preprocessor_config.json").read_text())
    published = config | {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(published))
    assert loaded(folder).info.reads_images


def test_a_processor_for_other_patches_ends_the_start_with_one_line(tmp_path: Path) -> None:
    folder = pictures.tiny_reader("qwen3-vl", tmp_path)
    config = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(config | {"patch_size": 8}))
    with pytest.raises(SetupError, match=r"preprocessor_config.json has patch_size 8, but the model's patch_size is 4"):
        loaded(folder)


def test_a_bomb_and_an_unexpected_size_are_refused_before_they_are_decoded(
    vl: LoadedBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    vl.check_images([image(8, 8)], "datum")
    decoded: list[object] = []
    bomb, unexpected = (replace(image(8, 8), data=pictures.stated(side, side)) for side in (5000, 4000))
    monkeypatch.setattr(PngImageFile, "load", lambda self: decoded.append(self))
    with pytest.raises(UserOpError, match=r"datum 0: .* 5000 x 5000 pixels; at most 16777216"):
        vl.check_images([bomb], "datum")
    with pytest.raises(UserOpError, match=r"prompt: .* 64 tokens of this model, but its expected_tokens is 1"):
        vl.check_images([unexpected], "prompt")
    assert decoded == []


def test_a_file_is_read_in_the_format_it_was_sent_as_and_in_no_other(vl: LoadedBase) -> None:
    with pytest.raises(UserOpError, match="cannot be decoded"):
        vl.check_images([replace(image(8, 8), data=pictures.encoded(pictures.picture(8, 8), "gif"))], "datum")
    with pytest.raises(UserOpError, match="cannot be decoded"):
        vl.check_images([replace(image(8, 8), format="jpeg")], "datum")


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "I;16"])
def test_a_picture_of_any_colour_mode_is_read(vl: LoadedBase, mode: str) -> None:
    found = pictures.picture(16, 8)
    converted = Pillow.new("I;16", (16, 8), 9) if mode == "I;16" else found.convert(mode)
    one = replace(image(16, 8), data=pictures.encoded(converted))
    vl.check_images([one], "datum")
    assert vl.images is not None
    made = vl.images.picture([(2, [one])])
    assert made is not None
    assert made.pixels.isfinite().all()


def test_neighbouring_images_have_positions_of_their_own(vl: LoadedBase) -> None:
    assert vl.images is not None
    first, second = image(16, 8, datum=0, position=1), image(8, 16, datum=0, position=3)
    made = vl.images.picture([(6, [first, second])])
    assert made is not None
    assert made.positions.tolist() == [[0, 1, 1, 3, 3, 5], [0, 1, 1, 3, 4, 5], [0, 1, 2, 3, 3, 5]]
