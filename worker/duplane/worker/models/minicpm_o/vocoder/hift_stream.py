"""The HiFT generator with state. It cross-fades the chunks of a turn, for several slots at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, product

import numpy as np
import torch
from torch import Tensor
from torch.backends import cudnn

from duplane.worker.models.minicpm_o.batch_sizes import padded_length, padded_size, padded_sizes
from duplane.worker.models.minicpm_o.transfer import download, upload
from duplane.worker.models.minicpm_o.vocoder.flow_cache import slot_index
from duplane.worker.models.minicpm_o.vocoder.hift import HiFT
from duplane.worker.models.minicpm_o.vocoder.source_noise import NoiseCounter, NoiseTable
from duplane.worker.models.types import FloatArray

OVERLAP_FRAMES = 8
"""Mel frames of the previous chunk that are computed again with a chunk, and cross-faded."""
FRAME_BUCKETS = (16, 32, 50, 56)
"""Numbers of mel frames to which chunks are padded. A chunk inside a turn has 50, others fewer; the
last one of a turn has at most 56."""


@dataclass(frozen=True)
class MelChunk:
    """The mel `[frames, mel]` of one slot's chunk, and the noise of its source, if any."""

    slot: int
    mel: Tensor
    is_first: bool
    is_last: bool
    noise: NoiseCounter | None


