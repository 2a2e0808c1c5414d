"""The HiFT generator with state. It cross-fades the chunks of a turn, for several slots at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, product

import numpy as np
import torch
from torch import Tensor
from torch.backends import cudnn

from duplane.worker.models.minicpm_o.batch_sizes import padded_size, padded_sizes
from duplane.worker.models.minicpm_o.blocks.block import Block, Numbers, Staged
from duplane.worker.models.minicpm_o.transfer import Download
from duplane.worker.models.minicpm_o.vocoder.hift import HiFT, masked, valid
from duplane.worker.models.minicpm_o.vocoder.source_noise import NoiseCounter, NoiseTable
from duplane.worker.models.types import FloatArray

OVERLAP_FRAMES = 8
"""Mel frames of the previous chunk that are computed again with a chunk, and cross-faded."""
FRAME_BUCKETS = (50, 56)
"""Numbers of mel frames of chunks on a CUDA device. Most chunks inside a turn have 50, all others
fewer; the last one of a turn has at most 56. All that have not 50 are padded to 56."""
MOST_ROWS = 8
"""Maximum number of chunks in one launch on a CUDA device."""


@dataclass(frozen=True)
class MelChunk:
    """The mel `[frames, mel]` of one slot's chunk, and the noise of its source, if any."""

    slot: int
    mel: Tensor
    is_first: bool
    is_last: bool
    noise: NoiseCounter | None


@dataclass(frozen=True)
class HiFTForm:
    """What is fixed in a launch: the number of chunks, and the new mel frames of each.

    `is_padded` means that chunks may have fewer frames. A first chunk has no overlap with a
    previous one. `has_noise` means noise in the source.
    """

    rows: int
    frames: int
    is_first: bool
    is_padded: bool
    has_noise: bool


