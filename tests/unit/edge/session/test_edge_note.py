"""Another edge goes on with a session from its note and its deltas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import orjson
import pybase64
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.protocols.transcripts import pcm

from duplane.edge.clock import Moment
from duplane.edge.dialects.actions import NO_TAG, Return, Tag
from duplane.edge.identity import Identity
from duplane.edge.modes import MODES
from duplane.edge.routing import ENDPOINTS, Route, restored_session
from duplane.edge.session.continuity import Continuity, RebuildPermits
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.edge_note import EdgeNote
from duplane.edge.session.effects import RecordFixed
from duplane.edge.session.move_table import MoveCause, MovePhase
from duplane.edge.session.unit_state import Cursor, UnitState
from duplane.edge.settings import Limits
from duplane.fabric.attaching import LATER_COPY_S, TakenSession
from duplane.fabric.bounds import MAX_NOTE_BYTES
from duplane.fabric.converse import ConverseStream
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.journal import JournalSpace, LossReason
from duplane.fabric.v1 import session_pb2

NOW = Moment(36_077.0, 1_714_200_000_000_000_000)
AUDIO = pybase64.b64encode(pcm(16_000)).decode()
HALF = pybase64.b64encode(pcm(8_000)).decode()
SETTINGS: dict[str, dict[str, Any]] = {
    "A": {"type": "session.update", "session": {"instructions": "x", "resumable": True}},
    "B": {"type": "session.init", "payload": {"resumable": True}},
    "C": {"type": "prepare", "resumable": True},
}
ROUTES = {"A": Route.REALTIME, "B": Route.REALTIME, "C": Route.DUPLEX}


def append(dialect: str, number: int, *, is_half: bool = False) -> dict[str, Any]:
    audio = HALF if is_half else AUDIO
    match dialect:
        case "A":
            return {"type": "input_audio_buffer.append", "audio": audio}
        case "B":
            return {"type": "input.append", "input": {"audio": audio, "input_id": f"i{number}"}}
        case _:
            return {"type": "audio_chunk", "audio_base64": audio}


def delta(number: int, kind: str) -> session_pb2.Delta:
    """Return a delta that listens, speaks, or speaks the end of a turn."""
    made = session_pb2.Delta(sequence=number, context_token_count=50 + 3 * number)
    made.token_counts.output_text_token_count = number + 1
    made.token_counts.input_audio_token_count = 10
    if kind == "listen":
        made.listen.SetInParent()
        return made
    made.speech.text = f"word {number}"
    made.speech.audio = number.to_bytes(4, "little") * 24
    made.end_of_turn = kind == "end"
    return made


class Talk:
    """A session whose worker answers each unit at once, and the events that were told."""

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        endpoint = ENDPOINTS[ROUTES[dialect], "audio"]
        session = endpoint.new_session(Identity("sess_0", "rt_0"), Limits(), NOW)
        assert isinstance(session, DuplexSession)
        self.session = session
        self.told: list[dict[str, Any]] = []
        self.replies: list[dict[str, Any]] = []  # to appends that completed no unit
        session.granted(60.0, NOW)
        session.receive(orjson.dumps(SETTINGS[dialect]), NOW)
        session.take(NOW)
        opened = session_pb2.Opened(prompt_token_count=7, accepts_speech_requests=True)
        (ready,) = session.responded(session_pb2.ConverseResponse(opened=opened), NOW)
        self.secret = orjson.loads(ready)["resume"]["token"].partition(".")[2]

    def send(self, number: int, *, in_halves: bool = False) -> bytes:
        """Send one unit, and return the note that goes with it."""
        for _ in range(1 + in_halves):
            self.hear(append(self.dialect, number, is_half=in_halves))
        self.session.take(NOW)
        return self.session.note(NOW).to_bytes()

    def hear(self, event: dict[str, Any]) -> None:
        replies = self.session.receive(orjson.dumps(event), NOW)
        self.replies += map(orjson.loads, replies)
        self.tell(replies)

    def answer(self, answer: session_pb2.Delta) -> None:
        self.tell(self.session.responded(session_pb2.ConverseResponse(delta=answer), NOW))

    def tell(self, events: list[bytes]) -> None:
        self.told += map(orjson.loads, events)


def plain(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without what differs between edges."""
    return {key: value for key, value in event.items() if key not in ("replayed", "next_sample")}


