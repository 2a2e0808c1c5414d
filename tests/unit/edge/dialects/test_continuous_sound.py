"""The sound of L is one stream: as long as the units, without gaps, in the client's format."""

from __future__ import annotations

import numpy as np
import pytest

from duplane.edge.dialects.continuous_sound import ContinuousSound
from duplane.edge.payload.sound_format import Encoding, SoundFormat
from duplane.fabric.audio import resample_pcm
from duplane.fabric.model import ModelFormat

FORMATS = [
    SoundFormat(Encoding.INT16, 24_000),
    SoundFormat(Encoding.INT16, 16_000),
    SoundFormat(Encoding.ULAW, 8_000),
    SoundFormat(Encoding.ALAW, 8_000),
]
MODEL = ModelFormat()
each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda f: f"{f.suffix}-{f.rate_hertz}")


def tone(count: int) -> bytes:
    return (0.3 * np.sin(2 * np.pi * 300 * np.arange(count) / 24_000)).astype("<f4").tobytes()


def heard(form: SoundFormat, *pieces: bytes) -> np.ndarray:
    return np.frombuffer(form.decode(b"".join(pieces)), "<f4")


@each_format
def test_each_unit_has_one_unit_of_sound(form: SoundFormat) -> None:
    stream = ContinuousSound(form, MODEL)
    for number, count in enumerate((0, 0, 24_000, 24_000, 9_000, 0, 24_000, 0), 1):
        stream.next_unit(tone(count))
        assert stream.sent_ms == 1000 * number


@each_format
def test_a_turn_of_several_units_has_no_gap(form: SoundFormat) -> None:
    stream = ContinuousSound(form, MODEL)
    stream.next_unit(b"")
    speech = tone(60_000)
    units = [speech[4 * start :][: 4 * 24_000] for start in range(0, 60_000, 24_000)]
    got = heard(form, *(stream.next_unit(unit) for unit in (*units, b"")))
    whole = speech + bytes(4 * 36_000)
    expected = np.frombuffer(resample_pcm(whole, 24_000, form.rate_hertz), "<f4")
    late = 0 if form.rate_hertz == 24_000 else 100  # samples of the lower rate
    rough = 0.02 if form.sample_bytes == 1 else 1e-3
    assert got.size == 4 * form.rate_hertz
    assert got[late:] == pytest.approx(expected[: got.size - late], abs=rough)


def test_the_sound_of_long_units_does_not_add_up() -> None:
    stream = ContinuousSound(FORMATS[0], MODEL)
    for turn in range(1, 50):
        stream.next_unit(tone(25_920))
        assert stream.sent_ms == 2000 * turn - 920
        stream.next_unit(b"")
        assert stream.sent_ms == 2000 * turn


def test_a_unit_for_which_nothing_is_due_is_empty() -> None:
    stream = ContinuousSound(FORMATS[0], MODEL)
    stream.next_unit(tone(50_000))
    assert stream.next_unit(b"") == b""
    assert len(stream.next_unit(b"")) == 2 * 22_000


@each_format
def test_units_may_be_shorter_than_a_second(form: SoundFormat) -> None:
    stream = ContinuousSound(form, ModelFormat(unit_ns=80_000_000, output_rate_hertz=12_000))
    for number in range(1, 26):
        speech = tone(960) if number % 3 else b""
        stream.next_unit(speech)
        assert stream.sent_ms == 80 * number
