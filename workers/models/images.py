"""Images for the models that read them: from the file of an image to the inputs of the model's language part.

transformers' image processor of the model makes pixels, the model's own vision tower makes features of them, and the
features take the place of the embeddings at the image's tokens. Positions are those of transformers' `get_rope_index`:
an image's tokens have a row and a column.

The tower is frozen: nothing here builds a graph for it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image as Pillow
from torch import Tensor
from transformers import AutoImageProcessor

from app.domain.images import MAX_PIXELS, Image
from app.errors import SetupError, UserOpError
from workers.backends.devices import moved
from workers.backends.failures import ran_out_of_memory

FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""The model types of configurations whose models this module knows: M-RoPE positions, features from
`get_image_features`, and with DeepStack further features for the first layers. Each has packed datums
(workers/backends/training/architectures.py)."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The images of datums that lie end to end, T tokens in all.

    pixels: fp32 [patches, values of a patch]; grids: int64 [images, 3], each image's patches in time, height and width;
    where: bool [T], True at the images' tokens; positions: int64 [3, T], as the model's rotary embedding takes them.
    """

    pixels: Tensor
    grids: Tensor
    where: Tensor
    positions: Tensor

    @property
    def shift(self) -> int:
        """The position of the token after the last one, less T; of a single datum."""
        return int(self.positions.max()) + 1 - len(self.where)


@dataclass(frozen=True, slots=True)
class Embedded:
    """The inputs of a language model for T tokens: `embeddings` [T, hidden size], and `where` and `positions` as in a
    Picture. `deepstack`: [image tokens, hidden size] for each of the first layers."""

    embeddings: Tensor
    where: Tensor
    positions: Tensor
    deepstack: Sequence[Tensor] = field(default_factory=tuple)

    def row(self) -> dict[str, Any]:
        """Returns the language model's arguments for one row of all tokens."""
        found: dict[str, Any] = {"inputs_embeds": self.embeddings[None], "position_ids": self.positions[:, None]}
        if self.deepstack:
            found |= {"visual_pos_masks": self.where[None], "deepstack_visual_embeds": list(self.deepstack)}
        return found

    def piece(self, begin: int, end: int) -> dict[str, Any]:
        """Returns the language model's arguments for tokens `begin` to `end` of one datum."""
        part = slice(begin, end)
        seen = slice(int(self.where[:begin].sum()), int(self.where[:end].sum()))
        deepstack = [layer[seen] for layer in self.deepstack]
        return Embedded(self.embeddings[part], self.where[part], self.positions[:, part], deepstack).row()


