from pathlib import Path

import pytest
from support.paths import GOLDEN

from duplane.tools.golden_replay import duplex
from duplane.tools.golden_replay.check import Check, Verdict


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return list(duplex.checks(GOLDEN))


def compared(checks: list[Check]) -> list[Check]:
    return [check for check in checks if check.verdict is not Verdict.SKIPPED]


def test_the_duplex_sessions_are_reproduced(checks: list[Check], subtests: pytest.Subtests) -> None:
    for check in compared(checks):
        with subtests.test(check.name):
            assert check.verdict in (Verdict.OK, Verdict.DIFFERS), check.note
            assert check.error <= 1e-5, "float32 alone should come closer than the traces allow"


def test_one_thing_differs_by_design(checks: list[Check]) -> None:
    differing = [check.name for check in compared(checks) if check.verdict is Verdict.DIFFERS]
    assert differing == ["duplex_short_chunks short unit"]


def test_every_session_was_played_or_says_what_it_needs(checks: list[Check]) -> None:
    sessions = {path.stem for path in (GOLDEN / "sessions").glob("duplex_*.json")}
    assert {check.name.split()[0] for check in checks} == sessions
    assert all(check.note for check in checks if check.verdict is Verdict.SKIPPED)


@pytest.mark.parametrize(
    "kind",
    [
        *("prepare kv", "prepare_ref_embeds", "kv_before", "kv_after_prefill"),
        *("kv_after_generate", "kv_after_finalize", "decoded_ids", "is_listen", "text"),
        *("end_of_turn", "audio_embeds", "pending_logits", "fed_hidden", "step_logits"),
        *("tts tokens", "tts_condition", "token2wav_calls", "all_token_ids", "final_k_l1"),
    ],
)
def test_the_greedy_session_is_compared_in_every_kind(checks: list[Check], kind: str) -> None:
    assert f"duplex_greedy {kind}" in {check.name for check in compared(checks)}


def test_a_directory_without_sessions_has_no_checks(tmp_path: Path) -> None:
    assert list(duplex.checks(tmp_path)) == []
