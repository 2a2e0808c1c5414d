"""HiFT over slots: mel of a chunk to samples that join on to those of the chunk before.

Decides overlap, cross-fade and what of a chunk is held back; knows nothing about tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.backends import cudnn

from duplane.worker.model.flow_cache import SlotIndex, slot_index
from duplane.worker.model.hift import HiFT
from duplane.worker.model.types import FloatArray

# Mel frames of the chunk before that a chunk is computed with, and is cross-faded over.
OVERLAP_FRAMES = 8


@dataclass(frozen=True)
class MelChunk:
    """The mel `[frames, mel]` of one slot's chunk; `noise` `[samples]` is that of its source."""

    slot: int
    mel: Tensor
    is_first: bool
    is_last: bool
    noise: Tensor | None


@dataclass(frozen=True)
class _Left:
    """What a run leaves: mel `[batch, mel, frames]`, source and speech `[batch, samples]`."""

    slots: SlotIndex
    mel: Tensor
    source: Tensor
    speech: Tensor


class HiFTStream:
    """The generator with the state of `slot_count` slots: `[slots, ...]`, allocated once."""

    def __init__(self, hift: HiFT, slot_count: int, device: torch.device) -> None:
        hift.prepare()
        self.hift = hift
        self.overlap = OVERLAP_FRAMES * hift.config.frame_samples
        self.mel = torch.zeros(slot_count, hift.config.in_channels, OVERLAP_FRAMES, device=device)
        self.source = torch.zeros(slot_count, self.overlap, device=device)
        self.speech = torch.zeros(slot_count, self.overlap, device=device)
        window = np.hamming(2 * self.overlap).astype(np.float32)
        self._fade_in = torch.as_tensor(window[: self.overlap]).to(device)
        self._fade_out = torch.as_tensor(window[self.overlap :]).to(device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All state tensors, each with the slot dimension first."""
        return (self.mel, self.source, self.speech)

    def decode(self, chunks: Sequence[MelChunk]) -> list[FloatArray]:
        """Return the samples of each chunk, float32; chunks are of different slots.

        A chunk that is not the last holds back its last `OVERLAP_FRAMES` frames for the
        cross-fade with the next. The first chunk starts with as much silence instead, so that
        all chunks of a turn are as long as their mel.

        Chunks of equal length run together: convolutions look both ways and pad with zeros, so
        padding would be heard. The state of the slots changes when all of them have run.
        """

        def shape(place: int) -> tuple[int, bool]:
            return chunks[place].mel.shape[0], chunks[place].is_first

        samples: dict[int, FloatArray] = {}
        left: list[_Left] = []
        order = sorted(range(len(chunks)), key=lambda place: (shape(place), chunks[place].slot))
        for _, group in groupby(order, key=shape):
            places = list(group)
            # TF32 in a convolution would be heard: the source adds up the error of its f0.
            with cudnn.flags(enabled=True, allow_tf32=False):
                made = self._run([chunks[place] for place in places])
            left.append(made)
            for place, row in zip(places, made.speech.cpu().numpy(), strict=True):
                samples[place] = self._cut(chunks[place], row)
        for made in left:
            self._keep(made)
        return [samples[place] for place in range(len(chunks))]

    def source_samples(self, frames: int, is_first: bool) -> int:
        """Samples of source that a chunk of `frames` frames of mel needs."""
        return (frames + (0 if is_first else OVERLAP_FRAMES)) * self.hift.config.frame_samples

    def _run(self, chunks: Sequence[MelChunk]) -> _Left:
        """Run chunks of one length, in rising order of slots; nothing is cut from the speech."""
        slots = slot_index([chunk.slot for chunk in chunks], self.mel.device)
        mel = torch.stack([chunk.mel for chunk in chunks]).transpose(1, 2)
        is_first, overlap = chunks[0].is_first, self.overlap
        if not is_first:
            mel = torch.cat((self.mel[slots], mel), 2)
        noises = [chunk.noise for chunk in chunks if chunk.noise is not None]
        source = self.hift.source(mel, torch.stack(noises) if noises else None)
        if not is_first:
            source[:, :overlap] = self.source[slots]
        speech = self.hift(mel, source)
        if not is_first:
            new, old = speech[:, :overlap] * self._fade_in, self.speech[slots] * self._fade_out
            speech[:, :overlap] = new + old
        return _Left(slots, mel, source, speech)

    def _keep(self, left: _Left) -> None:
        """Keep what the next chunk of each slot joins on to."""
        slots, overlap = left.slots, self.overlap
        if left.mel.shape[2] < OVERLAP_FRAMES:
            return  # a first chunk that is also the last
        self.mel[slots] = left.mel[:, :, -OVERLAP_FRAMES:]
        self.source[slots] = left.source[:, -overlap:]
        self.speech[slots] = left.speech[:, -overlap:]

    def _cut(self, chunk: MelChunk, speech: FloatArray) -> FloatArray:
        if chunk.is_last:
            return speech
        heard = speech[: len(speech) - self.overlap]
        return np.pad(heard, (self.overlap, 0)) if chunk.is_first else heard
