"""Compares the vocoder with the recorded trace, check by check."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from support.paths import GOLDEN

from duplane.tools.golden_replay.check import Check, Verdict
from duplane.tools.golden_replay.token2wav import checks

SILENCE = 4218  # the token of silence


@pytest.fixture(scope="module")
def replayed() -> list[Check]:
    return list(checks(GOLDEN))


def test_every_recorded_array_is_reproduced(replayed: list[Check]) -> None:
    assert [check for check in replayed if check.verdict is not Verdict.OK] == []


def test_mel_and_wave_of_every_chunk_are_compared(replayed: list[Check]) -> None:
    names = {check.name.removeprefix("token2wav ") for check in replayed}
    assert names >= {f"c{chunk}_mel" for chunk in range(5)}
    assert names >= {"c0_wav", "c3_wav", "c4_wav", "offline_mel", "offline_f0", "offline_wav"}


def test_a_set_without_a_vocoder_has_nothing_to_check(tmp_path: Path) -> None:
    assert list(checks(tmp_path)) == []


@pytest.mark.parametrize("path", sorted((GOLDEN / "sessions").glob("duplex_*.json")))
def test_every_turn_of_the_reference_begins_with_three_tokens_of_silence(path: Path) -> None:
    """So the first 120 ms after the zeros of HiFT are silence, too."""
    units = orjson.loads(path.read_bytes())["units"]
    for call in (call for unit in units for call in unit.get("token2wav_calls") or ()):
        assert (call["tokens"][:3] == [SILENCE] * 3) == call["first"]
