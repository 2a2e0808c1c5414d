"""The vision encoder: maps prepared images to embeddings for the LLM.

Tiles of different sizes are padded and encoded in batches. No state is kept between calls.
Source: `MiniCPMO45/modeling_minicpmo_unified.py` of OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from duplane.worker.models.minicpm_o.checkpoint import Checkpoint, CheckpointError
from duplane.worker.models.minicpm_o.transfer import upload
from duplane.worker.models.minicpm_o.types import ImageTile, PreparedImage
from duplane.worker.models.minicpm_o.vision.layout import ImageMarks
from duplane.worker.models.minicpm_o.vision.pixels import MAX_PIXELS
from duplane.worker.models.minicpm_o.vision.preprocessing import RULES_FILE, ImageRules, Pictures
from duplane.worker.models.minicpm_o.vision.resampler import Resampler
from duplane.worker.models.minicpm_o.vision.siglip import (
    VisionConfig,
    VisionTransformer,
    position_indices,
)


class Vision(nn.Module):
    """SigLIP2 and the resampler. One call encodes any number of images of any sizes."""

    def __init__(
        self,
        config: VisionConfig,
        rules: ImageRules,
        marks: ImageMarks | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate the weights; `load` fills them."""
        super().__init__()
        if config.patch_size != rules.patch_size:
            raise CheckpointError(
                f"vision_config.patch_size is {config.patch_size}, but {RULES_FILE} has "
                f"{rules.patch_size}"
            )
        self.config, self.rules, self.marks = config, rules, marks or ImageMarks()
        target = torch.device(device)
        self.vpm = VisionTransformer(config, target, dtype)
        self.resampler = Resampler(config.query_count, config.hidden, config.width, target, dtype)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Vision | None:
        """Allocate the encoder that the checkpoint describes; None if `init_vision` is false."""
        pictures = Pictures.load(checkpoint.directory, checkpoint.config)
        if pictures is None:
            return None
        config = VisionConfig.from_json(checkpoint.config)
        return cls(config, pictures.rules, pictures.marks, device, dtype)

    def load(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Fill the weights; return the names of the vision tensors that are not used."""
        return (
            *checkpoint.load_into(self.vpm, "vpm."),
            *checkpoint.load_into(self.resampler, "resampler."),
        )

    @property
    def pictures(self) -> Pictures:
        """The preparation of images, which needs no weights."""
        return Pictures(self.rules, self.marks, self.rows)

    @property
    def rows(self) -> int:
        """The number of embeddings of one tile."""
        return self.config.query_count

    def prepare(
        self, data: bytes, max_slices: int | None = None, max_pixels: int = MAX_PIXELS
    ) -> PreparedImage:
        """Decode and cut an encoded image (`Pictures.prepare`); safe in any thread."""
        return self.pictures.prepare(data, max_slices, max_pixels)

    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        """Encode images; return the embeddings [tiles, rows, hidden] of each.

        The result of an image does not depend on the other images.
        """
        rest = iter(self.encode_all([tile for image in images for tile in image.tiles]))
        return [torch.stack([next(rest) for _ in image.tiles]) for image in images]

    @torch.inference_mode()
    def encode_all(self, tiles: Sequence[ImageTile]) -> list[Tensor]:
        """Encode tiles of any sizes; return the embeddings [rows, hidden] of each.

        The result of a tile does not depend on the other tiles.
        """
        found: dict[int, Tensor] = {}
        for batch in self._batches(tiles):
            embeds = self.encode_tiles([tiles[index] for index in batch])
            found.update(zip(batch, embeds.unbind(), strict=True))
        return [found[index] for index in range(len(tiles))]

    def normalize(self, patches: Tensor) -> Tensor:
        """Map uint8 pixels [..., 3 * patch_size^2] to normalised float32 of the same shape."""
        mean, std = (
            upload(values, patches.device, torch.float32)[:, None]
            for values in (self.rules.mean, self.rules.std)
        )
        channels = patches.view(*patches.shape[:-1], len(mean), -1).float() / 255
        return ((channels - mean) / std).flatten(-2)

    def _batches(self, tiles: Sequence[ImageTile]) -> Iterator[list[int]]:
        """Yield the indices of tiles for each batch. Tiles are sorted by size, to limit padding.

        The number of patches of a batch is bounded, so a batch of large tiles has fewer tiles.
        """
        budget = 2 * self.config.batch_size * self.rules.scaled_patches
        batch: list[int] = []
        for index in sorted(range(len(tiles)), key=lambda index: len(tiles[index].patches)):
            is_over = (len(batch) + 1) * len(tiles[index].patches) > budget
            if batch and (is_over or len(batch) == self.config.batch_size):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def encode_tiles(self, tiles: Sequence[ImageTile]) -> Tensor:
        """Encode one batch of tiles to embeddings [tiles, rows, hidden]."""
        weight = self.resampler.proj
        device = weight.device
        lengths = [len(tile.patches) for tile in tiles]
        longest = max(lengths)
        pixels = np.zeros((len(tiles), longest, tiles[0].patches.shape[1]), np.uint8)
        positions = torch.zeros((len(tiles), longest), dtype=torch.long)
        per_side = self.config.positions_per_side
        for index, tile in enumerate(tiles):
            pixels[index, : lengths[index]] = tile.patches
            indices = position_indices(tile.rows, tile.columns, per_side)
            positions[index, : lengths[index]] = indices

        order = torch.arange(longest, device=device)
        mask = None
        if min(lengths) < longest:
            mask = (order < upload(lengths, device)[:, None])[:, None, None]
        patches = self.normalize(upload(pixels, device)).to(weight.dtype)
        states = self.vpm(patches, upload(positions, device), mask)

        widths = upload([tile.columns for tile in tiles], device)[:, None]
        side = max(max(tile.rows, tile.columns) for tile in tiles)
        rows = (order // widths).clamp(max=side - 1)  # row numbers of padding are out of range
        return self.resampler(states, rows, order % widths, side, mask)
