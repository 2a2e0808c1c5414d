"""Cuts the pieces of speech out of a stream of sound. Pure."""

from __future__ import annotations

from typing import NamedTuple

from duplane.edge.speech.speech_detector import (
    DetectorSettings,
    Scorer,
    SpeechDetector,
    SpeechStarted,
    SpeechStopped,
)
from duplane.fabric.audio import SAMPLE_BYTES


class Segment(NamedTuple):
    """A piece of speech; its sound is empty if it is too short.

    `silent_samples` is how long the client had been silent when the end was recognised.
    """

    audio: bytes
    silent_samples: int

    @property
    def is_too_short(self) -> bool:
        """Whether the piece is too short to be speech."""
        return not self.audio


class Segments:
    """The pieces of speech of one stream of float32 PCM at 16 kHz.

    Kept are the sound of the piece that has begun, and before a piece the sound in which it may
    have begun. A piece as long as `max_samples` ends without silence.
    """

    def __init__(self, scorer: Scorer, settings: DetectorSettings, max_samples: int) -> None:
        self._detector = SpeechDetector(scorer, settings)
        self._early_samples = self._detector.lookback_samples + scorer.window_samples
        self._max_samples = max_samples
        self._kept = bytearray()
        self._begin = 0  # of the piece that has begun

    @property
    def is_speaking(self) -> bool:
        """Whether a piece of speech has begun and not ended."""
        return self._detector.is_speaking

    @property
    def held_bytes(self) -> int:
        """The bytes of the sound that is kept."""
        return len(self._kept)

    def feed(self, pcm: bytes) -> list[SpeechStarted | Segment]:
        """Return what begins and ends in the next sound.

        The sound after the end of a whole piece is not heard: the client waits for an answer.
        """
        self._kept += pcm
        found: list[SpeechStarted | Segment] = []
        events = self._detector.feed(pcm)
        is_speaking = self._detector.is_speaking
        for number, event in enumerate(events):
            if isinstance(event, SpeechStarted):
                self._begin = event.begin
                found.append(event)
                continue
            segment = self._segment(event)
            found.append(segment)
            if not segment.is_too_short:
                if is_speaking or number + 1 < len(events):
                    self._detector.skip(0)
                self._kept.clear()
                return found
        begin = self._begin if is_speaking else self._detector.position - self._early_samples
        if is_speaking and self._detector.position - begin >= self._max_samples:
            (stopped,) = self._detector.cut()
            found.append(self._segment(stopped))
            self._kept.clear()
            return found
        del self._kept[: max(0, begin - self._first) * SAMPLE_BYTES]
        return found

    def skip(self, pcm: bytes) -> None:
        """Pass over sound that is not heard. Speech that has begun is forgotten."""
        self._kept.clear()
        self._detector.skip(len(pcm) // SAMPLE_BYTES)

    @property
    def _first(self) -> int:
        """The position of the first sample that is kept."""
        return self._detector.position - len(self._kept) // SAMPLE_BYTES

    def _segment(self, stopped: SpeechStopped) -> Segment:
        silent = stopped.at - stopped.end
        if stopped.is_too_short:
            return Segment(b"", silent)
        first = self._first
        end = min(stopped.end, stopped.begin + self._max_samples)
        audio = self._kept[(stopped.begin - first) * SAMPLE_BYTES : (end - first) * SAMPLE_BYTES]
        return Segment(bytes(audio), silent)
