"""The speech detector: what it takes for speech, where speech begins and ends, and its bounds."""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.noises import NOISES, white
from support.paths import ROOT

from duplane.edge.speech.spectral_scorer import SpectralScorer
from duplane.edge.speech.speech_detector import (
    DetectorSettings,
    Score,
    Scorer,
    SpeechDetector,
    SpeechEvent,
    SpeechStarted,
    SpeechStopped,
    Windows,
    samples_of,
)

QUESTIONS = ROOT / "tools/duplane/tools/talk/samples/questions.wav"
# Where the voice of the sample is louder than -53 dB, in milliseconds.
SPOKEN_MS = [(1810, 2330), (5300, 6680), (9300, 10680), (13310, 13970)]
EXACT = DetectorSettings(prefix_ms=0, suffix_ms=0)
SIZE = 512


def pcm(samples: np.ndarray) -> bytes:
    return samples.astype("<f4").tobytes()


def read_sample(path: Path = QUESTIONS) -> np.ndarray:
    with wave.open(str(path)) as file:
        levels = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return levels / 32_768


def stops(events: list[SpeechEvent]) -> list[SpeechStopped]:
    return [event for event in events if isinstance(event, SpeechStopped)]


def detect(samples: np.ndarray, settings: DetectorSettings = EXACT) -> list[SpeechEvent]:
    return SpeechDetector(SpectralScorer(), settings).feed(pcm(samples))


class GivenScores:
    """A scorer whose scores the test gives, one for each window; later ones are 0."""

    window_samples = SIZE
    lookback_samples = 0

    def __init__(self, *scores: float | Score) -> None:
        self._scores = [
            each if isinstance(each, Score) else Score(each, 0, SIZE) for each in scores
        ]

    def score(self, windows: Windows) -> list[Score]:
        return [self._scores.pop(0) if self._scores else Score(0, 0, SIZE) for _ in windows]

    def reset(self) -> None:
        """Nothing to forget."""


def feed_windows(scorer: Scorer, count: int, settings: DetectorSettings) -> list[SpeechEvent]:
    return SpeechDetector(scorer, settings).feed(bytes(4 * SIZE * count))


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("level", [1.0, 0.3])
def test_the_edges_of_the_questions_are_found_within_100_ms(threshold: float, level: float) -> None:
    settings = DetectorSettings(threshold=threshold, prefix_ms=0, suffix_ms=0)
    found = stops(detect(level * read_sample(), settings))
    assert len(found) == len(SPOKEN_MS)
    for stop, spoken_ms in zip(found, SPOKEN_MS, strict=True):
        assert not stop.is_too_short
        edges_ms = stop.begin / 16, stop.end / 16
        assert edges_ms == pytest.approx(spoken_ms, abs=100)


def test_the_questions_are_found_in_noise() -> None:
    samples = read_sample()
    noise = np.resize(white(0.005), samples.shape)
    found = stops(detect(samples + noise))
    assert len(found) == len(SPOKEN_MS)
    for stop, (begin_ms, end_ms) in zip(found, SPOKEN_MS, strict=True):
        # The noise hides consonants at the edges.
        assert begin_ms - 100 < stop.begin / 16 < begin_ms + 400
        assert stop.end / 16 == pytest.approx(end_ms, abs=100)


@pytest.mark.parametrize("name", NOISES)
def test_noise_is_no_speech(name: str) -> None:
    assert detect(NOISES[name](), DetectorSettings(threshold=0.3)) == []


def test_a_short_sound_that_silence_parts_from_speech_does_not_belong_to_it() -> None:
    samples = read_sample()
    short = 0.05 * samples[samples_of(5820) : samples_of(5884)]
    speech = samples[samples_of(5250) : samples_of(8000)]
    sound = np.concatenate((np.zeros(8000), short, np.zeros(samples_of(160)), speech))
    (stop,) = stops(detect(sound))
    assert stop.begin / 16 == pytest.approx(500 + 64 + 160 + 50, abs=100)


def test_speech_is_found_after_each_noise() -> None:
    # Silence of half a second separates noise and speech.
    speech = read_sample()[samples_of(5000) : samples_of(8000)]
    quiet = 0.001 * np.random.default_rng(1).standard_normal(8000)
    for name, noise in NOISES.items():
        (stop,) = stops(detect(np.concatenate((noise(), quiet, speech))))
        begin_ms = 6500 + SPOKEN_MS[1][0] - 5000
        assert stop.begin / 16 == pytest.approx(begin_ms, abs=100), name


