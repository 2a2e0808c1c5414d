"""Dialect E: every event that it sends is one of OpenAI's, and appends may have any length."""

from __future__ import annotations

import orjson
import pybase64
import pytest
from support.client_packages import checked_kinds, needs_python_clients
from support.protocols.specifications import corpus
from support.protocols.transcripts import CODES, pcm

from duplane.edge.clock import Moment
from duplane.edge.close import SESSION_OVER, Close, CloseReason
from duplane.edge.dialects.e import DialectE
from duplane.edge.identity import Identity
from duplane.edge.modes import REALTIME_MODE
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

NOW = Moment(1000.0, 1_714_200_000_000_000_000)
OPENED = session_pb2.ConverseResponse(opened=session_pb2.Opened())
AUDIO = "response.output_audio.delta"
SOUND = CODES["int16"].encode(pcm(48_000))  # two seconds


def dialect() -> DialectE:
    return DialectE(Identity("sess_0123456789ab", "rt_0", model="m"), Limits(), REALTIME_MODE)


def append(sound: bytes) -> bytes:
    audio = pybase64.b64encode_as_string(sound)
    return orjson.dumps({"type": "input_audio_buffer.append", "audio": audio})


def units(pieces: list[bytes]) -> list[bytes]:
    """Return the audio of the units of a session whose client sends these pieces."""
    session = DuplexSession(dialect(), Limits(), NOW)
    session.granted(60.0, NOW)
    assert not [event for piece in pieces for event in session.receive(append(piece), NOW)]
    session.expire(Moment(NOW.monotonic_s + DialectE.grace_s, NOW.wall_ns))
    assert session.take(NOW)
    session.responded(OPENED, NOW)
    taken: list[bytes] = []
    while outgoing := session.take(NOW):
        taken.append(outgoing.request.unit.audio)
    return taken


@pytest.mark.slow
@needs_python_clients
async def test_every_event_is_one_of_openai() -> None:
    moves = [move for replay in corpus("E").replays for move in replay.moves]
    events = [orjson.dumps(event) for move in moves for event in move.told]
    kinds = await checked_kinds("realtime", events)
    assert set(kinds["server"]) == set(DialectE.server_events)
    assert {name for _, name in DialectE.transitions} == set(kinds["client"])


@pytest.mark.parametrize("length", [1, 3, 4801, 47_999])
def test_pieces_of_any_length_make_the_same_units(length: int) -> None:
    pieces = [SOUND[at : at + length] for at in range(0, len(SOUND), length)]
    if length == 1:  # the first samples byte by byte, with empty appends between them
        pieces = [*(piece for byte in SOUND[:99] for piece in (bytes([byte]), b"")), SOUND[99:]]
    cut, whole = units(pieces), units([SOUND[:48_000], SOUND[48_000:]])
    assert [len(unit) for unit in cut] == [len(unit) for unit in whole] == [64_000, 64_000]
    one, other = (pcm_of(taken) for taken in (cut, whole))
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-3


def pcm_of(taken: list[bytes]) -> list[float]:
    return list(memoryview(b"".join(taken)).cast("f"))


@pytest.mark.parametrize(
    ("close", "code"),
    [
        (SESSION_OVER, 1001),
        (Close(CloseReason.TIMEOUT, "no audio for too long"), 1000),
        (Close(CloseReason.SHUTDOWN), 1001),
        (Close(CloseReason.FAILED), 1011),
        (Close(CloseReason.WORKER_BUSY), 1013),
        (Close(CloseReason.UNREADABLE), 1003),
    ],
)
def test_a_client_is_told_by_the_close_code_whether_to_connect_again(
    close: Close, code: int
) -> None:
    assert dialect().close_code(close) == code


def test_ids_of_two_sessions_differ() -> None:
    first, second = (
        orjson.loads(session.receive(b'{"type":"input_audio_buffer.commit"}', NOW)[0])["item_id"]
        for session in (
            DuplexSession(DialectE(Identity(name, "rt_0"), Limits(), REALTIME_MODE), Limits(), NOW)
            for name in ("sess_0123456789ab", "sess_ba9876543210")
        )
    )
    assert first != second


def session_that_speaks() -> DuplexSession:
    """Return a session whose first unit was answered with speech."""
    session = DuplexSession(dialect(), Limits(), NOW)
    session.granted(60.0, NOW)
    session.receive(append(SOUND), NOW)
    session.expire(Moment(NOW.monotonic_s + DialectE.grace_s, NOW.wall_ns))
    assert session.take(NOW)
    session.responded(OPENED, NOW)
    session.receive(append(SOUND), NOW)
    assert kinds(session.responded(speech(take_unit(session)), NOW))[-1] == AUDIO
    return session


def take_unit(session: DuplexSession) -> session_pb2.Unit:
    outgoing = session.take(NOW)
    assert outgoing
    return outgoing.request.unit


def speech(unit: session_pb2.Unit) -> session_pb2.ConverseResponse:
    spoken = session_pb2.Speech(text="hi", audio=bytes(4 * 24_000))
    delta = session_pb2.Delta(sequence=unit.sequence, speech=spoken)
    return session_pb2.ConverseResponse(delta=delta)


def kinds(events: list[bytes]) -> list[str]:
    return [orjson.loads(event)["type"] for event in events]


def test_a_unit_that_fails_after_a_cancel_does_not_bring_the_rest_of_the_response() -> None:
    session = session_that_speaks()
    before, failing, after = (take_unit(session) for _ in range(3))
    events = session.receive(b'{"type":"response.cancel"}', NOW)
    assert kinds(events)[-1] == "response.done"
    session.receive(append(SOUND), NOW)
    first = take_unit(session)
    assert first.force_listen
    failed = session_pb2.Failed(sequence=failing.sequence, reason="NOT_FINITE")
    for response in (
        speech(before),
        session_pb2.ConverseResponse(failed=failed),
        speech(after),
        speech(first),
    ):
        assert session.responded(response, NOW) == []
    session.receive(append(SOUND), NOW)
    while (unit := take_unit(session)) and not unit.force_listen:
        assert session.responded(speech(unit), NOW) == []
    listened = session_pb2.Delta(sequence=unit.sequence)
    session.responded(session_pb2.ConverseResponse(delta=listened), NOW)
    session.receive(append(SOUND), NOW)
    assert kinds(session.responded(speech(take_unit(session)), NOW))[0] == "response.created"


def test_a_worker_of_the_former_release_tells_of_an_interruption_in_the_state() -> None:
    session = session_that_speaks()
    delta = session_pb2.Delta(sequence=take_unit(session).sequence, end_of_turn=True)
    delta.state_change.interrupted_turn = True
    events = session.responded(session_pb2.ConverseResponse(delta=delta), NOW)
    assert orjson.loads(events[-1])["response"]["status_details"]["reason"] == "turn_detected"
