"""Pieces of speech that are cut out of a stream, and how much sound is kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.noises import white
from support.protocols.transcripts import questions, spoken

from duplane.edge.speech.segments import Segment, Segments
from duplane.edge.speech.spectral_scorer import SpectralScorer
from duplane.edge.speech.speech_detector import DetectorSettings, SpeechStarted

SETTINGS = DetectorSettings(min_silence_ms=400)
LONG = 300 * 16_000


def segments(max_samples: int = LONG) -> Segments:
    return Segments(SpectralScorer(), SETTINGS, max_samples)


def pieces_of(sound: bytes, lengths: list[int]) -> list[bytes]:
    """Cut sound into pieces whose lengths repeat `lengths`."""
    pieces: list[bytes] = []
    at = 0
    while at < len(sound):
        for length in lengths:
            pieces.append(sound[4 * at : 4 * (at + length)])
            at += length
    return pieces


@hypothesis_settings(max_examples=20)
@given(st.lists(st.integers(1, 12_000), min_size=1, max_size=8))
def test_a_segment_is_what_was_said_whatever_the_pieces_are(lengths: list[int]) -> None:
    stream = segments()
    sound = spoken("5000", "7200")
    found = [each for piece in pieces_of(sound, lengths) for each in stream.feed(piece)]
    started, segment = found
    assert isinstance(started, SpeechStarted)
    assert isinstance(segment, Segment)
    begin = sound.index(segment.audio) // 4
    assert [begin / 16, begin / 16 + len(segment.audio) / 64] == pytest.approx([300, 1680], abs=100)


def test_sound_after_a_segment_is_not_heard() -> None:
    stream = segments()
    whole = stream.feed(spoken("5000", "12000"))  # two questions
    assert [type(each) for each in whole] == [SpeechStarted, Segment]
    assert not stream.is_speaking
    assert [type(each) for each in stream.feed(spoken("13000", "15000"))] == [
        SpeechStarted,
        Segment,
    ]


def test_skipped_sound_is_in_no_segment() -> None:
    stream = segments()
    stream.feed(spoken("5000", "6000"))
    assert stream.is_speaking
    stream.skip(spoken("6000", "9000"))
    assert not stream.is_speaking
    *_, segment = stream.feed(spoken("9000", "11200"))
    assert isinstance(segment, Segment)
    assert segment.audio in spoken("9000", "11200")


def test_speech_as_long_as_the_bound_ends_at_the_bound() -> None:
    stream = segments(max_samples=12_000)
    sound = spoken("5000", "7200")
    found = [each for piece in pieces_of(sound, [3200]) for each in stream.feed(piece)]
    segment = found[1]
    assert isinstance(segment, Segment)
    assert len(segment.audio) == 4 * 12_000
    assert sound.index(segment.audio) // 64 == pytest.approx(300, abs=100)


def test_no_more_is_kept_than_the_bound_and_the_last_second() -> None:
    stream = segments(max_samples=2 * 16_000)
    quiet = np.resize(white(), questions().shape)
    for sound in (quiet, questions()):
        for piece in pieces_of(sound.astype("<f4").tobytes(), [1600]):
            stream.feed(piece)
            assert stream.held_bytes <= 4 * 16_000 * (3 if stream.is_speaking else 1)