@hypothesis.settings(max_examples=20)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=12))
def test_any_lengths_of_the_pieces_give_equal_events(lengths: list[int]) -> None:
    sound = pcm(read_sample()[samples_of(1000) : samples_of(8000)])
    whole = SpeechDetector(SpectralScorer(), EXACT).feed(sound)
    pieces = SpeechDetector(SpectralScorer(), EXACT)
    events: list[SpeechEvent] = []
    at = 0
    for length in lengths * (1 + len(sound) // (4 * sum(lengths))):
        events += pieces.feed(sound[4 * at : 4 * (at + length)])
        at += length
    assert events == whole
    assert len(stops(whole)) == 2


def test_speech_begins_at_the_threshold_and_goes_on_a_little_below() -> None:
    settings = DetectorSettings(threshold=0.5, min_silence_ms=64, prefix_ms=0, suffix_ms=0)
    scorer = GivenScores(0, 0.49, 0.5, 0.3, 0.36, 0.36, 0.34, 0.34, 0.34)
    began, stopped = feed_windows(scorer, 9, settings)
    assert began == SpeechStarted(2 * SIZE)
    assert stopped == SpeechStopped(2 * SIZE, 6 * SIZE, 8 * SIZE, is_too_short=False)


def test_a_piece_shorter_than_the_minimum_is_said_to_be_too_short() -> None:
    settings = DetectorSettings(min_speech_ms=96, min_silence_ms=32)
    scores = [1, 1, 0, 1, 1, 1, 0]
    events = stops(feed_windows(GivenScores(*scores), len(scores), settings))
    assert [stop.is_too_short for stop in events] == [True, False]


def test_what_is_added_to_speech_never_overlaps_other_speech_or_the_future() -> None:
    settings = DetectorSettings(min_silence_ms=64, prefix_ms=1000, suffix_ms=1000)
    scores = [0, 1, 0, 0, 1, 0, 0]
    first, second = stops(feed_windows(GivenScores(*scores), len(scores), settings))
    assert (first.begin, first.end) == (0, first.at) == (0, 4 * SIZE)
    assert (second.begin, second.end) == (first.end, second.at)


def test_a_pause_shorter_than_the_minimum_does_not_end_speech() -> None:
    settings = DetectorSettings(min_silence_ms=3100, prefix_ms=0, suffix_ms=0)
    sound = np.concatenate((read_sample()[: samples_of(13_000)], np.zeros(samples_of(2000))))
    (stop,) = stops(detect(sound, settings))
    assert (stop.begin / 16, stop.end / 16) == pytest.approx((1810, 10_680), abs=100)


@pytest.mark.parametrize("begins_earlier", [True, False])
def test_speech_does_not_end_while_the_scorer_is_undecided(*, begins_earlier: bool) -> None:
    settings = DetectorSettings(min_silence_ms=64, min_speech_ms=0, prefix_ms=0, suffix_ms=0)
    undecided = Score(0, 0, SIZE, is_open=True)
    late = Score(1, -SIZE if begins_earlier else 0, SIZE)
    scores = [1, 0, undecided, late, 0, 0]
    found = stops(feed_windows(GivenScores(*scores), len(scores), settings))
    if begins_earlier:
        assert [(stop.begin, stop.end) for stop in found] == [(0, 4 * SIZE)]
    else:
        pieces = [(0, SIZE), (3 * SIZE, 4 * SIZE)]
        assert [(stop.begin, stop.end) for stop in found] == pieces


def test_sound_that_is_skipped_is_not_heard_and_keeps_its_place() -> None:
    settings = DetectorSettings(min_silence_ms=32, prefix_ms=500, suffix_ms=0)
    detector = SpeechDetector(GivenScores(1, 1, 1, 0), settings)
    assert detector.feed(bytes(4 * (SIZE + 10))) == [SpeechStarted(0)]
    detector.skip(990)
    assert not detector.is_speaking
    assert detector.position == SIZE + 1000
    begin = SIZE + 1000
    assert detector.feed(bytes(4 * 3 * SIZE)) == [
        SpeechStarted(begin),
        SpeechStopped(begin, begin + 2 * SIZE, begin + 3 * SIZE, is_too_short=True),
    ]


def test_speech_can_be_cut() -> None:
    detector = SpeechDetector(GivenScores(*[1.0] * 10), DetectorSettings())
    assert detector.cut() == []
    detector.feed(bytes(4 * SIZE * 10))
    assert detector.cut() == [SpeechStopped(0, 10 * SIZE, 10 * SIZE, is_too_short=False)]
    assert not detector.is_speaking


def test_a_piece_of_speech_never_begins_before_the_lookback() -> None:
    detector = SpeechDetector(SpectralScorer(), DetectorSettings(prefix_ms=300))
    sound = pcm(read_sample())
    for at in range(0, len(sound), 4 * SIZE):
        reachable = detector.position - detector.lookback_samples
        for event in detector.feed(sound[at : at + 4 * SIZE]):
            if isinstance(event, SpeechStarted):
                assert event.begin >= reachable


def test_samples_that_are_no_usual_sound_do_no_harm() -> None:
    largest = np.finfo(np.float32).max
    sound = np.concatenate((np.full(5000, largest), np.full(5000, -1e30), np.zeros(5000)))
    assert detect(np.concatenate((sound, read_sample()[: samples_of(4000)]))) != []


def _held_bytes(detector: SpeechDetector) -> int:
    held = [*vars(detector).values(), *vars(detector._scorer).values()]
    return sum(len(each) if hasattr(each, "__len__") else 1 for each in held)


@pytest.mark.parametrize("make", [lambda: white(0.1), lambda: read_sample()])
def test_the_state_does_not_grow(make: Callable[[], np.ndarray]) -> None:
    detector = SpeechDetector(SpectralScorer(), DetectorSettings(min_silence_ms=1e9))
    sound = pcm(make())
    detector.feed(sound)
    held = _held_bytes(detector)
    for _ in range(5):
        detector.feed(sound)
    assert _held_bytes(detector) <= held + 16
