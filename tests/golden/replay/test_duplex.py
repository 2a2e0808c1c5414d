from pathlib import Path

import pytest
from support.paths import GOLDEN

from duplane.tools.golden_replay import duplex
from duplane.tools.golden_replay.check import Check, Verdict

CHECKS = list(duplex.checks(GOLDEN))
SKIPPED = [check for check in CHECKS if check.verdict is Verdict.SKIPPED]
COMPARED = [check for check in CHECKS if check.verdict is not Verdict.SKIPPED]


@pytest.mark.parametrize("check", COMPARED, ids=lambda check: check.name)
def test_the_duplex_sessions_are_reproduced(check: Check) -> None:
    assert check.verdict in (Verdict.OK, Verdict.DIFFERS), check.note
    assert check.error <= 1e-5, "float32 alone should come closer than the traces allow"


def test_one_thing_differs_by_design() -> None:
    differing = [check.name for check in COMPARED if check.verdict is Verdict.DIFFERS]
    assert differing == ["duplex_short_chunks short unit"]


def test_every_session_was_played_or_says_what_it_needs() -> None:
    sessions = {path.stem for path in (GOLDEN / "sessions").glob("duplex_*.json")}
    assert {check.name.split()[0] for check in CHECKS} == sessions
    assert all(check.note for check in SKIPPED)


@pytest.mark.parametrize(
    "kind",
    [
        *("prepare kv", "prepare_ref_embeds", "kv_before", "kv_after_prefill"),
        *("kv_after_generate", "kv_after_finalize", "decoded_ids", "is_listen", "text"),
        *("end_of_turn", "audio_embeds", "pending_logits", "fed_hidden", "step_logits"),
        *("tts tokens", "tts_condition", "token2wav_calls", "all_token_ids", "final_k_l1"),
    ],
)
def test_the_greedy_session_is_compared_in_every_kind(kind: str) -> None:
    assert f"duplex_greedy {kind}" in {check.name for check in COMPARED}


def test_a_directory_without_sessions_has_no_checks(tmp_path: Path) -> None:
    assert list(duplex.checks(tmp_path)) == []
