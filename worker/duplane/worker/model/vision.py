"""The vision side of the model: encoded images in, embeddings for the decoder out.

Batches pieces of different sizes; what the pieces mean and where they stand is the callers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from duplane.worker.model.checkpoint import Checkpoint, CheckpointError, field, read_json
from duplane.worker.model.image_layout import ImageMarks
from duplane.worker.model.images import (
    MAX_PIXELS,
    RULES_FILE,
    ImageRules,
    Piece,
    PreparedImage,
    prepare,
    prepare_picture,
)
from duplane.worker.model.resampler import Resampler
from duplane.worker.model.siglip import VisionConfig, VisionTransformer, place_patches
from duplane.worker.model.transfer import upload


class Vision(nn.Module):
    """Images to embeddings, any number of any sizes at once. Keeps nothing between calls."""

    def __init__(
        self,
        config: VisionConfig,
        rules: ImageRules,
        marks: ImageMarks | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate the weights, to be filled by `load`."""
        super().__init__()
        if config.patch_size != rules.patch_size:
            raise CheckpointError(
                f"vision_config.patch_size is {config.patch_size}, but {RULES_FILE} has "
                f"{rules.patch_size}"
            )
        self.config, self.rules, self.marks = config, rules, marks or ImageMarks()
        place = torch.device(device)
        self.vpm = VisionTransformer(config, place, dtype)
        self.resampler = Resampler(config.query_count, config.hidden, config.width, place, dtype)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Vision | None:
        """Allocate what the checkpoint describes; None if it says `init_vision` false."""
        if not field(checkpoint.config, "init_vision", bool, True):
            return None
        config = VisionConfig.from_json(checkpoint.config)
        preprocessor = read_json(checkpoint.directory / RULES_FILE)
        rows = field(preprocessor, "image_feature_size", int, 64)
        if rows != config.query_count:
            raise CheckpointError(
                f"query_num is {config.query_count}, but {RULES_FILE} has image_feature_size {rows}"
            )
        rules, marks = ImageRules.from_json(preprocessor), ImageMarks.from_json(preprocessor)
        return cls(config, rules, marks, device, dtype)

    def load(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Fill the weights; returns the vision tensors that have no place here."""
        return (
            *checkpoint.load_into(self.vpm, "vpm."),
            *checkpoint.load_into(self.resampler, "resampler."),
        )

    @property
    def rows(self) -> int:
        """Embeddings per image or slice."""
        return self.config.query_count

    def prepare(
        self, data: bytes, max_slices: int | None = None, max_pixels: int = MAX_PIXELS
    ) -> PreparedImage:
        """Decode and cut a JPEG or PNG as `images.prepare` does; safe in any thread."""
        return prepare(self.rules, data, max_slices, max_pixels)

    def prepare_picture(self, picture: Image, max_slices: int | None = None) -> PreparedImage:
        """Cut a decoded RGB picture as `images.prepare_picture` does; safe in any thread."""
        return prepare_picture(self.rules, picture, max_slices)

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        """Embeddings [pieces, rows, hidden] of each image; none sees another."""
        pieces = [piece for image in images for piece in image.pieces]
        found: list[Tensor | None] = [None] * len(pieces)
        for batch in self._batches(pieces):
            embeds = self._encode([pieces[index] for index in batch])
            for index, rows in zip(batch, embeds, strict=True):
                found[index] = rows
        rest = iter(rows for rows in found if rows is not None)
        return [torch.stack([next(rest) for _ in image.pieces]) for image in images]

    def normalize(self, patches: Tensor) -> Tensor:
        """Pixels uint8 [..., 3 * patch_size^2] as the encoder takes them, in float32."""
        mean, std = (
            upload(values, patches.device, torch.float32)[:, None]
            for values in (self.rules.mean, self.rules.std)
        )
        channels = patches.view(*patches.shape[:-1], len(mean), -1).float() / 255
        return ((channels - mean) / std).flatten(-2)

    def _batches(self, pieces: Sequence[Piece]) -> Iterator[list[int]]:
        """Indices of pieces to encode together, of like sizes, so that little is padding.

        A batch of unusually large pieces has fewer of them: its memory stays bounded.
        """
        budget = 2 * self.config.batch_size * self.rules.scaled_patches
        batch: list[int] = []
        for index in sorted(range(len(pieces)), key=lambda index: len(pieces[index].patches)):
            is_over = (len(batch) + 1) * len(pieces[index].patches) > budget
            if batch and (is_over or len(batch) == self.config.batch_size):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _encode(self, pieces: Sequence[Piece]) -> Tensor:
        """Embeddings [pieces, rows, hidden]."""
        weight = self.resampler.proj
        device = weight.device
        lengths = [len(piece.patches) for piece in pieces]
        longest = max(lengths)
        pixels = np.zeros((len(pieces), longest, pieces[0].patches.shape[1]), np.uint8)
        positions = torch.zeros((len(pieces), longest), dtype=torch.long)
        per_side = self.config.positions_per_side
        for index, piece in enumerate(pieces):
            pixels[index, : lengths[index]] = piece.patches
            places = place_patches(piece.rows, piece.columns, per_side)
            positions[index, : lengths[index]] = places

        order = torch.arange(longest, device=device)
        mask = None
        if min(lengths) < longest:
            mask = (order < upload(lengths, device)[:, None])[:, None, None]
        patches = self.normalize(upload(pixels, device)).to(weight.dtype)
        states = self.vpm(patches, upload(positions, device), mask)

        widths = upload([piece.columns for piece in pieces], device)[:, None]
        side = max(max(piece.rows, piece.columns) for piece in pieces)
        rows = (order // widths).clamp(max=side - 1)  # padding would lie below the image
        return self.resampler(states, rows, order % widths, side, mask)
