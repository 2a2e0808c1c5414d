from pathlib import Path

import pytest
from support.paths import GOLDEN

from duplane.tools.golden_replay import audio
from duplane.tools.golden_replay.check import Check, Verdict


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return list(audio.checks(GOLDEN))


def test_the_audio_traces_are_reproduced(checks: list[Check], subtests: pytest.Subtests) -> None:
    for check in checks:
        with subtests.test(check.name):
            assert check.verdict is Verdict.OK, check.note
            # Errors of 2e-6 were measured, and 6e-6 on a CPU of another type.
            assert check.error <= 2e-5, (
                "float32 alone should come much closer than the traces allow"
            )


def test_every_kind_of_audio_trace_was_compared(checks: list[Check]) -> None:
    names = {check.name for check in checks}
    stream = {"mel_frames", "mel", "embeds", "embeds_c8", "encoder_kv_after", "buffer_left"}
    assert names >= {f"audio_stream {kind}" for kind in stream}
    assert names >= {"audio_offline talk31s_embeds_c8", "audio_offline ref2_mel"}


def test_a_directory_without_audio_traces_has_no_checks(tmp_path: Path) -> None:
    assert list(audio.checks(tmp_path)) == []
