import pytest
from support.paths import GOLDEN

from duplane.tools.golden_replay import chat
from duplane.tools.golden_replay.check import Check, Verdict

CHECKS = list(chat.checks(GOLDEN))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_chats_are_reproduced(check: Check) -> None:
    assert check.verdict is Verdict.OK, check.note
    assert check.error <= 1e-5, "float32 alone should come closer than the traces allow"


def test_every_chat_was_played() -> None:
    sessions = {path.stem for path in (GOLDEN / "sessions").glob("chat_*.json")}
    assert {check.name.split()[0] for check in CHECKS} == {*sessions, "half_duplex"}
