"""Finds the turns of the user in the sound of a client of dialect E. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import soxr  # pyright: ignore[reportMissingTypeStubs]  it ships none

from duplane.edge.dialects.e_settings import TurnDetection
from duplane.edge.speech.scorers import ScorerFactory
from duplane.edge.speech.speech_detector import (
    RATE_HERTZ,
    DetectorSettings,
    SpeechDetector,
    SpeechEvent,
    SpeechStarted,
)

# Each call of the detector takes as much time as some windows do, so short pieces of sound wait
# until they last so long together.
_MIN_FED_S = 0.15


class TurnEdge(NamedTuple):
    """The begin or the end of a turn of the user, in milliseconds of the client's sound."""

    is_begin: bool
    at_ms: int


class TurnDetector:
    """Finds the turns in one stream of mono float32 PCM at any rate.

    The stream begins `begin_ms` after the client's first sound.
    """

    def __init__(
        self, detection: TurnDetection, rate_hertz: int, begin_ms: int, new_scorer: ScorerFactory
    ) -> None:
        settings = DetectorSettings(
            threshold=detection.threshold,
            min_silence_ms=detection.silence_duration_ms,
            prefix_ms=detection.prefix_padding_ms,
        )
        self._detector = SpeechDetector(new_scorer(), settings)
        # The detector needs no exact sound, so the sound is resampled apart, and fast.
        self._resampler = soxr.ResampleStream(rate_hertz, RATE_HERTZ, 1, "float32", "MQ")
        self._begin_ms = begin_ms
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._fed_bytes = int(_MIN_FED_S * rate_hertz) * 4

    @property
    def is_in_turn(self) -> bool:
        """Whether a turn of the user has begun and not ended."""
        return self._detector.is_speaking

    def hear(self, pcm: bytes) -> list[TurnEdge]:
        """Return where turns begin and end in the next samples of the stream."""
        self._waiting.append(pcm)
        self._waiting_bytes += len(pcm)
        if self._waiting_bytes < self._fed_bytes:
            return []
        samples = np.frombuffer(b"".join(self._waiting), "<f4")
        self._waiting.clear()
        self._waiting_bytes = 0
        return self._edges(self._detector.feed(self._resampler.resample_chunk(samples).tobytes()))

    def cut(self) -> list[TurnEdge]:
        """End the turn that has begun, if any, without waiting for silence."""
        return self._edges(self._detector.cut())

    def _edges(self, events: Sequence[SpeechEvent]) -> list[TurnEdge]:
        return [
            TurnEdge(is_begin=True, at_ms=self._ms(event.begin))
            if isinstance(event, SpeechStarted)
            else TurnEdge(is_begin=False, at_ms=self._ms(event.at))
            for event in events
        ]

    def _ms(self, position: int) -> int:
        return self._begin_ms + position * 1000 // RATE_HERTZ
