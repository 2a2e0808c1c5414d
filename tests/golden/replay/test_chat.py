import pytest
from support.paths import GOLDEN

from duplane.tools.golden_replay import chat
from duplane.tools.golden_replay.check import Check, Verdict


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return list(chat.checks(GOLDEN))


def test_the_chats_are_reproduced(checks: list[Check], subtests: pytest.Subtests) -> None:
    for check in checks:
        with subtests.test(check.name):
            assert check.verdict is Verdict.OK, check.note
            assert check.error <= 1e-5, "float32 alone should come closer than the traces allow"


def test_every_chat_was_played(checks: list[Check]) -> None:
    sessions = {path.stem for path in (GOLDEN / "sessions").glob("chat_*.json")}
    assert {check.name.split()[0] for check in checks} == {*sessions, "half_duplex"}
