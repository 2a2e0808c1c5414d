"""The chat session without sockets: timeouts, transport failures, draining, excess turns."""

from __future__ import annotations

import grpc
import grpc.aio
import orjson
import pybase64
import pytest

from duplane.edge.clock import Moment
from duplane.edge.close import CloseReason
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.d import DialectD
from duplane.edge.identity import Identity
from duplane.edge.modes import CHAT_MODE
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.settings import Limits
from duplane.fabric.errors import FabricError, Reason, from_rpc
from duplane.fabric.model import ModelFormat
from duplane.fabric.v1 import session_pb2

START = Moment(36_077.123, 1_714_200_000_000_000_000)
ASK = {"messages": [{"role": "user", "content": "x"}]}
PIECE = session_pb2.ChatResponse(delta=session_pb2.ChatDelta(text="x"))
DONE = session_pb2.ChatResponse(done=session_pb2.Done())


def after(seconds: float) -> Moment:
    return Moment(START.monotonic_s + seconds, START.wall_ns)


@pytest.fixture
def running() -> ChatSession:
    """A chat of dialect B whose first turn is running."""
    session = ChatSession(DialectBChat(Identity("s", "r"), Limits(), CHAT_MODE), Limits(), START)
    ask(session)
    session.granted(3.0, START)
    assert session.next_turn(START)
    return session


def base64(sample_count: int) -> str:
    return pybase64.b64encode(bytes(4 * sample_count)).decode()


def ask(session: ChatSession) -> list[dict[str, object]]:
    event = {"type": "input.append", "input": {**ASK, "input_id": "i"}}
    return [orjson.loads(told) for told in session.receive(orjson.dumps(event), START)]


def test_each_piece_renews_the_wait_for_the_next(running: ChatSession) -> None:
    for at in (100.0, 200.0, 300.0):
        assert running.expire(after(at)) == []
        assert running.responded(PIECE, after(at))
    assert running.closed is None
    assert running.time_limits.next_deadline == after(300.0 + Limits().turn_s).monotonic_s


@pytest.mark.parametrize("claim_s", [3.0, 0.0])
def test_slot_that_no_turn_uses_in_time_is_released(claim_s: float) -> None:
    session = ChatSession(DialectBChat(Identity("s", "r"), Limits(), CHAT_MODE), Limits(), START)
    session.granted(claim_s, START)
    assert session.has_slot
    assert session.expire(after(claim_s)) == []
    assert not session.has_slot
    assert session.closed is None


@pytest.mark.parametrize("dialect", [DialectBChat, DialectD])
def test_what_the_transport_says_is_told_to_no_client(
    dialect: type[DialectBChat | DialectD],
) -> None:
    session = ChatSession(dialect(Identity("s", "r"), Limits(), CHAT_MODE), Limits(), START)
    asked = ASK if dialect is DialectD else {"type": "input.append", "input": ASK}
    session.receive(orjson.dumps(asked), START)
    session.granted(3.0, START)
    assert session.next_turn(START)
    failure = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details="CLIENT: Sent message larger than max",
    )
    (told,) = session.failed(from_rpc(failure), START)
    assert b"the worker was lost" in told
    assert b"larger" not in told
    assert session.closed is None or session.closed.message == "the worker was lost"


def test_the_turn_that_runs_when_the_edge_drains_is_the_last(running: ChatSession) -> None:
    assert ask(running) == []  # waits for the end of the running turn
    assert running.drain(START) == []
    (refused,) = ask(running)
    assert refused["input_id"] == "i"
    assert refused["error"] == {
        "code": "not_ready",
        "message": "the server is shutting down",
        "type": "client_error",
    }
    assert running.responded(PIECE, START)
    told = [orjson.loads(event)["type"] for event in running.responded(DONE, START)]
    assert told == ["response.done", "session.closed"]
    assert running.closed
    assert running.closed.reason is CloseReason.SHUTDOWN


def test_turn_is_converted_to_the_rates_of_its_model() -> None:
    session = ChatSession(DialectD(Identity("s", "r"), Limits(), CHAT_MODE), Limits(), START)
    sound = {"type": "audio", "data": base64(16_000)}
    asked = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, sound]}],
        "tts": {"ref_audio_data": base64(8_000)},
    }
    session.receive(orjson.dumps(asked), START)
    for rate_hertz, part_count in ((24_000, 24_000), (16_000, 16_000)):  # the first slot is lost
        model = ModelFormat(input_rate_hertz=rate_hertz, output_rate_hertz=8_000)
        session.granted(3.0, START, model)
        turn = session.next_turn(START)
        assert turn
        turn = session.convert(turn)
        assert turn
        assert turn.messages[0].parts[0].text == "x"
        assert len(turn.messages[0].parts[1].audio) == 4 * part_count
        assert len(turn.config.tts_voice) == 4 * part_count // 2
        if rate_hertz == 24_000:
            session.failed(FabricError(Reason.UNAVAILABLE, "gone"), START)
    piece = session_pb2.ChatDelta(text="x", audio=bytes(4 * 8_000))
    events = [
        *session.responded(session_pb2.ChatResponse(delta=piece), START),
        *session.responded(session_pb2.ChatResponse(delta=piece), START),
        *session.responded(DONE, START),
    ]
    audio = [orjson.loads(event)["audio_data"] for event in events]
    assert len(b"".join(pybase64.b64decode(part or "") for part in audio)) == 4 * 2 * 24_000
    assert len(audio) == 4


def test_a_turn_too_many_is_refused_by_its_name(running: ChatSession) -> None:
    for _ in range(Limits().pending_turn_count):
        assert ask(running) == []
    (refused,) = ask(running)
    assert (refused["type"], refused["input_id"]) == ("error", "i")
