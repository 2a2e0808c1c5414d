"""The streaming vocoder: speech tokens to 24 kHz samples, for several slots at once.

Decides what a slot keeps and when a turn begins and ends; the two models decide how it sounds.
Everything is float32. A slot goes from reset to primed (it has a voice) to speaking and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplane.worker.model.flow import Flow, FlowChunk, TurnFrames, prompt_frames
from duplane.worker.model.flow_cache import FlowCaches
from duplane.worker.model.flow_retention import RECENT_FRAMES
from duplane.worker.model.hift import HiFT
from duplane.worker.model.hift_stream import OVERLAP_FRAMES, HiFTStream, MelChunk
from duplane.worker.model.speech_tokens import WINDOW_TOKENS
from duplane.worker.model.types import FloatArray
from duplane.worker.model.vocoder_files import load_flow, load_hift

NOISE_SEED = 0


class VocoderError(ValueError):
    """A voice or a chunk that the vocoder cannot take; nothing has changed."""


@dataclass(frozen=True)
class VocoderOptions:
    """What the vocoder's files do not say.

    `steps`: solver steps; the reference's duplex path asks for 5. `max_prompt_frames`: the longest
    voice there is room for, in mel frames, 50 per second. `silence_token_id`: the token that the
    released model's codebook has for silence. `noise` `[columns, mel]`: the solver's noise table,
    else drawn from a fixed seed. `has_source_noise` False: no noise in the source of HiFT.
    """

    steps: int = 5
    max_prompt_frames: int = 500
    silence_token_id: int = 4218
    noise: Tensor | None = None
    has_source_noise: bool = True


@dataclass(frozen=True)
class VocoderVoice:
    """A voice to speak with, all three of one clip.

    `prompt_tokens` `[P]` int, `prompt_mel` `[P * 2, mel]`, `speaker_embedding` `[width]`.
    """

    prompt_tokens: NDArray[np.integer]
    prompt_mel: FloatArray
    speaker_embedding: FloatArray


@dataclass(frozen=True)
class VocoderChunk:
    """Tokens of one slot; `lookahead` of them are only looked at, unless it ends the turn."""

    slot: int
    tokens: Sequence[int]
    is_last: bool


@dataclass(frozen=True)
class Rendering:
    """An utterance made in one piece: `mel` `[frames, mel]`, `f0` `[frames]`, `samples`."""

    mel: FloatArray
    f0: FloatArray
    samples: FloatArray


@dataclass(frozen=True)
class _Voice:
    frames: int
    generator: torch.Generator | None


@dataclass
class _Turn:
    frames: TurnFrames
    is_first: bool = True


class Vocoder:
    """Flow and HiFT with the state of `slot_count` slots, allocated once.

    `base` holds what a voice's prompt left behind, `live` the turn that continues from it.
    """

    def __init__(
        self, flow: Flow, hift: HiFT, *, slot_count: int, options: VocoderOptions | None = None
    ) -> None:
        options = options or VocoderOptions()
        self.options, self.slot_count = options, slot_count
        self.lookahead, self.window = flow.lookahead, WINDOW_TOKENS
        self.silence_token_id = options.silence_token_id
        self.device = flow.encoder_proj.weight.device
        chunk = (self.window + self.lookahead) * flow.stride
        kept = options.max_prompt_frames + RECENT_FRAMES
        self._flow = flow
        with torch.inference_mode():
            flow.prepare(kept + chunk, max(chunk, options.max_prompt_frames))
            self.base, self.live = (
                FlowCaches(
                    flow.config.cache_shape(options.steps),
                    slot_count,
                    capacity=capacity,
                    chunk=width,
                    device=self.device,
                )
                for capacity, width in ((0, options.max_prompt_frames), (kept, chunk))
            )
            self._stream = HiFTStream(hift, slot_count, self.device)
        self._noise = self._noise_table(kept + chunk)
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
        modules = (self._flow, self._stream.hift)
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        return sum(t.nbytes for t in (*tensors, *self._state(), self._noise))

    @torch.inference_mode()
    def prime(self, slot: int, voice: VocoderVoice, *, seed: int | None = None) -> None:
        """Give a slot its voice, and start its first turn.

        `seed` makes the slot's samples reproducible. Raises `VocoderError` for a voice whose parts
        do not fit together or that is longer than `max_prompt_frames`.
        """
        frames = self._checked_frames(voice)
        tokens = [int(token) for token in voice.prompt_tokens]
        ahead = [self.silence_token_id] * self.lookahead
        self._condition(slot, voice, FlowChunk(slot, TurnFrames(0, []), tokens + ahead, False))
        generator = None
        if self.options.has_source_noise:
            generator = torch.Generator(self.device)
            generator.seed() if seed is None else generator.manual_seed(seed)
        self._voices[slot] = _Voice(frames, generator)
        self.start_turn(slot)

    @torch.inference_mode()
    def start_turn(self, slot: int) -> None:
        """Go back to what the voice's prompt left behind. The slot must have been primed."""
        voice = self._voices[slot]
        if voice is None:
            raise VocoderError(f"slot {slot} has no voice")
        self.live.copy_slot(slot, self.base, voice.frames)
        self._turns[slot] = _Turn(prompt_frames(voice.frames, self.live.capacity))

    def decode(self, chunks: Sequence[VocoderChunk]) -> list[FloatArray]:
        """Turn chunks into float32 samples at 24 kHz, one array per chunk, in the same order.

        A chunk has 2 * 480 samples per token that it does not only look at; the last one of a turn
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
        """Do the first half of `decode` for one chunk each of several slots: `[frames, mel]`."""
        turns = [self._turn(chunk.slot) for chunk in chunks]
        order = sorted(range(len(chunks)), key=lambda place: chunks[place].slot)
        rows = [
            FlowChunk(
                chunks[place].slot, turns[place].frames, chunks[place].tokens, chunks[place].is_last
            )
            for place in order
        ]
        mel = self._flow(rows, self.live, self._noise, None)
        going_on = [row for row in rows if not row.is_last]
        if going_on:
            self._flow.retain(going_on, self.live)
        found = {
            place: mel[row, : self._encoded(chunks[place]) * self._flow.stride]
            for row, place in enumerate(order)
        }
        return [found[place] for place in range(len(chunks))]

    @torch.inference_mode()
    def decode_mel(
        self, chunks: Sequence[VocoderChunk], mels: Sequence[Tensor]
    ) -> list[FloatArray]:
        """Do the second half of `decode`: the mel of `encode` to samples."""
        mel_chunks: list[MelChunk] = []
        for chunk, mel in zip(chunks, mels, strict=True):
            turn, voice = self._turn(chunk.slot), self._voices[chunk.slot]
            generator = voice.generator if voice else None
            mel_chunks.append(MelChunk(chunk.slot, mel, turn.is_first, chunk.is_last, generator))
            turn.is_first = False
            if chunk.is_last:
                self._turns[chunk.slot] = None
        return self._stream.decode(mel_chunks)

    @torch.inference_mode()
    def render(self, slot: int, voice: VocoderVoice, tokens: Sequence[int]) -> Rendering:
        """Speak `tokens` in one piece rather than as a stream, in a slot that is clean after it.

        The prompt and the utterance together must fit into `max_prompt_frames`.
        """
        frames = self._checked_frames(voice, len(tokens))
        spoken = [int(token) for token in voice.prompt_tokens] + list(tokens)
        mel = self._condition(slot, voice, FlowChunk(slot, TurnFrames(0, []), spoken, True))
        mel = mel[:, frames - len(tokens) * self._flow.stride :].transpose(1, 2)
        hift = self._stream.hift
        f0, samples = hift.f0_predictor(mel), hift(mel, hift.source(mel, None))
        self.reset(slot)
        return Rendering(*(found[0].cpu().numpy() for found in (mel.transpose(1, 2), f0, samples)))

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
        yield from self.base.tensors
        yield from self.live.tensors
        yield from self._stream.tensors

    def _condition(self, slot: int, voice: VocoderVoice, chunk: FlowChunk) -> Tensor:
        """Run a chunk that starts with the voice's prompt through the slot's `base` caches."""
        frames = self._flow.encoded(len(chunk.tokens), chunk.is_last) * self._flow.stride
        known = torch.zeros(1, frames, self._flow.config.output_size, device=self.device)
        known[0, : len(voice.prompt_mel)] = torch.as_tensor(voice.prompt_mel)
        for tensor in self.base.tensors:
            tensor[slot] = 0
        embedding = torch.as_tensor(voice.speaker_embedding).to(self.device)
        self.base.speaker[slot] = self._flow.speaker(embedding)
        return self._flow([chunk], self.base, self._noise, known)

    def _noise_table(self, columns: int) -> Tensor:
        width = self._flow.config.output_size
        noise = self.options.noise
        if noise is None:
            generator = torch.Generator().manual_seed(NOISE_SEED)
            noise = torch.randn((columns, width), generator=generator)
        if noise.shape[0] < columns or noise.shape[1] != width:
            raise VocoderError(f"noise is {list(noise.shape)}, not at least [{columns}, {width}]")
        return noise.to(self.device)

    def _turn(self, slot: int) -> _Turn:
        turn = self._turns[slot]
        if turn is None:
            raise VocoderError(f"slot {slot} has no turn; start one")
        return turn

    def _encoded(self, chunk: VocoderChunk) -> int:
        return self._flow.encoded(len(chunk.tokens), chunk.is_last)

    def _checked_frames(self, voice: VocoderVoice, more_tokens: int = 0) -> int:
        config, count = self._flow.config, len(voice.prompt_tokens)
        frames = count * self._flow.stride
        if count == 0:
            raise VocoderError("a voice needs at least one prompt token")
        if voice.prompt_mel.shape != (frames, config.output_size):
            raise VocoderError(
                f"prompt_mel has shape {list(voice.prompt_mel.shape)}, but {count} prompt tokens "
                f"need [{frames}, {config.output_size}]"
            )
        if voice.speaker_embedding.shape != (config.spk_embed_dim,):
            raise VocoderError(
                f"speaker_embedding has shape {list(voice.speaker_embedding.shape)}, "
                f"not [{config.spk_embed_dim}]"
            )
        self._check_tokens(voice.prompt_tokens.tolist(), "prompt_tokens")
        frames += more_tokens * self._flow.stride
        if frames > self.options.max_prompt_frames:
            raise VocoderError(
                f"the voice's prompt has {frames} mel frames, "
                f"more than max_prompt_frames {self.options.max_prompt_frames}"
            )
        return frames

    def _check_tokens(self, tokens: Sequence[int], name: str) -> None:
        outside = [token for token in tokens if not 0 <= token < self._flow.config.vocab_size]
        if outside:
            raise VocoderError(f"{name}: no such speech tokens: {outside[:10]}")

    def _check(self, chunks: Sequence[VocoderChunk]) -> None:
        """Refuse, before anything has changed, what no turn could continue from."""
        is_first: dict[int, bool | None] = {}
        for chunk in chunks:
            first = is_first.get(chunk.slot, self._turn(chunk.slot).is_first)
            if first is None:
                raise VocoderError(f"slot {chunk.slot}: a chunk follows the last of its turn")
            self._check_tokens(chunk.tokens, f"slot {chunk.slot}")
            fewest = 1
            if first and not chunk.is_last:
                fewest = -(-OVERLAP_FRAMES // self._flow.stride)
            most = self.window + self.lookahead
            if self._encoded(chunk) < fewest or len(chunk.tokens) > most:
                raise VocoderError(f"slot {chunk.slot}: a chunk of {len(chunk.tokens)} tokens")
            is_first[chunk.slot] = None if chunk.is_last else False


def _rounds(chunks: Sequence[VocoderChunk]) -> list[list[int]]:
    """Group the places of `chunks` so that each group has a slot at most once, in order."""
    seen: dict[int, int] = {}
    rounds: list[list[int]] = []
    for place, chunk in enumerate(chunks):
        number = seen.get(chunk.slot, 0)
        seen[chunk.slot] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(place)
    return rounds