class HiFTStream:
    """The HiFT generator with the state of `slot_count` slots, allocated once.

    A chunk reads one of the two states of its slot and writes the other one, so it can be computed
    again until `decode` has returned. On a CUDA device the stream `has_buckets`: it pads launches
    to few sizes (see `batch_sizes`) and chunks to few lengths.
    """

    def __init__(self, hift: HiFT, slot_count: int, device: torch.device) -> None:
        hift.prepare()
        self.hift = hift
        self.has_buckets = device.type == "cuda"
        self.overlap = OVERLAP_FRAMES * hift.config.frame_samples
        states = 2 * slot_count
        self._mel = torch.zeros(states, OVERLAP_FRAMES, hift.config.in_channels, device=device)
        self._source = torch.zeros(states, self.overlap, device=device)
        self._speech = torch.zeros(states, self.overlap, device=device)
        self._sides = [0] * slot_count  # the state of each slot that is valid: 0 or 1
        window = np.hamming(2 * self.overlap).astype(np.float32)
        self._noise = NoiseTable(device)
        self._fade_in = torch.as_tensor(window[: self.overlap]).to(device)
        self._fade_out = torch.as_tensor(window[self.overlap :]).to(device)

        def new_mel(form: HiFTForm) -> list[Tensor]:
            shape = form.rows, form.frames, hift.config.in_channels
            return [torch.zeros(shape, device=device)]

        self._block = Block(self._compute, device, new_mel)

    @property
    def noise_bytes(self) -> int:
        """The size of the table of the source noise."""
        return self._noise.values.nbytes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All state tensors `[slots, 2, ...]`: mel, source and speech of the overlap."""
        every = self._mel, self._source, self._speech
        return tuple(tensor.view(-1, 2, *tensor.shape[1:]) for tensor in every)

    def state(self, slot: int) -> tuple[Tensor, ...]:
        """Return the present mel `[frames, mel]`, source and speech `[samples]` of a slot."""
        mel, source, speech = (tensor[slot, self._sides[slot]] for tensor in self.tensors)
        return mel, source, speech

    def decode(self, chunks: Sequence[MelChunk]) -> list[FloatArray]:
        """Return the float32 samples of each chunk; the chunks have different slots.

        If the stream `has_buckets`, there are at most `MOST_ROWS` chunks.

        Every chunk but the last of a turn holds back the samples of its last `OVERLAP_FRAMES`
        frames, for the cross-fade with the next chunk. The first chunk starts with an equally long
        silence, so the samples of a turn are as long as its mel.

        Chunks run together if they are equally long. If the stream `has_buckets`, chunks run
        together if they are padded to the same length. The state of the slots changes only after
        all chunks have been computed.
        """
        order = sorted(range(len(chunks)), key=lambda index: self._shape(chunks[index]))
        launched: list[tuple[Sequence[int], Download]] = []
        for _, group in groupby(order, key=lambda index: self._shape(chunks[index])):
            indices = list(group)
            launched.append((indices, self.launch([chunks[index] for index in indices])))
        # The host waits for the device only now, when everything is launched.
        samples: dict[int, FloatArray] = {}
        for indices, download in launched:
            for index, row in zip(indices, download.result(), strict=False):  # and padding
                samples[index] = self._cut(chunks[index], row)
        for chunk in chunks:
            if not chunk.is_last:
                self._sides[chunk.slot] ^= 1
        return [samples[index] for index in range(len(chunks))]

    def _cut(self, chunk: MelChunk, row: FloatArray) -> FloatArray:
        """Return the samples of a chunk, without padding and without those that it holds back."""
        row = row[: self._frames(chunk) * self.hift.config.frame_samples]
        if chunk.is_last:
            return row
        row = row[: len(row) - self.overlap]
        return np.pad(row, (self.overlap, 0)) if chunk.is_first else row

    def launch(self, chunks: Sequence[MelChunk]) -> Download:
        """Compute chunks of one `_shape`, without waiting; the result has a row for each.

        The state that the chunks write is not yet the present one of their slots.
        """
        count, rows = len(chunks), list(chunks)
        if self.has_buckets:
            rows += rows[:1] * (padded_size(count) - count)
        form = HiFTForm(len(rows), *self._shape(chunks[0]))
        staged = self._block.stage(form, np.array([self._numbers(chunk) for chunk in rows]))
        for row, chunk in zip(staged.tensors[0], rows, strict=True):
            row[: len(chunk.mel)] = chunk.mel
        return Download(staged.run())

    def _numbers(self, chunk: MelChunk) -> tuple[int, ...]:
        """Return the numbers of a chunk: state to read, state to write, frames, and the noise."""
        side = self._sides[chunk.slot]
        states = 2 * chunk.slot + side, 2 * chunk.slot + 1 - side
        noise = (0, 0, 0) if chunk.noise is None else chunk.noise.numbers
        return *states, self._frames(chunk), *noise

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute a launch of every padded size once. No state changes."""
        for form in self._forms(has_noise=True):
            self._block.stage(form, self._trial(form)[0]).run()
        self._clear()

    @torch.inference_mode()
    def capture(self, *, has_noise: bool) -> None:
        """Capture the launches of all padded sizes; see `Block.capture`. All slots are clean."""
        generator = torch.Generator().manual_seed(0)
        mels = torch.randn(MOST_ROWS, FRAME_BUCKETS[-1], self._mel.shape[2], generator=generator)
        mels = mels[self._trial_slots(MOST_ROWS)].to(self._mel.device)

        def fill(staged: Staged) -> None:
            mel = staged.tensors[0]
            mel.copy_(mels[: len(mel), : mel.shape[1]])

        trials = [(form, self._trial(form)) for form in self._forms(has_noise=has_noise)]
        self._block.capture("HiFT", trials, self._clear, fill)

    def _forms(self, *, has_noise: bool) -> list[HiFTForm]:
        """Return the forms of all padded launches, largest first."""
        sizes = reversed(padded_sizes(min(MOST_ROWS, len(self._sides))))
        every = product(sizes, reversed(FRAME_BUCKETS), (True, False))
        full = FRAME_BUCKETS[0]
        return [
            HiFTForm(rows, frames, is_first, is_padded=frames != full, has_noise=has_noise)
            for rows, frames, is_first in every
        ]

    def _trial_slots(self, rows: int) -> Numbers:
        """Return the slots of the rows of a trial: all slots, then the last one as padding."""
        return np.arange(rows).clip(max=len(self._sides) - 1)

    def _trial(self, form: HiFTForm) -> list[Numbers]:
        """Return the numbers of two launches; the second one continues the first one."""
        slots = self._trial_slots(form.rows)
        frames = form.frames + (0 if form.is_first else OVERLAP_FRAMES) - form.is_padded * slots
        states = (2 * slots, 2 * slots + 1)
        return [
            np.stack((*pair, frames, slots + 1, slots, slots), 1) for pair in (states, states[::-1])
        ]

    def _clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    def _frames(self, chunk: MelChunk) -> int:
        """Return the number of frames of a chunk, including the overlap with the previous one."""
        return len(chunk.mel) + (0 if chunk.is_first else OVERLAP_FRAMES)

    def _shape(self, chunk: MelChunk) -> tuple[int, bool, bool, bool]:
        """Return all values of the form of a chunk's launch but the number of rows."""
        frames, has_noise = len(chunk.mel), chunk.noise is not None
        is_padded = self.has_buckets and frames != FRAME_BUCKETS[0]
        frames = FRAME_BUCKETS[1] if is_padded else frames
        return frames, chunk.is_first, is_padded, has_noise

    def source_samples(self, frames: int, is_first: bool) -> int:
        """Return the length of the source signal of a chunk with `frames` mel frames."""
        return (frames + (0 if is_first else OVERLAP_FRAMES)) * self.hift.config.frame_samples

    def _compute(self, form: HiFTForm, numbers: Tensor, mel: Tensor) -> Tensor:
        """Map the new mel `[rows, frames, mel]` to speech, including the overlaps at both ends.

        `numbers` are those of `_numbers`. Writes the state, and returns `[rows, samples]`.
        """
        read, write, ends = numbers[:, 0], numbers[:, 1], numbers[:, 2]
        overlap = self.overlap
        if not form.is_first:
            mel = torch.cat((self._mel[read], mel), 1)
        frames = ends if form.is_padded else None
        shown = masked(mel.transpose(1, 2).contiguous(), valid(frames, mel.shape[1]))
        noise = None
        if form.has_noise:
            samples = self.source_samples(form.frames, form.is_first)
            noise = self._noise.noise(numbers[:, 3:], samples)
        # TF32 would cause audible errors, because the phase is a running sum of the pitch.
        with cudnn.flags(enabled=True, allow_tf32=False):
            source = self.hift.source(shown, noise, frames)
            if not form.is_first:
                source[:, :overlap] = self._source[read]
            speech = self.hift(shown, source, frames)
        if not form.is_first:
            new, old = speech[:, :overlap] * self._fade_in, self._speech[read] * self._fade_out
            speech[:, :overlap] = new + old
        self._mel[write] = _last(mel, OVERLAP_FRAMES, ends)
        ends = ends * self.hift.config.frame_samples
        self._source[write] = _last(source, overlap, ends)
        self._speech[write] = _last(speech, overlap, ends)
        return speech


def _last(x: Tensor, length: int, ends: Tensor) -> Tensor:
    """Return the `length` entries of dimension 1 before the end of each row.

    A row that is shorter repeats its first entry; only the last chunk of a turn may be so short.
    """
    columns = ends[:, None] + torch.arange(-length, 0, device=x.device)
    rows = torch.arange(len(x), device=x.device)[:, None]
    return x[rows, columns.clamp_(min=0)]
