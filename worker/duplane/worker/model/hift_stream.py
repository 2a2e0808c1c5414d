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

from duplane.worker.model.flow_cache import slot_index
from duplane.worker.model.hift import HiFT
from duplane.worker.model.types import FloatArray

# Mel frames of the chunk before that a chunk is computed with, and is cross-faded over.
OVERLAP_FRAMES = 8


@dataclass(frozen=True)
class MelChunk:
    """The mel `[frames, mel]` of one slot's chunk; `generator` draws the noise of its source."""

    slot: int
    mel: Tensor
    is_first: bool
    is_last: bool
    generator: torch.Generator | None


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
        padding would be heard.
        """

        def shape(place: int) -> tuple[int, bool]:
            return chunks[place].mel.shape[0], chunks[place].is_first

        samples: dict[int, FloatArray] = {}
        order = sorted(range(len(chunks)), key=lambda place: (shape(place), chunks[place].slot))
        for _, group in groupby(order, key=shape):
            places = list(group)
            # TF32 in a convolution would be heard: the source adds up the error of its f0.
            with cudnn.flags(enabled=True, allow_tf32=False):
                speech = self._run([chunks[place] for place in places])
            speech = speech.cpu().numpy()
            for place, row in zip(places, speech, strict=True):
                samples[place] = self._cut(chunks[place], row)
        return [samples[place] for place in range(len(chunks))]

    def _run(self, chunks: Sequence[MelChunk]) -> Tensor:
        """Run chunks of one length, in rising order of slots: `[batch, samples]`, nothing cut."""
        slots = slot_index([chunk.slot for chunk in chunks], self.mel.device)
        mel = torch.stack([chunk.mel for chunk in chunks]).transpose(1, 2)
        is_first, overlap = chunks[0].is_first, self.overlap
        if not is_first:
            mel = torch.cat((self.mel[slots], mel), 2)
        source = self.hift.source(mel, self._noise(chunks, mel.shape[2]))
        if not is_first:
            source[:, :overlap] = self.source[slots]
        speech = self.hift(mel, source)
        if not is_first:
            new, old = speech[:, :overlap] * self._fade_in, self.speech[slots] * self._fade_out
            speech[:, :overlap] = new + old
        if mel.shape[2] >= OVERLAP_FRAMES:  # shorter only where a first chunk is also the last
            self.mel[slots] = mel[:, :, -OVERLAP_FRAMES:]
            self.source[slots] = source[:, -overlap:]
            self.speech[slots] = speech[:, -overlap:]
        return speech

    def _noise(self, chunks: Sequence[MelChunk], frames: int) -> Tensor | None:
        """Draw normal noise `[batch, samples]`, each slot from its own generator."""
        count = frames * self.hift.config.frame_samples
        drawn = [
            torch.randn(count, generator=chunk.generator, device=self.mel.device)
            for chunk in chunks
            if chunk.generator is not None
        ]
        return torch.stack(drawn) if drawn else None

    def _cut(self, chunk: MelChunk, speech: FloatArray) -> FloatArray:
        if chunk.is_last:
            return speech
        heard = speech[: len(speech) - self.overlap]
        return np.pad(heard, (self.overlap, 0)) if chunk.is_first else heard
