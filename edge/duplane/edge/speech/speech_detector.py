"""Finds speech in a stream of sound, and says where each piece of speech begins and ends. Pure.

A scorer says how probable speech is in each window of the sound. The detector joins the windows to
pieces of speech. Positions count samples since the detector was made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from duplane.edge.payload.rates import INPUT_RATE_HERTZ

Windows = NDArray[np.float32]

RATE_HERTZ = INPUT_RATE_HERTZ
# Speech that has begun ends below a lower probability than the one at which it begins.
_HYSTERESIS = 0.15
# Windows that are scored at once, at most: this bounds the memory of the scorer.
_BLOCK_WINDOWS = 64


class Score(NamedTuple):
    """How probable speech is in a window, and where the sound that the score is about lies.

    A scorer may need several windows to recognise speech, and then knows that it began earlier. The
    positions are relative to the begin of the window. While `is_open`, the next windows decide
    whether speech has begun, so a piece of speech does not end.
    """

    probability: float
    begin: int
    end: int
    is_open: bool = False


class Scorer(Protocol):
    """Scores the windows of one stream, in their order."""

    @property
    def window_samples(self) -> int:
        """The number of samples of a window."""
        ...

    @property
    def lookback_samples(self) -> int:
        """How far before its window the sound of a score begins, at most."""
        ...

    def score(self, windows: Windows) -> list[Score]:
        """Return the score of each row of `windows`."""
        ...

    def reset(self) -> None:
        """Forget the last windows: those that follow do not continue them."""
        ...


@dataclass(frozen=True, slots=True)
class DetectorSettings:
    """What counts as a piece of speech.

    A piece ends when `min_silence_ms` passed without speech. It is too short to be speech if it
    lasts less than `min_speech_ms`. `prefix_ms` and `suffix_ms` are added before and after it.
    """

    threshold: float = 0.5
    min_speech_ms: float = 128.0
    min_silence_ms: float = 500.0
    prefix_ms: float = 30.0
    suffix_ms: float = 30.0


class SpeechStarted(NamedTuple):
    """Speech was recognised. The piece begins at `begin`, including what is added before it."""

    begin: int


class SpeechStopped(NamedTuple):
    """A piece of speech has ended, and lies between `begin` and `end`, with what is added to it.

    `at` is the position at which the end was recognised, after the silence. If the piece is too
    short to be speech, `is_too_short` is true.
    """

    begin: int
    end: int
    at: int
    is_too_short: bool


SpeechEvent = SpeechStarted | SpeechStopped


def samples_of(milliseconds: float) -> int:
    """Return the number of samples of a duration at the rate of the detector."""
    return int(milliseconds * RATE_HERTZ / 1000)


class SpeechDetector:
    """Finds the speech of one stream of mono float32 PCM at 16 kHz.

    The lengths of the pieces in which the stream arrives have no influence. The memory is bounded:
    it holds one incomplete window and the state of the scorer.
    """

    def __init__(self, scorer: Scorer, settings: DetectorSettings) -> None:
        self._scorer = scorer
        self._rest = b""  # an incomplete window
        self._position = 0  # of the next window
        self._earliest = 0  # no piece begins before this position
        self._begin: int | None = None  # of the piece of speech that has begun
        self._spoken = 0, 0  # begin and end of the speech in this piece
        self._set(settings)

    def _set(self, settings: DetectorSettings) -> None:
        self._threshold = settings.threshold
        self._low_threshold = max(settings.threshold - _HYSTERESIS, 0.01)
        self._min_speech = samples_of(settings.min_speech_ms)
        self._min_silence = samples_of(settings.min_silence_ms)
        self._prefix = samples_of(settings.prefix_ms)
        self._suffix = samples_of(settings.suffix_ms)

    @property
    def position(self) -> int:
        """The number of samples that were fed or skipped."""
        return self._position + len(self._rest) // 4

    @property
    def lookback_samples(self) -> int:
        """How far before the next window a piece of speech may begin, if none has begun."""
        return self._scorer.lookback_samples + self._prefix

    @property
    def is_speaking(self) -> bool:
        """Whether a piece of speech has begun and not ended."""
        return self._begin is not None

    def feed(self, pcm: bytes) -> list[SpeechEvent]:
        """Return what begins and ends in the next samples of the stream."""
        size = self._scorer.window_samples
        data = self._rest + pcm
        whole = len(data) // (4 * size) * (4 * size)
        self._rest = data[whole:]
        windows = np.frombuffer(data, "<f4", whole // 4).reshape(-1, size)
        events: list[SpeechEvent] = []
        for start in range(0, len(windows), _BLOCK_WINDOWS):
            for score in self._scorer.score(windows[start : start + _BLOCK_WINDOWS]):
                events += self._next(score, self._position, size)
                self._position += size
        return events

    def skip(self, count: int) -> None:
        """Pass over `count` samples that are not heard. Speech that has begun is forgotten."""
        self._position = self._earliest = self.position + count
        self._rest = b""
        self._begin = None
        self._scorer.reset()

    def cut(self) -> list[SpeechStopped]:
        """End the piece of speech that has begun, if any, without waiting for silence."""
        if self._begin is None:
            return []
        return [self._stop(self._position)]

    def _next(self, score: Score, position: int, size: int) -> list[SpeechEvent]:
        begin, end = position + score.begin, position + score.end
        if self._begin is None:
            return self._start(score, begin, end)
        spoken_end = self._spoken[1]
        if score.probability >= self._low_threshold:
            if begin - spoken_end < self._min_silence:
                self._spoken = self._spoken[0], max(end, spoken_end)
                return []
            return [self._stop(position + size), *self._start(score, begin, end)]
        if score.is_open or position + size - spoken_end < self._min_silence:
            return []
        return [self._stop(position + size)]

    def _start(self, score: Score, begin: int, end: int) -> list[SpeechEvent]:
        if score.probability < self._threshold:
            return []
        self._spoken = max(begin, self._earliest), end
        self._begin = max(begin - self._prefix, self._earliest)
        return [SpeechStarted(self._begin)]

    def _stop(self, at: int) -> SpeechStopped:
        begin, self._begin = self._begin or 0, None
        first, last = self._spoken
        end = min(last + self._suffix, at)
        self._earliest = end
        return SpeechStopped(begin, end, at, last - first < self._min_speech)
