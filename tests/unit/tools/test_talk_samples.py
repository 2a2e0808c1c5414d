"""The sample recordings of `duplane talk`: a text file beside each lists its questions."""

from __future__ import annotations

import pytest

from duplane.fabric.audio import INPUT_RATE_HERTZ
from duplane.tools.talk.client import read_sound
from duplane.tools.talk.duplex import SAMPLE

SAMPLES = sorted(SAMPLE.parent.glob("*.wav"))


def test_default_recording_comes_along() -> None:
    assert SAMPLE in SAMPLES


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_recording_has_its_questions_beside_it(sample: object) -> None:
    path = SAMPLE.parent / str(sample)
    sound = read_sound(path)
    lines = path.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    assert lines
    for line in lines:
        start_s, unit, *question = line.split()
        assert unit == "s"
        assert question
        start = int(float(start_s) * INPUT_RATE_HERTZ)
        assert abs(sound[start : start + INPUT_RATE_HERTZ // 2]).max() > 0.05