@pytest.mark.parametrize("dialect", SETTINGS)
@given(data=st.data())
def test_restored_session_tells_what_the_first_one_would(dialect: str, data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(["listen", "speak", "end"]), min_size=2, max_size=9))
    deltas = [delta(number, kind) for number, kind in enumerate(kinds)]
    last = data.draw(st.integers(0, len(kinds) - 1), label="last unit of the first edge")
    in_halves = data.draw(st.booleans())
    behind = data.draw(st.integers(0, 2), label="units without an answer")
    first = Talk(dialect)
    note = b""
    for number in range(last + 1):
        note = first.send(number, in_halves=in_halves)
        if number >= behind:
            first.answer(deltas[number - behind])
    has = data.draw(st.integers(0, len(first.told)), label="events that the client has")
    former = first.told[has - 1] if has else {"unit": -1, "part": -1}

    read = EdgeNote.from_bytes(note)
    second = restored_session(read, Limits(), NOW)
    returned = Return("sess_0", first.secret, former["unit"], former["part"])
    begin = second.restore(read, returned, NOW)
    assert begin >= min(returned.unit, read.latest.unit)  # the worker sends no earlier deltas
    for answer in deltas[begin : last + 1]:
        second.render_again(answer, NOW)
    resumed, *missed = map(orjson.loads, second.resume(returned, NOW))
    assert resumed["next_sample"] == 16_000 * (last + 1)

    for answer in deltas[max(last + 1 - behind, 0) : last + 1]:
        first.answer(answer)
    # The client sends audio of incomplete units again, and gets a reply to that.
    wanted = [plain(event) for event in first.told[has:] if event not in first.replies]
    assert [plain(event) for event in missed] == wanted
    second.moves.queue.restore(last + 1)
    assert second.detachment
    assert first.session.detachment
    assert second.detachment.cursor == first.session.detachment.cursor
    assert second.dialect.state() == first.session.dialect.state()


def attached_to(first: Talk, *answers: session_pb2.Delta, **fields: Any) -> TakenSession:
    """Return the session of a worker that has given these answers."""
    attached = session_pb2.Attached(
        open=session_pb2.Open(),
        opened=session_pb2.Opened(model_digest="m", accepts_speech_requests=True),
        edge_note=first.session.note(NOW).to_bytes(),
        **fields,
    )
    return TakenSession(attached, deltas=list(answers), is_whole=True)


def adopted(
    first: Talk, taken: TakenSession, cursor: Mapping[str, int]
) -> tuple[DuplexSession, list[dict[str, Any]]]:
    """Go on at another edge; return the session, and what its client is told."""
    continuity = Continuity(JournalSpace(1_000_000, 1_000_000), RebuildPermits(1))
    note = EdgeNote.from_bytes(taken.attached.edge_note)
    second = restored_session(note, Limits(), NOW, continuity)
    returned = Return("sess_0", first.secret, cursor["unit"], cursor["part"])
    return second, [orjson.loads(event) for event in second.adopt(taken, note, returned, NOW)]


def test_client_that_has_replies_after_the_last_unit_returns_at_another_edge() -> None:
    first, answer = Talk("B"), delta(0, "listen")
    note = first.send(0)
    first.answer(answer)
    first.hear(append("B", 1, is_half=True))  # completes no unit
    assert [(one["unit"], one["part"]) for one in first.told[-2:]] == [(0, 0), (0, 1)]
    taken = attached_to(first, answer, received_sequence=0)
    taken.attached.edge_note = note  # the worker got no later one
    second, told = adopted(first, taken, first.told[-1])
    assert [(one["type"], one["unit"]) for one in told] == [("session.resumed", 0)]
    reply = append("B", 1, is_half=True)
    (event,) = map(orjson.loads, second.receive(orjson.dumps(reply), NOW))
    assert (event["unit"], event["part"]) == (0, 2)


def test_client_that_knows_of_a_failed_unit_returns_at_another_edge() -> None:
    first, answer = Talk("B"), delta(0, "listen")
    first.send(0)
    first.answer(answer)
    first.send(1)
    failed = session_pb2.Failed(sequence=1, reason="INVALID_FIELD", message="bad")
    first.tell(first.session.responded(session_pb2.ConverseResponse(failed=failed), NOW))
    taken = attached_to(first, answer, received_sequence=1)
    _, told = adopted(first, taken, first.told[-1])
    assert [(one["type"], one["unit"]) for one in told] == [("session.resumed", 1)]
    taken.attached.received_sequence = 0
    with pytest.raises(FabricError) as refusal:
        adopted(first, taken, first.told[-1])
    assert refusal.value.reason is Reason.COPY_STALE