class HiFTStream:
    """The HiFT generator with the state of `slot_count` slots, `[slots, ...]`, allocated once.

    On a CUDA device the stream `has_buckets`: it pads batches to few sizes (see `batch_sizes`), and
    chunks to few lengths.
    """

    def __init__(self, hift: HiFT, slot_count: int, device: torch.device) -> None:
        hift.prepare()
        self.hift = hift
        self.has_buckets = device.type == "cuda"
        self.overlap = OVERLAP_FRAMES * hift.config.frame_samples
        self.mel = torch.zeros(slot_count, hift.config.in_channels, OVERLAP_FRAMES, device=device)
        self.source = torch.zeros(slot_count, self.overlap, device=device)
        self.speech = torch.zeros(slot_count, self.overlap, device=device)
        window = np.hamming(2 * self.overlap).astype(np.float32)
        self._noise = NoiseTable(device)
        self._fade_in = torch.as_tensor(window[: self.overlap]).to(device)
        self._fade_out = torch.as_tensor(window[self.overlap :]).to(device)

    @property
    def noise_bytes(self) -> int:
        """The size of the table of the source noise."""
        return self._noise.values.nbytes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All state tensors, each with the slot dimension first."""
        return (self.mel, self.source, self.speech)

    def decode(self, chunks: Sequence[MelChunk]) -> list[FloatArray]:
        """Return the float32 samples of each chunk; the chunks have different slots.

        Every chunk but the last of a turn holds back the samples of its last `OVERLAP_FRAMES`
        frames, for the cross-fade with the next chunk. The first chunk starts with an equally long
        silence, so the samples of a turn are as long as its mel.

        Chunks run together if they are equally long. If the stream `has_buckets`, chunks run
        together if they are padded to the same length. The state of the slots changes only after
        all chunks have been computed.
        """
        order = sorted(
            range(len(chunks)), key=lambda index: (self._shape(chunks[index]), chunks[index].slot)
        )
        computed: list[tuple[list[int], list[MelChunk], Tensor, Tensor, Tensor]] = []
        for shape, group in groupby(order, key=lambda index: self._shape(chunks[index])):
            indices = list(group)
            together = [chunks[index] for index in indices]
            computed.append((indices, together, *self._generate(together, shape)))
        # The host waits for the device only now, when all groups are launched.
        samples: dict[int, FloatArray] = {}
        for indices, together, _, _, speech in computed:
            for index, chunk, row in zip(indices, together, download(speech), strict=True):
                row = row[: self._frames(chunk) * self.hift.config.frame_samples]
                if not chunk.is_last:
                    row = row[: len(row) - self.overlap]
                    row = np.pad(row, (self.overlap, 0)) if chunk.is_first else row
                samples[index] = row
        for _, together, mel, source, speech in computed:
            self._keep(together, mel, source, speech)
        return [samples[index] for index in range(len(chunks))]

    def _keep(
        self, chunks: Sequence[MelChunk], mel: Tensor, source: Tensor, speech: Tensor
    ) -> None:
        """Store the overlap with the next chunk, for each turn that continues."""
        for frames, group in groupby(enumerate(chunks), key=lambda item: self._frames(item[1])):
            rows = [(row, chunk.slot) for row, chunk in group if not chunk.is_last]
            if not rows:
                continue
            slots = slot_index([slot for _, slot in rows], self.mel.device)
            own = slot_index([row for row, _ in rows], self.mel.device)
            end = frames * self.hift.config.frame_samples
            self.mel[slots] = mel[own, :, frames - OVERLAP_FRAMES : frames]
            self.source[slots] = source[own, end - self.overlap : end]
            self.speech[slots] = speech[own, end - self.overlap : end]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute a batch of every padded size once. No state changes."""
        for frames, is_first in product(FRAME_BUCKETS, (True, False)):
            for count in padded_sizes(len(self.mel)):
                mel = torch.zeros(frames, self.mel.shape[1], device=self.mel.device)
                chunks = [MelChunk(0, mel, is_first, False, NoiseCounter(1, 0))] * count
                self._generate(chunks, (frames, is_first))

    def _frames(self, chunk: MelChunk) -> int:
        """Return the number of frames of a chunk, including the overlap with the previous one."""
        return len(chunk.mel) + (0 if chunk.is_first else OVERLAP_FRAMES)

    def _shape(self, chunk: MelChunk) -> tuple[int, bool]:
        """Return the number of frames to which a chunk is padded, and `chunk.is_first`."""
        buckets = FRAME_BUCKETS if self.has_buckets else ()
        return padded_length(len(chunk.mel), buckets), chunk.is_first

    def source_samples(self, frames: int, is_first: bool) -> int:
        """Return the length of the source signal of a chunk with `frames` mel frames."""
        return (frames + (0 if is_first else OVERLAP_FRAMES)) * self.hift.config.frame_samples

    def _generate(
        self, chunks: Sequence[MelChunk], shape: tuple[int, bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute chunks of one `shape` (see `_shape`), including the overlaps at both ends.

        Returns mel `[batch, mel, frames]`, source and speech `[batch, samples]`.
        """
        width, is_first = shape
        count, rows = len(chunks), list(chunks)
        if self.has_buckets:
            rows += rows[:1] * (padded_size(count) - count)
        lengths = [self._frames(chunk) for chunk in rows]
        slots = slot_index([chunk.slot for chunk in rows], self.mel.device)
        mel = torch.stack([_padded(chunk.mel, width) for chunk in rows]).transpose(1, 2)
        overlap = self.overlap
        if not is_first:
            mel = torch.cat((self.mel[slots], mel), 2)
        samples = self.source_samples(width, is_first)
        counters = [chunk.noise for chunk in rows if chunk.noise is not None]
        noise = self._noise.noise(counters, samples) if counters else None
        frames = None
        if min(lengths) < mel.shape[2]:
            frames = upload(lengths, self.mel.device)
        # TF32 would cause audible errors, because the phase is a running sum of the pitch.
        with cudnn.flags(enabled=True, allow_tf32=False):
            source = self.hift.source(mel, noise, frames)
            if not is_first:
                source[:, :overlap] = self.source[slots]
            speech = self.hift(mel, source, frames)
        if not is_first:
            new, old = speech[:, :overlap] * self._fade_in, self.speech[slots] * self._fade_out
            speech[:, :overlap] = new + old
        return mel[:count], source[:count], speech[:count]


def _padded(values: Tensor, length: int) -> Tensor:
    """Append zeros along the first dimension, up to `length`."""
    if len(values) == length:
        return values
    return torch.cat((values, values.new_zeros(length - len(values), *values.shape[1:])))
