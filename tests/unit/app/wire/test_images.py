"""Images of the real SDK decode to their files and positions; a file that no worker should decode is refused."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from typing import Any

import pytest
from tinker import types

from app.domain import ops
from app.domain.images import MAX_BYTES, MAX_IMAGES, MAX_PIXELS, MAX_TOKENS, Image
from app.errors import BadRequest
from app.wire import images, json_bodies
from app.wire.images import ModelInput
from tests import pictures
from tests.unit.app.wire.test_forward_backward import decode, sdk_body

PNG, JPEG = (pictures.encoded(pictures.picture(24, 16), form) for form in ("png", "jpeg"))


def text(*tokens: int) -> types.EncodedTextChunk:
    return types.EncodedTextChunk(tokens=list(tokens))


def datum(*chunks: Any) -> types.Datum:
    inputs = types.ModelInput(chunks=list(chunks))
    return types.Datum(model_input=inputs, loss_fn_inputs={"target_tokens": [1] * inputs.length})


def chunk(data: bytes = PNG, form: str = "png", expected: int | None = 6) -> types.ImageChunk:
    return types.ImageChunk(data=data, format=form, expected_tokens=expected)


def test_an_image_takes_its_expected_tokens_among_the_text() -> None:
    data = [datum(text(5, 6), chunk(), text(7)), datum(text(8)), datum(chunk(JPEG, "jpeg", 3), chunk(PNG, "png", 2))]
    batch = decode(sdk_body(data)).batch
    assert [array.tolist() for array in batch.tokens] == [[5, 6, 0, 0, 0, 0, 0, 0, 7], [8], [0] * 5]
    assert batch.images == (
        Image(0, 2, 6, "png", PNG),
        Image(2, 0, 3, "jpeg", JPEG),
        Image(2, 3, 2, "png", PNG),
    )


def test_images_come_back_from_the_journal() -> None:
    op = decode(sdk_body([datum(text(5, 6), chunk())]))
    assert ops.decode(ops.encode(op)).batch.images == op.batch.images
    other = decode(sdk_body([datum(text(5, 6), chunk(PNG[:-1] + b"x"))]))
    assert ops.digest(ops.encode(op)) != ops.digest(ops.encode(other)), "another image is another call"


def test_a_json_prompt_holds_the_same() -> None:
    prompt = types.ModelInput(chunks=[text(5, 6), chunk(), text(7)]).model_dump(mode="json")
    found = json_bodies.model_input(prompt["chunks"], "prompt")
    assert found.tokens.tolist() == [5, 6, 0, 0, 0, 0, 0, 0, 7]
    assert found.images == [Image(0, 2, 6, "png", PNG)]


def test_every_form_of_a_jpeg_states_its_size() -> None:
    found = pictures.picture(40, 24)
    for options in ({"progressive": True}, {"exif": b"Exif\0\0" + bytes(300)}, {"quality": 100, "subsampling": 0}):
        images.check_file(pictures.encoded(found, "jpeg", **options), "jpeg", "it")
    images.check_file(JPEG[:2] + b"\xff" + JPEG[2:], "jpeg", "it")  # a fill byte before a marker


def jpeg_of(width: int, height: int) -> bytes:
    frame = JPEG.index(b"\xff\xc0")
    return JPEG[: frame + 5] + struct.pack(">HH", height, width) + JPEG[frame + 9 :]


WRONG: dict[str, tuple[Callable[[], types.ImageChunk], str]] = {
    "no tokens": (lambda: chunk(expected=None), "has no expected_tokens"),
    "zero tokens": (lambda: chunk(expected=0), "expected_tokens 0; an image has 1 to 16384"),
    "negative": (lambda: chunk(expected=-5), "expected_tokens -5"),
    "too many tokens": (lambda: chunk(expected=MAX_TOKENS + 1), "expected_tokens 16385"),
    "a jpeg called png": (lambda: chunk(JPEG, "png"), "is not a png file: its first bytes are ffd8"),
    "a png called jpeg": (lambda: chunk(PNG, "jpeg"), "is not a jpeg file"),
    "nothing": (lambda: chunk(b""), "is not a png file: its first bytes are missing"),
    "the start of a png": (lambda: chunk(PNG[:20]), "does not state its width and height"),
    "the start of a jpeg": (lambda: chunk(JPEG[:20], "jpeg"), "does not state its width and height"),
    "a jpeg without a frame": (
        lambda: chunk(JPEG[:2] + b"\xff\xfe\0\x02" * 5000 + JPEG[2:], "jpeg"),
        "does not state its width and height",
    ),
    "a bomb": (
        lambda: chunk(pictures.stated(2**31 - 1, 2**31 - 1)),
        f"2147483647 x 2147483647 pixels; 1 to {MAX_PIXELS}",
    ),
    "a jpeg bomb": (lambda: chunk(jpeg_of(65535, 65535), "jpeg"), "65535 x 65535 pixels"),
    "no pixels": (lambda: chunk(pictures.stated(0, 5)), "0 x 5 pixels"),
    "many scans": (
        lambda: chunk(JPEG + b"\xff\xda" * images.MAX_SCANS, "jpeg"),
        "more than 64 scans",
    ),
    "many bytes": (lambda: chunk(PNG + bytes(MAX_BYTES)), f"at most {MAX_BYTES} are allowed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_image_is_refused_by_datum_and_position(case: str) -> None:
    make, message = WRONG[case]
    sent = types.Datum(
        model_input=types.ModelInput(chunks=[text(1), make()]), loss_fn_inputs={"target_tokens": [1] * 7}
    )
    with pytest.raises(BadRequest, match=f"datum 1: the image at position 1.*{message}"):
        decode(sdk_body([datum(text(1)), sent]))


def test_the_largest_image_is_taken() -> None:
    images.check_file(pictures.stated(4096, 4096), "png", "it")
    images.check_file(jpeg_of(4096, 4096), "jpeg", "it")


def test_many_images_are_refused_before_their_positions_take_memory() -> None:
    found = ModelInput("prompt")
    for _ in range(MAX_IMAGES):
        found.add_image(PNG, "png", 1)
    with pytest.raises(BadRequest, match="the call holds 2048 images"):
        images.columns(found for _ in range(10**9))
    with pytest.raises(BadRequest, match="the call holds 1025 images; at most 1024"):
        found.add_image(PNG, "png", 1)
    large = ModelInput("prompt")
    large.add_image(PNG, "png", MAX_TOKENS)
    with pytest.raises(BadRequest, match="the images of the call are 4210688 tokens; at most 4194304"):
        images.columns(large for _ in range(10**9))


JSON_WRONG: dict[str, tuple[Any, str]] = {
    "a pointer": (
        {"type": "image_asset_pointer", "format": "png", "location": "http://10.0.0.1/a.png", "expected_tokens": 6},
        "opens no file or URL that a request names.*send its bytes as an image chunk",
    ),
    "no base64": ({"type": "image", "format": "png", "data": "\u00e9", "expected_tokens": 6}, "not valid base64"),
    "data is no text": ({"type": "image", "format": "png", "data": [1], "expected_tokens": 6}, "a base64 string"),
    "half a token": ({"type": "image", "format": "png", "data": "", "expected_tokens": 1.5}, "must be an integer"),
    "no format": ({"type": "image", "data": base64.b64encode(PNG).decode(), "expected_tokens": 6}, "format 'None'"),
    "audio": ({"type": "dmel", "dmel": ""}, "chunk type 'dmel' is not supported"),
}


@pytest.mark.parametrize("case", JSON_WRONG)
def test_a_wrong_json_chunk_is_refused(case: str) -> None:
    wrong, message = JSON_WRONG[case]
    with pytest.raises(BadRequest, match=f"prompt.*{message}"):
        json_bodies.model_input([{"tokens": [1]}, wrong], "prompt")
