"""The streaming vocoder: maps speech tokens of several slots to float32 samples at 24 kHz.

`prime` sets the voice of a slot. Each turn starts from the state after the voice's prompt.
Source: `Token2wav` of the package `stepaudio2` in minicpmo-utils 1.0.6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor

from duplane.worker.models.minicpm_o.batch_sizes import padded_length, padded_size, padded_sizes
from duplane.worker.models.minicpm_o.blocks.block import Block, Numbers
from duplane.worker.models.minicpm_o.transfer import upload
from duplane.worker.models.minicpm_o.vocoder.files import load_flow, load_hift
from duplane.worker.models.minicpm_o.vocoder.flow import Flow, FlowChunk, TurnFrames
from duplane.worker.models.minicpm_o.vocoder.flow_cache import RECENT_FRAMES, FlowCaches, FlowForm
from duplane.worker.models.minicpm_o.vocoder.hift import HiFT
from duplane.worker.models.minicpm_o.vocoder.hift_stream import (
    FRAME_BUCKETS,
    MOST_ROWS,
    OVERLAP_FRAMES,
    HiFTStream,
    MelChunk,
)
from duplane.worker.models.minicpm_o.vocoder.source_noise import NoiseCounter
from duplane.worker.models.minicpm_o.vocoder.token_buffer import WINDOW_TOKENS
from duplane.worker.models.minicpm_o.vocoder.types import (
    Limits,
    VocoderChunk,
    VocoderError,
    VocoderOptions,
    VocoderVoice,
)
from duplane.worker.models.types import FloatArray

NOISE_SEED = 0
PROMPT_STEP = 50
"""The prompts of voices are padded to multiples of this number of tokens, on a CUDA device."""


@dataclass(frozen=True)
class _SlotVoice:
    """The voice of one slot, its digest, and its source noise, if any."""

    digest: bytes
    voice: VocoderVoice
    noise: NoiseCounter | None


@dataclass
class _Turn:
    """The turn of one slot."""

    frames: TurnFrames
    is_first: bool = True


class Vocoder:
    """Flow and HiFT with the state of `slot_count` slots, allocated once.

    `live` holds the caches of the present turn of each slot. `base` holds, for each of the most
    recently used voices, the caches after the prompt of the voice; a turn starts from a copy of
    these. Slots with the same voice share an entry of `base`. An evicted entry is computed again
    when it is needed.
    """

    def __init__(
        self, flow: Flow, hift: HiFT, *, slot_count: int, options: VocoderOptions | None = None
    ) -> None:
        options = options or VocoderOptions()
        self.flow, self.slot_count = flow, slot_count
        self.device = flow.encoder_proj.weight.device
        self.lookahead, self.window = flow.lookahead, WINDOW_TOKENS
        self.silence_token_id = options.silence_token_id
        self.limits = Limits(
            vocabulary=flow.config.vocab_size,
            stride=flow.stride,
            mel_width=flow.config.output_size,
            speaker_width=flow.config.spk_embed_dim,
            lookahead=flow.lookahead,
            max_prompt_frames=options.max_prompt_frames,
            max_chunk_tokens=self.window + self.lookahead,
            min_first_frames=OVERLAP_FRAMES,
        )
        chunk = self.limits.max_chunk_tokens * flow.stride
        prompt = options.max_prompt_frames
        kept = prompt + RECENT_FRAMES
        with torch.inference_mode():
            flow.prepare(kept + chunk, max(chunk, prompt))
            shape = flow.config.cache_shape(options.steps)
            voices = min(slot_count, options.cached_voices)
            self.base = FlowCaches(shape, voices, capacity=0, chunk=prompt, device=self.device)
            self.live = FlowCaches(
                shape, slot_count, capacity=kept, chunk=chunk, device=self.device
            )
            self.stream = HiFTStream(hift, slot_count, self.device)
        self._noise = _noise_table(options.noise, kept + chunk, flow.config.output_size)
        self._noise = self._noise.to(self.device)
        self._has_source_noise = options.has_source_noise
        self.is_static = False  # whether launches of the flow model have padded sizes

        def compute(form: FlowForm, numbers: Tensor) -> Tensor:
            return self.flow(form, numbers, self.live, self._noise)

        self._block = Block[FlowForm](compute, self.device)
        self._entries: LRUCache[bytes, int] = LRUCache(voices)  # index in `base` by voice
        self._free_entries = list(reversed(range(voices)))
        self._voices: list[_SlotVoice | None] = [None] * slot_count
        self._turns: list[_Turn | None] = [None] * slot_count

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        slot_count: int,
        device: str = "cpu",
        options: VocoderOptions | None = None,
    ) -> Vocoder:
        """Load flow.yaml, flow.pt, hift.pt and, if present, hift_dims.json from `directory`.

        Raises `CheckpointError` for files that cannot be used.
        """
        options = options or VocoderOptions()
        target = torch.device(device)
        return cls(
            load_flow(directory, steps=options.steps, device=target),
            load_hift(directory, device=target),
            slot_count=slot_count,
            options=options,
        )

    @property
    def has_buckets(self) -> bool:
        """Whether batches and prompts are padded to few sizes."""
        return self.stream.has_buckets

    @property
    def most_rows(self) -> int:
        """The maximum number of chunks in one call of `encode`."""
        return min(MOST_ROWS, self.slot_count) if self.has_buckets else self.slot_count

    @property
    def memory_bytes(self) -> int:
        """The size of all weights, tables and state."""
        modules = (self.flow, self.stream.hift)
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        state = (*self._state(), *self.base.tensors)
        return self.stream.noise_bytes + sum(t.nbytes for t in (*tensors, *state, self._noise))

    @torch.inference_mode()
    def prime(
        self, slot: int, voice: VocoderVoice, *, seed: int | None = None, is_quick: bool = False
    ) -> None:
        """Set the voice of a slot and start its first turn; if `is_quick`, only if this is quick.

        `seed` makes the slot's samples reproducible. Raises `VocoderError` for a voice whose parts
        do not match or which is longer than `max_prompt_frames`.
        """
        self.limits.check_voice(voice)
        noise = NoiseCounter.of_seed(seed) if self._has_source_noise else None
        self._voices[slot] = _SlotVoice(voice.digest(), voice, noise)
        if not is_quick or self.has_prompt(slot):
            self.start_turn(slot)

    def has_prompt(self, slot: int) -> bool:
        """Whether the prompt of the slot's voice is cached, so that `start_turn` is quick."""
        voice = self._voices[slot]
        return voice is not None and voice.digest in self._entries

    @torch.inference_mode()
    def start_turn(self, slot: int) -> None:
        """Set the slot to the state after its voice's prompt. The slot must have a voice."""
        voice = self._voice(slot)
        frames = len(voice.voice.prompt_mel)
        self.live.copy_slot(slot, self.base, self._entry(voice), frames)
        self._turns[slot] = _Turn(TurnFrames.of_prompt(frames, self.live.capacity))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute a prompt and a batch of chunks of every padded size once. No slot changes."""
        self.stream.warm_up()
        limits = self.limits
        for count in self._prompt_buckets():
            mel = np.zeros((count * limits.stride, limits.mel_width), np.float32)
            embedding = np.zeros(limits.speaker_width, np.float32)
            self.render_mel(VocoderVoice(np.zeros(count, np.int64), mel, embedding), ())

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture flow and HiFT as CUDA graphs of padded sizes. All slots must be clean.

        A launch of the flow model then reads the whole caches of its slots, whatever their length.
        """
        self.stream.capture(has_noise=self._has_source_noise)
        self.is_static = True
        forms = [
            self._padded_form(rows, frames // self.flow.stride)
            for rows in reversed(padded_sizes(self.most_rows))
            for frames in reversed(FRAME_BUCKETS)
        ]
        trials = [(form, self._trial(form)) for form in forms]
        self._block.capture("the flow model", trials, self._clear)

    def _trial(self, form: FlowForm) -> list[Numbers]:
        """Return the numbers of two launches; the second one continues the first one."""
        turns = [TurnFrames(0, []) for _ in range(min(form.rows, self.slot_count))]
        count = form.tokens + self.lookahead
        found: list[Numbers] = []
        for _ in range(2):
            rows = [
                FlowChunk(slot, turn, range(slot, count), is_last=False)
                for slot, turn in enumerate(turns)
            ]
            plan = self.flow.plan(rows, self.live, form)
            found.append(plan.numbers)
            for turn, columns in zip(turns, plan.columns, strict=True):
                turn.columns = columns
        return found

    def _clear(self) -> None:
        for tensor in self.live.tensors:
            tensor.zero_()

    def _prompt_buckets(self) -> list[int]:
        """Return the numbers of tokens to which prompts are padded, ascending."""
        most = self.limits.max_prompt_frames // self.limits.stride
        return [*range(PROMPT_STEP, most, PROMPT_STEP), most]

    def decode(self, chunks: Sequence[VocoderChunk]) -> list[FloatArray]:
        """Decode chunks to float32 samples at 24 kHz, one array per chunk, in the same order.

        A chunk gives two mel frames per token, not counting lookahead. All chunks but the last hold
        back 160 ms of sound, which the next chunk of the turn adds. Chunks of different slots run
        together; chunks of one slot run in the given order. After the last chunk of a turn call
        `start_turn`. If a chunk is invalid, raises `VocoderError` and changes nothing.
        """
        self._check(chunks)
        samples: dict[int, FloatArray] = {}
        for indices in _batches(chunks, self.most_rows):
            together = [chunks[index] for index in indices]
            decoded = self.decode_mel(together, self.encode(together))
            samples.update(zip(indices, decoded, strict=True))
        return [samples[index] for index in range(len(chunks))]

    @torch.inference_mode()
    def encode(self, chunks: Sequence[VocoderChunk]) -> list[Tensor]:
        """Run the flow model for one chunk of each of several slots; return mel `[frames, mel]`.

        After an exception the call can be repeated for the same chunks, with the same result.
        """
        order = sorted(range(len(chunks)), key=lambda index: chunks[index].slot)
        rows = [
            FlowChunk(chunk.slot, self._turn(chunk.slot).frames, chunk.tokens, chunk.is_last)
            for chunk in (chunks[index] for index in order)
        ]
        counts = [self.flow.encoded(len(row.tokens), row.is_last) for row in rows]
        form = self._padded_form(len(rows), max(counts)) if self.is_static else None
        plan = self.flow.plan(rows, self.live, form)
        # The result of a captured form is overwritten by its next launch.
        padded = self._block.stage(plan.form, plan.numbers).run()
        padded = padded.clone() if self.is_static else padded
        mels: dict[int, Tensor] = {}
        for index, row, count, columns, mel in zip(
            order, rows, counts, plan.columns, padded, strict=False
        ):
            row.frames.columns = columns
            mels[index] = mel[: count * self.flow.stride]
        return [mels[index] for index in range(len(chunks))]

    def _padded_form(self, rows: int, tokens: int) -> FlowForm:
        """Return the form of a launch whose sizes are padded; see `capture`."""
        frames = padded_length(tokens * self.flow.stride, FRAME_BUCKETS)
        capacity = self.live.capacity
        moved = self.live.token_capacity, capacity, frames
        return FlowForm(padded_size(rows), frames // self.flow.stride, capacity, moved)

    @torch.inference_mode()
    def decode_mel(
        self, chunks: Sequence[VocoderChunk], mels: Sequence[Tensor]
    ) -> list[FloatArray]:
        """Run HiFT for the mel of `encode`; return samples.

        After an exception the call can be repeated for the same chunks, with the same result.
        """
        samples = self.stream.decode(
            [
                MelChunk(
                    chunk.slot,
                    mel,
                    self._turn(chunk.slot).is_first,
                    chunk.is_last,
                    self._voice(chunk.slot).noise,
                )
                for chunk, mel in zip(chunks, mels, strict=True)
            ]
        )
        for chunk, mel in zip(chunks, mels, strict=True):
            self._count_noise(chunk.slot, len(mel))
            if chunk.is_last:
                self._turns[chunk.slot] = None
        return samples

    def _count_noise(self, slot: int, frames: int) -> None:
        """Count the source noise of a chunk of the slot's turn, which has `frames` mel frames."""
        turn, noise = self._turn(slot), self._voice(slot).noise
        if noise is not None:
            noise.position += self.stream.source_samples(frames, turn.is_first)
        turn.is_first = False

    def skip(self, chunks: Sequence[VocoderChunk]) -> None:
        """Count the source noise of chunks of one turn that were decoded before.

        Call `start_turn` before the next chunk is decoded.
        """
        for chunk in chunks:
            frames = self.flow.encoded(len(chunk.tokens), chunk.is_last) * self.flow.stride
            self._count_noise(chunk.slot, frames)

    @torch.inference_mode()
    def repeat(self, chunk: VocoderChunk, *, is_recent: bool) -> None:
        """Restore the state after `chunk`, an earlier chunk of the open turn.

        The flow model needs every chunk of the turn, in order. HiFT needs only the two latest
        chunks (`is_recent`): its state after a chunk depends on this chunk, on the source of the
        previous chunk, and on the mel of the chunk before the previous one.
        """
        mel = self.encode([chunk])[0]
        if is_recent:
            self.decode_mel([chunk], [mel])
        else:
            self.skip([chunk])
            self.stream.state(chunk.slot)[0].copy_(mel[-OVERLAP_FRAMES:])

    @torch.inference_mode()
    def render_mel(self, voice: VocoderVoice, tokens: Sequence[int]) -> Tensor:
        """Compute the mel `[frames, mel]` of a whole utterance in one pass, without a slot.

        The prompt and the utterance together must fit into `max_prompt_frames`.
        """
        self.limits.check_voice(voice, tokens)
        index = self._take_entry()
        try:
            mel = self._condition(index, voice, tokens, is_last=True)
        finally:
            self._free_entries.append(index)
        return mel[len(voice.prompt_mel) :]

    def cached_frames(self, slot: int) -> int:
        """Return the number of mel frames in the slot's attention caches; 0 without a turn."""
        turn = self._turns[slot]
        return 0 if turn is None else len(turn.frames.columns)

    @torch.inference_mode()
    def reset(self, slot: int) -> None:
        """Remove the slot's voice and zero its state."""
        self._voices[slot] = self._turns[slot] = None
        for tensor in self._state():
            tensor[slot] = 0

    def is_clean(self, slot: int) -> bool:
        """True if the slot has no voice and no turn, and its state is zero."""
        if self._voices[slot] is not None or self._turns[slot] is not None:
            return False
        return not any(bool(tensor[slot].any()) for tensor in self._state())

    def _state(self) -> Iterator[Tensor]:
        """Yield the state tensors, slots first."""
        yield from self.live.tensors
        yield from self.stream.tensors

    def _entry(self, voice: _SlotVoice) -> int:
        """Return the index of a voice's entry in `base`. If there is no entry yet, compute it."""
        index = self._entries.get(voice.digest)
        if index is None:
            index = self._take_entry()
            try:
                ahead = [self.silence_token_id] * self.lookahead
                self._condition(index, voice.voice, ahead, is_last=False)
            except BaseException:
                self._free_entries.append(index)
                raise
            self._entries[voice.digest] = index
        return index

    def _take_entry(self) -> int:
        """Return the index of a free entry of `base`. If no entry is free, evict a voice."""
        return self._free_entries.pop() if self._free_entries else self._entries.popitem()[1]

    def _condition(
        self, index: int, voice: VocoderVoice, tokens: Sequence[int], *, is_last: bool
    ) -> Tensor:
        """Run the voice's prompt and `tokens` as one chunk, into entry `index` of `base`."""
        spoken = [*voice.prompt_tokens.tolist(), *tokens]
        count = self.flow.encoded(len(spoken), is_last)
        padded = padded_length(count, self._prompt_buckets()) if self.has_buckets else 0
        frames = (padded or count) * self.flow.stride
        known = torch.zeros(1, frames, self.limits.mel_width, device=self.device)
        known[0, : len(voice.prompt_mel)] = torch.tensor(voice.prompt_mel)
        for tensor in self.base.tensors:
            tensor[index] = 0
        embedding = torch.tensor(voice.speaker_embedding, device=self.device)
        self.base.speaker[index] = self.flow.speaker(embedding)
        chunk = FlowChunk(index, TurnFrames(0, []), spoken, is_last, is_prompt=True)
        form = FlowForm(1, padded, 0, first_slot=index) if padded else None
        plan = self.flow.plan([chunk], self.base, form)
        numbers = upload(plan.numbers, self.device)
        mel = self.flow(plan.form, numbers, self.base, self._noise, known)[0]
        return mel[: count * self.flow.stride]

    def _voice(self, slot: int) -> _SlotVoice:
        voice = self._voices[slot]
        if voice is None:
            raise VocoderError(f"slot {slot} has no voice")
        return voice

    def _turn(self, slot: int) -> _Turn:
        turn = self._turns[slot]
        if turn is None:
            raise VocoderError(f"slot {slot} has no turn; start one")
        return turn

    def _check(self, chunks: Sequence[VocoderChunk]) -> None:
        """Raise `VocoderError` if one of the chunks cannot be decoded."""
        follows: dict[int, bool] = {}
        for chunk in chunks:
            if follows.get(chunk.slot) is False:
                raise VocoderError(f"slot {chunk.slot}: a chunk follows the last of its turn")
            is_first = chunk.slot not in follows and self._turn(chunk.slot).is_first
            self.limits.check_chunk(chunk, is_first=is_first)
            follows[chunk.slot] = not chunk.is_last


def _noise_table(noise: Tensor | None, columns: int, width: int) -> Tensor:
    if noise is None:
        generator = torch.Generator().manual_seed(NOISE_SEED)
        return torch.randn((columns, width), generator=generator)
    if noise.shape[0] < columns or noise.shape[1] != width:
        raise VocoderError(f"noise has shape {list(noise.shape)}, not [{columns}, {width}]")
    return noise


def _batches(chunks: Sequence[VocoderChunk], most: int) -> list[list[int]]:
    """Group the indices of `chunks`, in order, so that no group has a slot twice.

    A group has at most `most` chunks.
    """
    counts: Counter[int] = Counter()
    batches: list[list[int]] = []
    for index, chunk in enumerate(chunks):
        number = counts[chunk.slot]
        while number < len(batches) and len(batches[number]) == most:
            number += 1
        if number == len(batches):
            batches.append([])
        batches[number].append(index)
        counts[chunk.slot] = number + 1
    return batches
