"""The streaming vocoder: speech tokens to 24 kHz samples, for several slots at once.

Decides what a slot keeps and when a turn begins and ends; the two models decide how it sounds.
Everything is float32. A slot goes from reset to primed (it has a voice) to speaking and back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from duplane.worker.model.flow import Flow, FlowChunk, TurnFrames, prompt_frames
from duplane.worker.model.flow_cache import FlowCaches
from duplane.worker.model.flow_retention import RECENT_FRAMES
from duplane.worker.model.hift import HiFT
from duplane.worker.model.hift_stream import OVERLAP_FRAMES, HiFTStream, MelChunk
from duplane.worker.model.speech_tokens import WINDOW_TOKENS
from duplane.worker.model.types import FloatArray
from duplane.worker.model.vocoder_files import load_flow, load_hift
from duplane.worker.model.vocoder_input import (
    Limits,
    VocoderChunk,
    VocoderError,
    VocoderOptions,
    VocoderVoice,
)
from duplane.worker.model.voice_places import VoicePlaces

NOISE_SEED = 0


@dataclass(frozen=True)
class _Voice:
    key: bytes
    voice: VocoderVoice
    generator: torch.Generator | None


@dataclass
class _Turn:
    """A turn of one slot; `noise` is that of the chunk which is being decoded."""

    frames: TurnFrames
    is_first: bool = True
    noise: Tensor | None = None


class Vocoder:
    """Flow and HiFT with the state of `slot_count` slots, allocated once.

    `live` holds the turns of the slots. `base` holds what the prompts of the last few voices left
    behind, which turns continue from; slots with the same voice share it, and a voice that had
    to give way is computed again.
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
            places = min(slot_count, options.voice_places)
            self.base, self.live = (
                FlowCaches(shape, count, capacity=room, chunk=width, device=self.device)
                for count, room, width in ((places, 0, prompt), (slot_count, kept, chunk))
            )
            self.stream = HiFTStream(hift, slot_count, self.device)
        self._noise = _noise_table(options.noise, kept + chunk, flow.config.output_size)
        self._noise = self._noise.to(self.device)
        self._has_source_noise = options.has_source_noise
        self._places = VoicePlaces(places)
        self._voices: list[_Voice | None] = [None] * slot_count
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
        """Load flow.yaml, flow.pt, hift.pt and, where present, hift_dims.json from `directory`.

        Raises `CheckpointError` for files that cannot be used.
        """
        options = options or VocoderOptions()
        place = torch.device(device)
        return cls(
            load_flow(directory, steps=options.steps, device=place),
            load_hift(directory, device=place),
            slot_count=slot_count,
            options=options,
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of all weights, tables and state."""
        modules = (self.flow, self.stream.hift)
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        state = (*self._state(), *self.base.tensors)
        return sum(t.nbytes for t in (*tensors, *state, self._noise))

    @torch.inference_mode()
    def prime(self, slot: int, voice: VocoderVoice, *, seed: int | None = None) -> None:
        """Give a slot its voice, and start its first turn.

        `seed` makes the slot's samples reproducible. Raises `VocoderError` for a voice whose parts
        do not fit together or that is longer than `max_prompt_frames`.
        """
        self.limits.check_voice(voice)
        generator = None
        if self._has_source_noise:
            generator = torch.Generator(self.device)
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
        self._voices[slot] = _Voice(voice.digest(), voice, generator)
        self.start_turn(slot)

    @torch.inference_mode()
    def start_turn(self, slot: int) -> None:
        """Go back to what the voice's prompt left behind. The slot must have been primed."""
        voice = self._voices[slot]
        if voice is None:
            raise VocoderError(f"slot {slot} has no voice")
        frames = len(voice.voice.prompt_mel)
        self.live.copy_slot(slot, self.base, self._place(voice), frames)
        self._turns[slot] = _Turn(prompt_frames(frames, self.live.capacity))

    def decode(self, chunks: Sequence[VocoderChunk]) -> list[FloatArray]:
        """Turn chunks into float32 samples at 24 kHz, one array per chunk, in the same order.

        A chunk has two mel frames per token that it does not only look at; the last one of a turn
        also has the 160 ms that were held back. Chunks of different slots run together; those of
        one slot run in the order given. After the last chunk of a turn the slot takes no other
        before `start_turn`. Raises `VocoderError` before anything changes.
        """
        self._check(chunks)
        samples: dict[int, FloatArray] = {}
        for places in _rounds(chunks):
            together = [chunks[place] for place in places]
            made = self.decode_mel(together, self.encode(together))
            samples.update(zip(places, made, strict=True))
        return [samples[place] for place in range(len(chunks))]

    @torch.inference_mode()
    def encode(self, chunks: Sequence[VocoderChunk]) -> list[Tensor]:
        """Do the first half of `decode` for one chunk each of several slots: `[frames, mel]`.

        Until it returns it can be called again for the same chunks, and makes the same of them.
        """
        order = sorted(range(len(chunks)), key=lambda place: chunks[place].slot)
        rows = [self._flow_chunk(chunks[place]) for place in order]
        mel = self.flow(rows, self.live, self._noise, None)
        going_on = [row for row in rows if not row.is_last]
        if going_on:
            self.flow.retain(going_on, self.live)
        found: dict[int, Tensor] = {}
        for place, row, made in zip(order, rows, mel, strict=True):
            tokens = self.flow.encoded(len(row.tokens), row.is_last)
            found[place] = made[: tokens * self.flow.stride]
        return [found[place] for place in range(len(chunks))]

    @torch.inference_mode()
    def decode_mel(
        self, chunks: Sequence[VocoderChunk], mels: Sequence[Tensor]
    ) -> list[FloatArray]:
        """Do the second half of `decode`: the mel of `encode` to samples.

        Until it returns it can be called again for the same chunks, and makes the same of them.
        """
        mel_chunks: list[MelChunk] = []
        for chunk, mel in zip(chunks, mels, strict=True):
            turn = self._turn(chunk.slot)
            if turn.noise is None:
                turn.noise = self._source_noise(chunk.slot, len(mel), turn.is_first)
            mel_chunks.append(MelChunk(chunk.slot, mel, turn.is_first, chunk.is_last, turn.noise))
        samples = self.stream.decode(mel_chunks)
        for chunk in chunks:
            turn = self._turn(chunk.slot)
            turn.is_first, turn.noise = False, None
            if chunk.is_last:
                self._turns[chunk.slot] = None
        return samples

    def _source_noise(self, slot: int, frames: int, is_first: bool) -> Tensor | None:
        """Draw normal noise `[samples]` for a chunk, from the slot's own generator."""
        voice = self._voices[slot]
        if voice is None or voice.generator is None:
            return None
        count = self.stream.source_samples(frames, is_first)
        return torch.randn(count, generator=voice.generator, device=self.device)

    @torch.inference_mode()
    def render_mel(self, voice: VocoderVoice, tokens: Sequence[int]) -> Tensor:
        """Make the mel `[frames, mel]` of an utterance in one piece, not as a stream.

        Touches no slot. The prompt and the utterance together must fit into `max_prompt_frames`.
        """
        self.limits.check_voice(voice, tokens)
        place = self._places.take()
        try:
            mel = self._condition(place, voice, tokens, is_last=True)
        finally:
            self._places.leave(place)
        return mel[len(voice.prompt_mel) :]

    def cached_frames(self, slot: int) -> int:
        """Mel frames that the flow's attention caches hold for the slot's turn; 0 without one."""
        turn = self._turns[slot]
        return 0 if turn is None else turn.frames.cached

    @torch.inference_mode()
    def reset(self, slot: int) -> None:
        """Take the voice away and zero all that the slot has used."""
        self._voices[slot] = self._turns[slot] = None
        for tensor in self._state():
            tensor[slot] = 0

    def is_clean(self, slot: int) -> bool:
        """Tell whether the slot has neither voice nor turn, and its state is all zero."""
        if self._voices[slot] is not None or self._turns[slot] is not None:
            return False
        return not any(bool(tensor[slot].any()) for tensor in self._state())

    def _state(self) -> Iterator[Tensor]:
        """The state of the slots."""
        yield from self.live.tensors
        yield from self.stream.tensors

    def _place(self, voice: _Voice) -> int:
        """Where in `base` the voice's prompt lies; it is computed if it does not."""
        place = self._places.find(voice.key)
        if place is None:
            place = self._places.take()
            try:
                ahead = [self.silence_token_id] * self.lookahead
                self._condition(place, voice.voice, ahead, is_last=False)
            except BaseException:
                self._places.leave(place)
                raise
            self._places.hold(voice.key, place)
        return place

    def _condition(
        self, place: int, voice: VocoderVoice, tokens: Sequence[int], *, is_last: bool
    ) -> Tensor:
        """Run the voice's prompt and `tokens` through one place of `base`, as one chunk."""
        spoken = [*voice.prompt_tokens.tolist(), *tokens]
        frames = self.flow.encoded(len(spoken), is_last) * self.flow.stride
        known = torch.zeros(1, frames, self.limits.mel_width, device=self.device)
        known[0, : len(voice.prompt_mel)] = torch.tensor(voice.prompt_mel)
        for tensor in self.base.tensors:
            tensor[place] = 0
        embedding = torch.tensor(voice.speaker_embedding, device=self.device)
        self.base.speaker[place] = self.flow.speaker(embedding)
        chunk = FlowChunk(place, TurnFrames(0, []), spoken, is_last)
        mel = self.flow([chunk], self.base, self._noise, known)[0]
        self.base.keep_tails(slice(place, place + 1))
        return mel

    def _flow_chunk(self, chunk: VocoderChunk) -> FlowChunk:
        return FlowChunk(chunk.slot, self._turn(chunk.slot).frames, chunk.tokens, chunk.is_last)

    def _turn(self, slot: int) -> _Turn:
        turn = self._turns[slot]
        if turn is None:
            raise VocoderError(f"slot {slot} has no turn; start one")
        return turn

    def _check(self, chunks: Sequence[VocoderChunk]) -> None:
        """Refuse what no turn could take, before anything has changed."""
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


def _rounds(chunks: Sequence[VocoderChunk]) -> list[list[int]]:
    """Group the places of `chunks` so that each group has a slot at most once, in order."""
    counts: Counter[int] = Counter()
    rounds: list[list[int]] = []
    for place, chunk in enumerate(chunks):
        if counts[chunk.slot] == len(rounds):
            rounds.append([])
        rounds[counts[chunk.slot]].append(place)
        counts[chunk.slot] += 1
    return rounds