def say(name: str) -> dict[str, Any]:
    return {"type": "speech.request", "text": "hello", "input_id": name}


def spoken(answer: session_pb2.Delta, *numbers: int) -> session_pb2.Delta:
    """Add the ends of texts to a delta."""
    for number in numbers:
        answer.speech_results.add(number=number, outcome=session_pb2.SPEECH_OUTCOME_SPOKEN)
    return answer


def done(events: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    return [
        (one["unit"], one["part"], one["input_id"])
        for one in events
        if one["type"] == "speech.done"
    ]


@pytest.mark.parametrize("dialect", SETTINGS)
def test_ends_of_requested_texts_are_told_at_another_edge(dialect: str) -> None:
    first = Talk(dialect)
    deltas, note = [spoken(delta(0, "speak"), 0), delta(1, "speak")], b""
    for number, answer in enumerate(deltas):
        first.hear(say(f"text {2 * number}"))
        first.hear(say(f"text {2 * number + 1}"))
        note = first.send(number)
        first.answer(answer)
    assert [(unit, name) for unit, _, name in done(first.told)] == [(0, "text 0")]
    taken = attached_to(first, *deltas, received_sequence=1)
    taken.attached.edge_note = note
    taken.stream = MagicMock(ConverseStream)
    second, told = adopted(first, taken, {"unit": -1, "part": -1})
    assert done(told) == done(first.told)
    second.receive(orjson.dumps(say("later")), NOW)
    second.receive(orjson.dumps(append(dialect, 2)), NOW)
    outgoing = second.take(NOW)
    assert outgoing
    assert [one.number for one in outgoing.request.unit.speech_requests] == [4]
    response = session_pb2.ConverseResponse(delta=spoken(delta(2, "speak"), 1, 2, 3, 4))
    ended = done([*map(orjson.loads, second.responded(response, NOW))])
    assert [name for _, _, name in ended] == ["text 1", "text 2", "text 3", "later"]


def test_text_of_a_unit_that_has_failed_is_forgotten_at_another_edge() -> None:
    first = Talk("B")
    first.hear(say("x"))
    taken = attached_to(first, received_sequence=0)
    taken.attached.edge_note = first.send(0)
    second, _ = adopted(first, taken, {"unit": -1, "part": -1})
    assert not second.moves.queue.speech.unfinished


def test_session_that_is_paused_stays_paused_at_another_edge() -> None:
    first = Talk("C")
    note = first.send(0)
    taken = attached_to(first, delta(0, "listen"), is_paused=True)
    taken.attached.edge_note = note
    second, _ = adopted(first, taken, {"unit": -1, "part": -1})
    (refused,) = map(orjson.loads, second.receive(orjson.dumps(append("C", 1)), NOW))
    assert "paused" in refused["error"]
    for wanted in ("pause", "resume"):  # the session gets another worker, which is paused, too
        outgoing = second.moves.queue.take()
        assert outgoing
        assert outgoing.request.WhichOneof("message") == wanted
        second.receive(b'{"type":"resume"}', NOW)


def adopted_without_past_units() -> DuplexSession:
    """Return a session of another edge that has its slot, before its past units have come."""
    first = Talk("B")
    note = first.send(0)
    taken = attached_to(first, delta(0, "listen"), received_sequence=0)
    taken.attached.edge_note = note
    taken.is_whole = False
    taken.stream = MagicMock(ConverseStream)
    second, told = adopted(first, taken, {"unit": -1, "part": -1})
    assert told[0]["type"] == "session.resumed"
    return second


def kept(*, is_last: bool) -> session_pb2.ConverseResponse:
    past = session_pb2.PastUnit(sequence=0, audio_int16=bytes(32_000), token_ids=[1])
    return session_pb2.ConverseResponse(
        kept=session_pb2.Kept(units=[] if is_last else [past], is_last=is_last)
    )


def leaves(reason: session_pb2.LeavingReason) -> session_pb2.ConverseResponse:
    return session_pb2.ConverseResponse(leaving=session_pb2.Leaving(reason=reason))


def test_session_of_another_edge_moves_only_when_all_its_past_units_have_come() -> None:
    session = adopted_without_past_units()
    moves = session.moves
    session.responded(leaves(session_pb2.LEAVING_REASON_STUCK_DEVICE), NOW)
    session.responded(leaves(session_pb2.LEAVING_REASON_DRAIN), NOW)
    for is_last in (False, True):
        assert moves.phase is MovePhase.SETTLED
        assert not moves.can_leave(MoveCause.WORKER_LOST, NOW)
        assert not moves.can_park
        session.responded(kept(is_last=is_last), NOW)
    assert moves.phase is MovePhase.ACQUIRING  # the worker drains
    assert moves.can_leave(MoveCause.WORKER_LOST, NOW)
    session.expire(NOW._replace(monotonic_s=NOW.monotonic_s + LATER_COPY_S))
    assert (moves.journal.is_whole, moves.journal.unit_count) == (True, 1)


def test_session_of_another_edge_goes_on_without_the_past_units_and_cannot_move() -> None:
    session = adopted_without_past_units()
    session.responded(kept(is_last=False), NOW)
    later = NOW._replace(monotonic_s=NOW.monotonic_s + LATER_COPY_S)
    session.expire(later)
    fixed = [one for one in session.effects if isinstance(one, RecordFixed)]
    assert [one.loss.reason for one in fixed] == [LossReason.NO_COPY]
    assert (session.closed, session.moves.phase) == (None, MovePhase.FIXED)
    session.responded(kept(is_last=True), later)
    assert session.moves.journal.byte_count == 0
    session.receive(orjson.dumps(append("B", 1)), later)
    outgoing = session.take(later)
    assert outgoing
    assert outgoing.request.unit.cannot_move


def test_session_of_another_edge_whose_client_is_away_is_parked_after_its_past_units() -> None:
    session = adopted_without_past_units()
    assert session.detach(NOW)
    late = NOW._replace(monotonic_s=NOW.monotonic_s + Limits().hold_s)
    session.expire(late)
    assert (session.closed, session.moves.phase) == (None, MovePhase.SETTLED)
    session.responded(kept(is_last=True), late)
    session.expire(late._replace(monotonic_s=late.monotonic_s + 1.0))
    assert (session.closed, session.moves.phase) == (None, MovePhase.PARKED)


@pytest.mark.parametrize(("journal_windows", "asked"), [(5, 5), (500, 64)])
def test_worker_is_asked_for_a_copy_with_as_many_windows_as_the_journal(
    journal_windows: int, asked: int
) -> None:
    continuity = Continuity(JournalSpace(1_000_000, 1_000_000), RebuildPermits(1))
    limits = Limits(journal_windows=journal_windows)
    endpoint = ENDPOINTS[Route.REALTIME, "audio"]
    session = endpoint.new_session(Identity("sess_0", "rt_0"), limits, NOW, continuity)
    assert isinstance(session, DuplexSession)
    session.granted(60.0, NOW)
    session.receive(orjson.dumps(SETTINGS["B"]), NOW)
    session.take(NOW)
    opened = session_pb2.Opened(model_digest="m", accepts_keep=True)
    session.responded(session_pb2.ConverseResponse(opened=opened), NOW)
    outgoing = session.take(NOW)
    assert outgoing
    assert outgoing.request.keep.window_count == asked


def long_note() -> EdgeNote:
    state = UnitState(
        1, Cursor(0, 1), ("resp_" + "f" * 12, 10**6, 10**6), Tag("i" * 200, "r" * 200)
    )
    identity = Identity("sess_0", "rt_0")
    return EdgeNote(identity, "B", "audio", bytes(32), state, units=[state] * 32)


def test_note_keeps_its_bound_and_can_be_read() -> None:
    note = long_note()
    packed = note.to_bytes()
    assert len(packed) <= MAX_NOTE_BYTES
    read = EdgeNote.from_bytes(packed)
    assert read.latest == replace(note.latest, dialect=list(note.latest.dialect), reply_ends=[])


@pytest.mark.parametrize("packed", [b"{}", b"[]", b"x", b'{"version":2}'])
def test_note_of_another_release_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"note|JSON|unexpected|literal|character"):
        EdgeNote.from_bytes(packed)


def test_note_of_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode"):
        restored_session(replace(long_note(), mode="chat"), Limits(), NOW)
    assert set(MODES) == {"audio", "video"}
    assert long_note().tag_of(7) is NO_TAG
