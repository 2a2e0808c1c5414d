"""Replacements for parts of a replayed session: its random numbers, vocoder and probe."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplane.worker.models.minicpm_o.probe import Probe, SpokenUnit
from duplane.worker.models.minicpm_o.vocoder.vocoder import VocoderChunk, VocoderVoice
from duplane.worker.models.types import FloatArray

TOKEN_SAMPLES = 960
LAG_SAMPLES = 3840
LOOKAHEAD = 3

NO_VOICE = VocoderVoice(
    prompt_tokens=np.zeros(0, np.int64),
    prompt_mel=np.zeros((0, 80), np.float32),
    speaker_embedding=np.zeros(0, np.float32),
)
"""A placeholder for the voice of `CountingVocoder`."""


class RecordedUniforms:
    """The uniform random numbers of a recorded session, in order, followed by zeros."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._numbers = list(numbers)
        self.used_count = 0

    def peek(self, count: int) -> list[float]:
        """Return the next numbers without using them up."""
        ahead = self._numbers[self.used_count : self.used_count + count]
        return ahead + [0.0] * (count - len(ahead))

    def advance(self, count: int) -> None:
        """Move on by `count` numbers."""
        self.used_count += count


class CountingVocoder:
    """A vocoder that returns silence as long as the speech would be.

    The traces were recorded with such a vocoder.
    """

    lookahead = LOOKAHEAD
    memory_bytes = 0
    most_rows = sys.maxsize

    def __init__(self, silence_token_id: int) -> None:
        self.silence_token_id = silence_token_id
        self._primed: dict[int, tuple[VocoderVoice, int | None]] = {}
        self._begun: set[int] = set()

    def prime(
        self, slot: int, voice: VocoderVoice, *, seed: int | None = None, is_quick: bool = False
    ) -> None:
        """Record that the slot has a voice."""
        del is_quick
        self._primed[slot] = (voice, seed)

    def has_prompt(self, slot: int) -> bool:
        """Return True: no prompt is computed."""
        del slot
        return True

    def start_turn(self, slot: int) -> None:
        """Record that no chunk of the turn has been decoded."""
        self._begun.discard(slot)

    def decode(self, chunks: Sequence[VocoderChunk]) -> list[FloatArray]:
        """Return as many samples of silence as the vocoder would return of speech.

        A chunk gives samples for its tokens without the lookahead; the last chunk has none.
        """
        return [np.zeros(self._count(chunk), np.float32) for chunk in chunks]

    def encode(self, chunks: Sequence[VocoderChunk]) -> list[Tensor]:
        """Return empty tensors, because there is no mel."""
        return [torch.empty(0) for _ in chunks]

    def decode_mel(
        self, chunks: Sequence[VocoderChunk], mels: Sequence[Tensor]
    ) -> list[FloatArray]:
        """Return the result of `decode`; the empty mels are ignored."""
        del mels
        return self.decode(chunks)

    def _count(self, chunk: VocoderChunk) -> int:
        has_lag = chunk.slot in self._begun
        self._begun.add(chunk.slot)
        if not chunk.is_last:
            return (len(chunk.tokens) - self.lookahead) * TOKEN_SAMPLES
        return len(chunk.tokens) * TOKEN_SAMPLES + LAG_SAMPLES * has_lag

    def reset(self, slot: int) -> None:
        """Delete the slot's voice and turn."""
        self._primed.pop(slot, None)
        self._begun.discard(slot)

    def is_clean(self, slot: int) -> bool:
        """Whether the slot has no voice."""
        return slot not in self._primed


@dataclass
class SeenUnit:
    """The inputs, decisions and outputs of the model in one unit."""

    embeds: NDArray[np.float32] | None = None
    vision: NDArray[np.float32] | None = None
    pending: NDArray[np.float32] | None = None
    prefilled: int = 0
    settled: int = 0
    logits: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    decided: list[int] = field(default_factory=list[int])
    fed: list[int] = field(default_factory=list[int])
    hidden: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    speech: SpokenUnit | None = None
    pieces: list[tuple[list[int], bool, int]] = field(
        default_factory=list[tuple[list[int], bool, int]]
    )


class Recorder(Probe):
    """A probe that keeps copies of what it receives about the latest unit of each slot."""

    def __init__(self) -> None:
        self.voices: dict[int, NDArray[np.float32]] = {}
        self._units: defaultdict[int, SeenUnit] = defaultdict(SeenUnit)

    def begin_unit(self, slot: int) -> SeenUnit:
        """Replace the record of the slot's last unit with an empty one for its next unit."""
        self._units[slot] = SeenUnit()
        return self._units[slot]

    def prepared(self, slot: int, voice: Tensor | None) -> None:
        if voice is not None:
            self.voices[slot] = _copy(voice)

    def audio_encoded(self, slot: int, embeds: Tensor) -> None:
        self._units[slot].embeds = _copy(embeds)

    def frames_encoded(self, slot: int, embeds: Tensor) -> None:
        self._units[slot].vision = _copy(embeds)

    def prefilled(self, slot: int, logits: Tensor, length: int) -> None:
        unit = self._units[slot]
        unit.pending, unit.prefilled = _copy(logits), length

    def chosen(self, slot: int, logits: Tensor, token: int) -> None:
        self._units[slot].logits.append(_copy(logits))
        self._units[slot].decided.append(token)

    def fed(self, slot: int, token: int, hidden: Tensor) -> None:
        self._units[slot].fed.append(token)
        self._units[slot].hidden.append(_copy(hidden))

    def spoke(self, slot: int, speech: SpokenUnit) -> None:
        self._units[slot].speech = speech

    def vocoded(self, slot: int, tokens: list[int], is_last: bool, sample_count: int) -> None:
        self._units[slot].pieces.append((tokens, is_last, sample_count))

    def settled(self, slot: int, length: int) -> None:
        self._units[slot].settled = length


def _copy(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.float().cpu().numpy().copy()
