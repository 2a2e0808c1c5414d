"""Stand-ins that a replayed session runs with, and what it saw: draws, vocoder, probe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplane.worker.model.probe import Probe, SpokenUnit
from duplane.worker.model.types import FloatArray
from duplane.worker.model.vocoder import VocoderChunk, VocoderVoice

TOKEN_SAMPLES = 960
LAG_SAMPLES = 3840
LOOKAHEAD = 3

NO_VOICE = VocoderVoice(
    prompt_tokens=np.zeros(0, np.int64),
    prompt_mel=np.zeros((0, 80), np.float32),
    speaker_embedding=np.zeros(0, np.float32),
)
"""The voice of a vocoder that only counts."""


class RecordedUniforms:
    """The uniform numbers of a recorded session, in order; runs dry visibly."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._numbers = list(numbers)
        self.used = 0

    def peek(self, count: int) -> list[float]:
        """The next numbers; zeros where the record has no more."""
        ahead = self._numbers[self.used : self.used + count]
        return ahead + [0.0] * (count - len(ahead))

    def advance(self, count: int) -> None:
        """Use up `count` numbers."""
        self.used += count


class CountingVocoder:
    """Returns silence of the length that the vocoder's speech would have, as the recorder did."""

    lookahead = LOOKAHEAD
    memory_bytes = 0

    def __init__(self, silence_token_id: int) -> None:
        self.silence_token_id = silence_token_id
        self._primed: dict[int, tuple[VocoderVoice, int | None]] = {}
        self._begun: set[int] = set()

    def prime(self, slot: int, voice: VocoderVoice, *, seed: int | None = None) -> None:
        """Counting needs neither; that there is a voice is remembered."""
        self._primed[slot] = (voice, seed)

    def start_turn(self, slot: int) -> None:
        """Only that a turn has begun is kept from piece to piece."""
        self._begun.discard(slot)

    def decode(self, chunks: Sequence[VocoderChunk]) -> list[FloatArray]:
        """Silence: the lookahead is heard later, and a turn's end brings the lag, if there is."""
        return [np.zeros(self._count(chunk), np.float32) for chunk in chunks]

    def encode(self, chunks: Sequence[VocoderChunk]) -> list[Tensor]:
        """No mel."""
        return [torch.empty(0) for _ in chunks]

    def decode_mel(
        self, chunks: Sequence[VocoderChunk], mels: Sequence[Tensor]
    ) -> list[FloatArray]:
        """What `decode` makes of the chunks; there is no mel to it."""
        assert len(mels) == len(chunks)
        return self.decode(chunks)

    def _count(self, chunk: VocoderChunk) -> int:
        has_lag = chunk.slot in self._begun
        self._begun.add(chunk.slot)
        if not chunk.is_last:
            return (len(chunk.tokens) - self.lookahead) * TOKEN_SAMPLES
        return len(chunk.tokens) * TOKEN_SAMPLES + LAG_SAMPLES * has_lag

    def reset(self, slot: int) -> None:
        """Forget the slot's voice and turn."""
        self._primed.pop(slot, None)
        self._begun.discard(slot)

    def is_clean(self, slot: int) -> bool:
        """Whether the slot has no voice."""
        return slot not in self._primed


@dataclass
class SeenUnit:
    """What the model did in one unit."""

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
    """Keeps copies of everything the model shows, per slot, one unit at a time."""

    def __init__(self) -> None:
        self.voices: dict[int, NDArray[np.float32]] = {}
        self._units: defaultdict[int, SeenUnit] = defaultdict(SeenUnit)

    def begin_unit(self, slot: int) -> SeenUnit:
        """Forget the slot's last unit and watch its next."""
        self._units[slot] = SeenUnit()
        return self._units[slot]

    def prepared(self, slot: int, voice: Tensor | None) -> None:
        if voice is not None:
            self.voices[slot] = _copy(voice)

    def heard(self, slot: int, embeds: Tensor) -> None:
        self._units[slot].embeds = _copy(embeds)

    def saw(self, slot: int, embeds: Tensor) -> None:
        self._units[slot].vision = _copy(embeds)

    def prefilled(self, slot: int, logits: Tensor, length: int) -> None:
        unit = self._units[slot]
        unit.pending, unit.prefilled = _copy(logits), length

    def decided(self, slot: int, logits: Tensor, token: int) -> None:
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
