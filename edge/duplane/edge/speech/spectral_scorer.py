"""The detector's own scorer: voices are louder than the noise, have harmonics and change. Pure.

Three measures decide, because each alone is deceived:

- the level above a noise floor, which follows the windows without a voice: a level alone counts
  each noise as speech;
- the peaks of the spectrum, within bands, so that the tilt of the spectrum is of no importance.
  Noise and clicks have no peaks;
- the changes of the spectrum: tones and hum have peaks, but stay the same. A sound whose power is
  all in one peak is a tone, too, even if it is short.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from duplane.edge.speech.speech_detector import Score, Windows

_SIZE = 512  # samples of a window: 32 ms
_WEIGHTS = np.hanning(_SIZE + 1)[:_SIZE]
_SCALE = 2 / (np.sum(_WEIGHTS**2) * _SIZE)  # so that the sum of all bins is the mean square

# Bins are 31.25 Hz apart. The bins from 94 to 4000 Hz are measured.
_FIRST_BIN, _END_BIN = 3, 128
_BANDS = np.array([3, 5, 7, 10, 13, 17, 22, 28, 36, 46, 58, 74, 96]) - _FIRST_BIN
_PEAK_BANDS = np.array([3, 13, 23, 36, 54]) - _FIRST_BIN  # the last one is not measured
_PEAK_SIZES = np.diff(_PEAK_BANDS)
_AROUND = np.arange(-2, 3)  # bins of one peak
_TINY = 1e-13
_DECIBEL = 10 / np.log(10)
_PEAK_SCALE = _DECIBEL / (len(_PEAK_BANDS) - 1)

_MIN_LEVEL_DB = -55.0  # full scale is 0 dB; nothing below this is speech
_MAX_FIRST_FLOOR_DB = -50.0  # before the noise is known
_MIN_FLOOR_DB = -70.0
_SILENT_DB = -200.0
# Windows so much below the voice are breath, or not a part of it at all; breath loses probability.
_WEAK_DB, _RANGE_DB = 22.0, 30.0
_WEAK_LOSS = 0.3
_FLOOR_FALL = 0.3  # share of the way down to a quieter window
_FLOOR_RISE_DB = 0.3  # per window without a voice: 9 dB per second
_VOICE_RISE_DB = 0.03  # per window with a voice
_LOUD_DB = 6.0  # above the floor
_TONE_SHARE = 0.9  # of the power in one peak
_CHANGE_DB = 5.0  # how much the bands of a voice change, at least
_COMPARED_DB = 20.0  # bands so much below the loudest are not compared

# The peaks and the level above the floor at probability 0.5, and what changes it by 1 (dB).
_PEAKS_DB, _PEAKS_RANGE_DB = 3.6, 1.6
_ABOVE_DB, _ABOVE_RANGE_DB = 7.0, 10.0
_VOICED = 0.3  # probability of one window from which on it belongs to a voice

_RECENT_COUNT, _VOICED_COUNT = 5, 3  # so many of the recent windows must be probable
_COMPARED_COUNT, _MIN_COMPARED = 6, 3  # windows whose bands are compared
_CHANGED_COUNT = 16  # windows after which a voice that has not changed is a tone
_MAX_QUIET = 3  # quiet windows in a row, within a voice that has not shown yet that it is one
_MAX_GAP = 8  # windows without a voice, within one voice
_MAX_LOOKBACK = 24  # windows between the begin of a voice and the one that shows it
_EDGE_COUNT = 6  # loud windows before and after a voice that belong to it: consonants


class _Measures(NamedTuple):
    """Measures of several windows, one value or row for each."""

    level_db: list[float]
    peaks_db: list[float]
    share: list[float]  # of the highest peak in the power
    bands_db: NDArray[np.float64]


class SpectralScorer:
    """Scores one stream.

    The probabilities 0.2, 0.5 and 0.8 stand for a voice of 4, 7 and 10 dB above the noise.
    """

    window_samples = _SIZE
    lookback_samples = _MAX_LOOKBACK * _SIZE

    def __init__(self) -> None:
        self._floor_db = _MAX_FIRST_FLOOR_DB
        self._number = 0  # of the next window
        self.reset()

    def reset(self) -> None:
        """Forget the last windows, but not the level of the noise."""
        self._recent: deque[float] = deque(maxlen=_RECENT_COUNT)  # probabilities
        self._bands: deque[NDArray[np.float64]] = deque(maxlen=_COMPARED_COUNT)
        self._voice_db = _SILENT_DB  # level of the loudest of the last voiced windows
        self._loud_count = 0  # loud windows without a break, up to the last one
        self._quiet_count = 0  # quiet windows without a break, up to the last one
        self._longest_quiet = 0  # the largest of these counts since the last voiced window
        self._begin = self._number  # of the voice
        self._last_voiced = self._number - _MAX_GAP - 1
        self._last_changed = -1  # -1 means that the voice has not changed
        self._probability = 0.0  # of the last voiced window

    def score(self, windows: Windows) -> list[Score]:
        """Return the score of each row of `windows`."""
        level_db, peaks_db, share, bands_db = _measure(windows)
        return [
            self._next(level_db[at], peaks_db[at], share[at], bands_db[at])
            for at in range(len(windows))
        ]

    def _next(
        self, level_db: float, peaks_db: float, share: float, bands_db: NDArray[np.float64]
    ) -> Score:
        number, self._number = self._number, self._number + 1
        above_db = level_db - self._floor_db
        peaked = 0.5 + (peaks_db - _PEAKS_DB) / _PEAKS_RANGE_DB
        loud = 0.5 + (above_db - _ABOVE_DB) / _ABOVE_RANGE_DB
        is_audible = level_db >= _MIN_LEVEL_DB
        probability = 0.0
        if is_audible and share < _TONE_SHARE:
            probability = min(max(min(peaked, loud), 0.0), 1.0)
        below_db = self._voice_db - level_db
        if number - self._last_voiced <= _MAX_GAP and below_db > _WEAK_DB:
            probability = max(0.0, probability - _WEAK_LOSS) if below_db <= _RANGE_DB else 0.0
        self._recent.append(probability)
        if probability >= _VOICED:
            self._add_voiced(number, bands_db)
        is_speech = number - self._last_changed < _CHANGED_COUNT and self._last_changed >= 0
        self._follow_noise(level_db, is_voice=is_speech and probability >= _VOICED)
        self._count_loud(is_loud=is_audible and above_db >= _LOUD_DB)
        since = number - self._last_voiced
        is_open = since <= _MAX_GAP and number - self._begin < _MAX_LOOKBACK
        if not is_speech:
            return Score(0.0, 0, _SIZE, is_open)
        begin = max(self._begin - number, -_MAX_LOOKBACK) * _SIZE
        if since == 0:
            self._voice_db = max(level_db, self._voice_db - 1)
            usual = sorted(self._recent)[-_VOICED_COUNT:][0]
            self._probability = max(usual, probability) if self._probability else usual
        elif since > _EDGE_COUNT or self._loud_count < since or below_db > _WEAK_DB:
            return Score(0.0, begin, _SIZE, is_open)
        return Score(self._probability, begin, _SIZE, is_open)

    def _add_voiced(self, number: int, bands_db: NDArray[np.float64]) -> None:
        """Add a window to the voice, or begin a voice with it."""
        is_blip = self._last_changed < 0 and self._longest_quiet > _MAX_QUIET
        if number - self._last_voiced > _MAX_GAP or is_blip:
            self._begin = number - min(self._loud_count, _EDGE_COUNT)
            self._last_changed = -1
            self._voice_db = _SILENT_DB
            self._probability = 0.0
            self._bands.clear()
        else:  # the first window of a voice is left out: a tone may begin in the middle of it
            self._bands.append(bands_db)
            # Windows that follow a change soon are not compared: this saves half of the time.
            if number - self._last_changed >= _MIN_COMPARED or self._last_changed < 0:
                self._compare(number)
        self._last_voiced = number
        self._longest_quiet = 0

    def _count_loud(self, *, is_loud: bool) -> None:
        self._loud_count = self._loud_count + 1 if is_loud else 0
        self._quiet_count = 0 if is_loud else self._quiet_count + 1
        self._longest_quiet = max(self._longest_quiet, self._quiet_count)

    def _compare(self, number: int) -> None:
        if len(self._bands) < _MIN_COMPARED:
            return
        bands = np.stack(self._bands)
        means = bands.mean(axis=0)
        changes = (bands.max(axis=0) - bands.min(axis=0))[means > means.max() - _COMPARED_DB]
        if changes.mean() >= _CHANGE_DB:
            self._last_changed = number

    def _follow_noise(self, level_db: float, *, is_voice: bool) -> None:
        floor_db = self._floor_db
        if level_db < floor_db:
            floor_db += _FLOOR_FALL * (level_db - floor_db)
        else:
            floor_db = min(floor_db + (_VOICE_RISE_DB if is_voice else _FLOOR_RISE_DB), level_db)
        self._floor_db = max(floor_db, _MIN_FLOOR_DB)


def _measure(windows: Windows) -> _Measures:
    # The functions of numpy that are written in Python are left out: most of the time of a single
    # window is the time of the calls.
    spectrum = np.fft.rfft(windows * _WEIGHTS)[:, _FIRST_BIN:_END_BIN]
    real, imaginary = spectrum.real, spectrum.imag
    power = (real * real + imaginary * imaginary) * _SCALE
    total = np.add.reduce(power, 1) + _TINY
    peak_bands = np.add.reduceat(power, _PEAK_BANDS, 1)[:, :-1] / _PEAK_SIZES
    logs = np.add.reduceat(np.log(power + _TINY), _PEAK_BANDS, 1)[:, :-1] / _PEAK_SIZES
    peaks_db = np.add.reduce(np.log(peak_bands + _TINY) - logs, 1) * _PEAK_SCALE
    highest = power.argmax(1)[:, None] + _AROUND
    highest = np.minimum(np.maximum(highest, 0), power.shape[1] - 1)
    share = np.add.reduce(power[np.arange(len(power))[:, None], highest], 1) / total
    bands = np.log(np.add.reduceat(power, _BANDS, 1) + 1e-9) * _DECIBEL
    level_db = _DECIBEL * np.log(total)
    return _Measures(level_db.tolist(), peaks_db.tolist(), share.tolist(), bands)
