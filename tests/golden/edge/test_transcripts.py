"""Each transcript is replayed through the session without sockets, and through a live edge."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.edge.live_edge import HandSetClock, impatient, live_edge
from support.protocols.transcript_replay import LiveReplay, PureReplay
from support.protocols.transcripts import Transcript, all_transcripts

from duplane.edge.close import CLOSE_CODES, RETURNS, CloseReason
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.d import DialectD
from duplane.edge.dialects.dialect import Dialect
from duplane.edge.dialects.e import DialectE
from duplane.edge.dialects.h import DialectH
from duplane.edge.dialects.l import DialectL
from duplane.edge.recording.settings import Consent, RecordingSettings

TRANSCRIPTS = {transcript.name: transcript for transcript in all_transcripts()}

# Only clients that do not read, those whose credential ends, and those that return to their
# sessions are closed for these reasons.
# Tests in tests/fabric and tests/attacks cause them.
UNWRITTEN_ENDS = {CloseReason.TOO_SLOW, CloseReason.CREDENTIAL_ENDED, *RETURNS}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_pure_session_says_what_is_written(name: str) -> None:
    PureReplay(TRANSCRIPTS[name]).run()


@pytest.mark.parametrize("name", TRANSCRIPTS)
async def test_live_edge_says_what_is_written(name: str, tmp_path: Path) -> None:
    transcript = TRANSCRIPTS[name]
    recording = RecordingSettings(tmp_path, Consent.ALWAYS) if transcript.is_recorded else None
    limits = impatient(transcript.limits)
    clock = HandSetClock()
    continuity = "worker" if transcript.can_move else "off"
    async with live_edge(limits, clock=clock, recording=recording, continuity=continuity) as edge:
        await LiveReplay(transcript, edge).run()


def of(dialect: str) -> list[Transcript]:
    return [t for name, t in TRANSCRIPTS.items() if name.startswith(f"{dialect.lower()}_")]


@pytest.mark.parametrize(
    "dialect", [DialectA, DialectB, DialectC, DialectD, DialectE, DialectH, DialectL]
)
def test_transcripts_are_named_by_their_dialect(dialect: type[Dialect]) -> None:
    for transcript in of(dialect.name):
        replay = PureReplay(transcript)
        replay.run()
        assert replay.session.dialect.name == dialect.name


@pytest.mark.parametrize("name", [name for name in TRANSCRIPTS if name.startswith("c_")])
def test_a_chunk_that_was_taken_has_at_most_one_answer(name: str) -> None:
    steps = TRANSCRIPTS[name].steps
    chunks = sum(step.who == "client" and '"audio_chunk"' in step.rest for step in steps)
    answers = sum(step.who == "server" and '"result"' in step.rest for step in steps)
    assert answers <= chunks


def test_every_end_and_close_code_is_in_a_transcript() -> None:
    ends: set[CloseReason] = set()
    for transcript in TRANSCRIPTS.values():
        replay = PureReplay(transcript)
        replay.run()
        assert replay.session.closed
        ends.add(replay.session.closed.reason)
    assert ends == set(CLOSE_CODES) - UNWRITTEN_ENDS
