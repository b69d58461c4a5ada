"""Reads images in a model input: the facts of a PNG or JPEG file that its first bytes state. Nothing is decoded here.

Raises BadRequest for a file that no worker should decode. The worker compares the tokens with the model's own count.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np

from app.domain.images import FORMATS, MAX_BYTES, MAX_IMAGES, MAX_PIXELS, MAX_TOKENS, MAX_TOKENS_OF_ALL, Image
from app.errors import BadRequest

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_START_OF_SCAN = 0xDA
# The start-of-frame markers; the three left out of 0xC0..0xCF are tables and reserved.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_MAX_SEGMENTS = 1024
"""Most segments before the frame of a JPEG. A file of a camera has about ten."""
MAX_SCANS = 64
"""Most scans of a JPEG: progressive files have about ten. Each scan, however short, is a pass over all pixels."""
_PLACEHOLDERS = np.zeros(MAX_TOKENS, np.int32)


class ModelInput:
    """The chunks of one datum or prompt, put together. `what` names it in messages."""

    def __init__(self, what: str, datum: int = 0) -> None:
        self._what, self._datum = what, datum
        self._parts: list[np.ndarray] = []
        self._length = 0
        self.images: list[Image] = []

    @property
    def tokens(self) -> np.ndarray:
        """int32 [N], with 0 at the positions of images."""
        return np.concatenate(self._parts) if self._parts else np.empty(0, np.int32)

    def add_text(self, tokens: np.ndarray) -> None:
        """Adds int32 [n]."""
        self._parts.append(tokens)
        self._length += len(tokens)

    def add_image(self, data: bytes, form: str, expected_tokens: int | None) -> None:
        """Adds an image file. Raises BadRequest for one that is not what it says, or too large, and for one without its
        number of tokens: the positions of all that follows depend on it, also on the client's side."""
        where = f"{self._what}: the image at position {self._length}"
        if expected_tokens is None:
            raise BadRequest(f"{where} has no expected_tokens: set it to the number of tokens of this image")
        if not 1 <= expected_tokens <= MAX_TOKENS:
            raise BadRequest(f"{where} has expected_tokens {expected_tokens}; an image has 1 to {MAX_TOKENS}")
        check_file(data, form, where)
        self.images.append(Image(self._datum, self._length, expected_tokens, form, data))
        check_images(self.images)
        self.add_text(_PLACEHOLDERS[:expected_tokens])


def text_input(tokens: np.ndarray) -> ModelInput:
    """A prompt of text alone, int32 [N]."""
    found = ModelInput("prompt")
    found.add_text(tokens)
    return found


def columns(inputs: Iterable[ModelInput]) -> tuple[list[np.ndarray], tuple[Image, ...]]:
    """The tokens of all datums, int32 [N_i] each, and all their images. Raises BadRequest for too many images."""
    tokens, images = [], []
    for each in inputs:
        images += each.images
        if each.images:
            check_images(images)  # before their positions take memory
        tokens.append(each.tokens)
    return tokens, tuple(images)


def check_images(images: Sequence[Image]) -> None:
    """Raises BadRequest for more images, or tokens of images, than one call may bring."""
    if len(images) > MAX_IMAGES:
        raise BadRequest(
            f"the call holds {len(images)} images; at most {MAX_IMAGES} are allowed in one call: send fewer"
        )
    tokens = sum(image.tokens for image in images)
    if tokens > MAX_TOKENS_OF_ALL:
        raise BadRequest(
            f"the images of the call are {tokens} tokens; at most {MAX_TOKENS_OF_ALL} are allowed in one call"
        )


def check_file(data: bytes, form: str, where: str) -> tuple[int, int]:
    """The width and height of an image. Raises BadRequest unless `data` begins as a file of `form` of a size that may
    be decoded."""
    if form not in FORMATS:
        raise BadRequest(f"{where} has the format {form[:40]!r}; it can be {' or '.join(FORMATS)}")
    if len(data) > MAX_BYTES:
        raise BadRequest(f"{where} has {len(data)} bytes; at most {MAX_BYTES} are allowed: make it smaller")
    if not data.startswith(_PNG if form == "png" else _JPEG):
        raise BadRequest(f"{where} is not a {form} file: its first bytes are {data[:8].hex() or 'missing'}")
    size = _png_size(data) if form == "png" else _jpeg_size(data)
    if size is None:
        raise BadRequest(f"{where} is not a whole {form} file: it does not state its width and height")
    width, height = size
    if not 1 <= width * height <= MAX_PIXELS:
        raise BadRequest(f"{where} has {width} x {height} pixels; 1 to {MAX_PIXELS} are allowed: make it smaller")
    if form == "jpeg" and data.count(bytes((0xFF, _START_OF_SCAN))) > MAX_SCANS:
        raise BadRequest(f"{where} has more than {MAX_SCANS} scans: save it again as a plain JPEG")
    return size


def _png_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in the header chunk, which is the first."""
    if data[12:16] != b"IHDR" or len(data) < 24:
        return None
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in the first frame, which precedes the first scan."""
    place = 2
    for _ in range(_MAX_SEGMENTS):
        segment = data[place : place + 9]
        if len(segment) < 9 or segment[0] != 0xFF or segment[1] == _START_OF_SCAN:
            return None
        if segment[1] == 0xFF:  # a fill byte
            place += 1
            continue
        if segment[1] in _FRAMES:
            height, width = struct.unpack(">HH", segment[5:9])
            return width, height
        place += 2 + int.from_bytes(segment[2:4], "big")
    return None