class ImageReader:
    """Makes Pictures for one model with its image processor, on the CPU and without weights."""

    def __init__(self, processor: Any, model: Any) -> None:
        """Raises SetupError when the processor makes patches that the model's tower cannot take."""
        self._processor, self._body = processor, model.base_model
        vision = model.config.vision_config
        for name, own in (("patch_size",) * 2, ("temporal_patch_size",) * 2, ("merge_size", "spatial_merge_size")):
            found, wanted = getattr(processor, name), getattr(vision, own)
            if found != wanted:
                raise SetupError(f"preprocessor_config.json has {name} {found}, but the model's {own} is {wanted}")

    def check(self, images: Sequence[Image], what: str) -> None:
        """Raises UserOpError for an image that cannot be decoded, and for one of another number of tokens than its
        client expected. `what` names what the images are in: "datum" or "prompt".

        Each image is decoded and thrown away, so that a pass holds the pixels of one micro-batch only.
        """
        for image in images:
            self._decode(image, f"{what} {image.datum}" if what == "datum" else what)

    def picture(self, datums: Sequence[tuple[int, Sequence[Image]]]) -> Picture | None:
        """Returns the images of datums (number of tokens, images); None without any image. The images were checked."""
        images = [image for _, own in datums for image in own]
        if not images:
            return None
        made = self._processor(images=[self._decode(image, "") for image in images], return_tensors="pt")
        pixels, grids = made["pixel_values"], made["image_grid_thw"]
        where, positions, start = [], [], 0
        for length, own in datums:
            is_image = torch.zeros(length, dtype=torch.bool)
            for image in own:
                is_image[image.position : image.position + image.tokens] = True
            where.append(is_image)
            positions.append(self._positions(is_image, own, grids[start : start + len(own)]))
            start += len(own)
        return Picture(pixels, grids, torch.cat(where), torch.cat(positions, 1))

    def blank(self, lengths: Sequence[int]) -> Picture:
        """Returns the Picture of datums without images, with the pixels of the smallest image.

        The tower then runs although its features are used nowhere: ranks that share weights must all run it.
        """
        vision = self._body.config.vision_config
        merge = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        positions = torch.cat([torch.arange(length) for length in lengths])
        where = torch.zeros(len(positions), dtype=torch.bool)
        return Picture(
            torch.zeros(merge**2, width), torch.tensor([[1, merge, merge]]), where, positions.expand(3, -1).clone()
        )

    def _positions(self, is_image: Tensor, images: Sequence[Image], grids: Tensor) -> Tensor:
        """Returns int64 [3, N] of one datum.

        Image after image, because transformers takes neighbours without text between them for one.
        """
        found, start, end = [], 0, 0
        for image, grid in zip(images, grids, strict=True):
            text = torch.arange(start, start + image.position - end).expand(3, -1)
            start += image.position - end
            found += [text, self._body.get_vision_position_ids(start, grid, 1, self._processor.merge_size)]
            start += int(max(grid[1], grid[2])) // self._processor.merge_size
            end = image.position + image.tokens
        found.append(torch.arange(start, start + len(is_image) - end).expand(3, -1))
        return torch.cat(found, 1)

    def _decode(self, image: Image, where: str) -> Pillow.Image:
        at = f"{where}: the image at position {image.position}"
        try:
            with Pillow.open(io.BytesIO(image.data), formats=(image.format.upper(),)) as opened:
                self._check_size(opened.size, image, at)
                opened.load()
                return opened.copy()
        except UserOpError:
            raise
        except Exception as error:  # Pillow raises errors of many types for a damaged file
            if ran_out_of_memory(error):
                raise
            raise UserOpError(f"{at} cannot be decoded: {str(error)[:200]}; the model is unchanged") from error

    def _check_size(self, size: tuple[int, int], image: Image, at: str) -> None:
        """Raises UserOpError before an image of this size is decoded. ValueError: the processor takes no such shape."""
        width, height = size
        if width * height > MAX_PIXELS:
            raise UserOpError(f"{at} has {width} x {height} pixels; at most {MAX_PIXELS} are allowed")
        patches = self._processor.get_number_of_image_patches(height, width, {})
        tokens = patches // self._processor.merge_size**2
        if tokens != image.tokens:
            raise UserOpError(
                f"{at} has {width} x {height} pixels, which are {tokens} tokens of this model, but its expected_tokens "
                f"is {image.tokens}; the model is unchanged"
            )


def reader_of(source: str, model: Any) -> ImageReader | None:
    """Returns the reader for a model loaded from a folder or hub id.

    None for a model that takes text alone here: it has no vision tower that this module knows, or no image processor
    beside it. Raises SetupError.
    """
    if model.config.model_type not in FAMILIES:
        return None
    try:
        # Pillow also where torchvision is installed: the two differ in the last bits of a resized pixel.
        processor = AutoImageProcessor.from_pretrained(source, backend="pil", trust_remote_code=False)
    except OSError:
        return None
    return ImageReader(processor, model)


def logits(model: Any, keep: int, **arguments: Any) -> Tensor:
    """Runs the language model alone; returns the logits [rows, keep, V] of each row's last `keep` tokens."""
    states = model.base_model.language_model(**arguments).last_hidden_state
    return model.get_output_embeddings()(states[:, -keep:])  # type: ignore[no-any-return]


def embed(model: Any, tokens: Tensor, picture: Picture) -> Embedded:
    """Returns the language model's inputs for int64 [T] tokens with images, on their device."""
    body, device = model.base_model, tokens.device
    embeddings = model.get_input_embeddings()(tokens)
    with torch.no_grad():
        seen = body.get_image_features(moved(picture.pixels, device), moved(picture.grids, device))
    features = torch.cat(seen.pooler_output).to(embeddings)
    where = moved(picture.where, device)
    embeddings = embeddings.masked_scatter(where[:, None], features)
    deepstack = [torch.cat(layer) for layer in getattr(seen, "deepstack_features", None) or ()]
    return Embedded(embeddings, where, moved(picture.positions, device), deepstack)
