"""The same transcripts through the pure session and through a live edge; and that they say all."""

from __future__ import annotations

from typing import Any

import pytest
from edge_replay import LiveReplay, PureReplay
from edge_transcripts import Transcript, all_transcripts, server_events
from live_edge import HandSetClock, impatient, live_edge

from duplane.edge.dialects import a, b
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.d import DialectD
from duplane.edge.dialects.dialect import Dialect, Phase
from duplane.edge.ends import CLOSE_CODES, End
from duplane.edge.faults import ErrorCode

TRANSCRIPTS = {transcript.name: transcript for transcript in all_transcripts()}

# Not to be had from a session alone; tests/fabric shows them.
UNWRITTEN_ENDS = {End.MODE_REFUSED, End.TOO_SLOW}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_pure_session_says_what_is_written(name: str) -> None:
    PureReplay(TRANSCRIPTS[name]).run()


@pytest.mark.parametrize("name", TRANSCRIPTS)
async def test_live_edge_says_what_is_written(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    async with live_edge(impatient(transcript.limits), clock=HandSetClock()) as edge:
        await LiveReplay(transcript, edge).run()


def of(dialect: str) -> list[Transcript]:
    return [t for name, t in TRANSCRIPTS.items() if name.startswith(f"{dialect.lower()}_")]


def events(dialect: str) -> list[dict[str, Any]]:
    return [event for transcript in of(dialect) for event in server_events(transcript)]


@pytest.mark.parametrize("dialect", [DialectA, DialectB, DialectC, DialectD])
def test_transcripts_are_named_by_their_dialect(dialect: type[Dialect]) -> None:
    for transcript in of(dialect.name):
        replay = PureReplay(transcript)
        replay.run()
        assert replay.session.dialect.name == dialect.name


@pytest.mark.parametrize(
    ("dialect", "types"),
    [
        ("A", {"session.created", "response.listen", "response.output_audio.delta"}),
        ("B", {"session.created", "response.output.delta", "response.done"}),
    ],
)
def test_every_event_type_is_in_a_transcript(dialect: str, types: set[str]) -> None:
    shared = {
        "session.queued",
        "session.queue_update",
        "session.queue_done",
        "session.closed",
        "error",
    }
    assert {event["type"] for event in events(dialect)} == types | shared


def test_every_event_type_of_c_is_in_a_transcript() -> None:
    queue = {"queued", "queue_update", "queue_done"}
    answers = {"prepared", "result", "paused", "resumed", "interrupted", "stopped"}
    assert {event["type"] for event in events("C")} == queue | answers | {"timeout", "error"}


def test_every_event_type_of_d_is_in_a_transcript() -> None:
    queue = {"queued", "queue_update", "queue_done"}
    assert {event["type"] for event in events("D")} == queue | {
        *("prefill_done", "chunk", "done", "error")
    }


@pytest.mark.parametrize("name", [name for name in TRANSCRIPTS if name.startswith("c_")])
def test_a_chunk_that_was_taken_has_at_most_one_answer(name: str) -> None:
    steps = TRANSCRIPTS[name].steps
    chunks = sum(step.who == "client" and '"audio_chunk"' in step.rest for step in steps)
    answers = sum(step.who == "server" and '"result"' in step.rest for step in steps)
    assert answers <= chunks


def test_every_kind_of_delta_is_in_a_transcript() -> None:
    kinds = {event["kind"] for event in events("B") if "kind" in event}
    assert kinds == {"listen", "text", "audio"}


@pytest.mark.parametrize(
    ("dialect", "unwritten"),
    # Told in A's form, because a claim that fails comes before the client's first event counts.
    [("A", set()), ("B", {ErrorCode.WORKER_CONNECT_FAILED})],
)
def test_every_error_code_is_in_a_transcript(dialect: str, unwritten: set[ErrorCode]) -> None:
    codes = {event["error"]["code"] for event in events(dialect) if event["type"] == "error"}
    assert codes == set(ErrorCode) - unwritten


@pytest.mark.parametrize(("dialect", "reasons"), [("A", a.CLOSED_REASONS), ("B", b.CLOSED_REASONS)])
def test_every_close_reason_is_in_a_transcript(dialect: str, reasons: dict[End, str]) -> None:
    written = {event["reason"] for event in events(dialect) if event["type"] == "session.closed"}
    assert set(reasons.values()) <= written


def test_every_end_and_close_code_is_in_a_transcript() -> None:
    ends: set[End] = set()
    for transcript in TRANSCRIPTS.values():
        replay = PureReplay(transcript)
        replay.run()
        assert replay.session.farewell
        ends.add(replay.session.farewell.end)
    assert ends == set(CLOSE_CODES) - UNWRITTEN_ENDS


@pytest.mark.parametrize("dialect", [DialectA, DialectB, DialectBChat, DialectC])
def test_every_transition_is_in_a_transcript(dialect: type[Dialect]) -> None:
    seen: set[tuple[str, Phase, str]] = set()
    for transcript in TRANSCRIPTS.values():
        replay = PureReplay(transcript)
        replay.run()
        seen |= replay.seen
    missing = {
        (phase, kind)
        for phase, kind in dialect.transitions
        if (dialect.name, phase, kind) not in seen
    }
    assert not missing
