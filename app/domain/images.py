"""An image of a datum or a prompt, as its client sent it, and the limits that hold for every image."""

from __future__ import annotations

from dataclasses import dataclass

FORMATS = ("png", "jpeg")
MAX_PIXELS = 2**24
"""Most pixels of an image: 48 MiB when decoded. The processors of Qwen3-VL and Qwen3.5 shrink larger images to this."""
MAX_BYTES = 2**24
"""Most bytes of an encoded image: one byte a pixel, several times what a photograph takes."""
MAX_TOKENS = 2**14
"""Most tokens of an image: those of MAX_PIXELS pixels where a token stands for 32 x 32 of them."""
MAX_IMAGES = 1024
"""Most images in one call: one for each of the datums that the SDK sends at a time."""
MAX_TOKENS_OF_ALL = 2**22
"""Most tokens of all images in one call: 16 MiB of int32. A few bytes can claim any number."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image of datum `datum` (0 in a prompt), whose `tokens` placeholders begin at `position`.

    `data` is the file, in one of FORMATS.
    """

    datum: int
    position: int
    tokens: int
    format: str
    data: bytes
