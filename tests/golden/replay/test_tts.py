from pathlib import Path

import pytest
from support.paths import GOLDEN

from duplane.tools.golden_replay import tts
from duplane.tools.golden_replay.check import Check, Verdict


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return list(tts.checks(GOLDEN))


def compared(checks: list[Check]) -> list[Check]:
    return [check for check in checks if check.verdict is not Verdict.SKIPPED]


def test_the_talker_traces_are_reproduced(checks: list[Check], subtests: pytest.Subtests) -> None:
    for check in compared(checks):
        with subtests.test(check.name):
            assert check.verdict is Verdict.OK, check.note
            assert check.error <= 1e-5, "float32 alone should come closer than the traces allow"


def test_every_part_of_the_trace_was_played_or_says_what_it_needs(checks: list[Check]) -> None:
    assert {check.name.split()[1] for check in checks} == {"turn", "streaming", "oneshot"}


def test_a_directory_without_talker_traces_has_no_checks(tmp_path: Path) -> None:
    assert list(tts.checks(tmp_path)) == []
