from pathlib import Path

import pytest
from support.paths import GOLDEN

from duplane.tools.golden_replay import tts
from duplane.tools.golden_replay.check import Check, Verdict

CHECKS = list(tts.checks(GOLDEN))
COMPARED = [check for check in CHECKS if check.verdict is not Verdict.SKIPPED]


@pytest.mark.parametrize("check", COMPARED, ids=lambda check: check.name)
def test_the_talker_traces_are_reproduced(check: Check) -> None:
    assert check.verdict is Verdict.OK, check.note
    assert check.error <= 1e-5, "float32 alone should come closer than the traces allow"


def test_every_part_of_the_trace_was_played_or_says_what_it_needs() -> None:
    assert {check.name.split()[1] for check in CHECKS} == {"turn", "streaming", "oneshot"}


def test_a_directory_without_talker_traces_has_no_checks(tmp_path: Path) -> None:
    assert list(tts.checks(tmp_path)) == []
