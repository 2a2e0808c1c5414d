"""Turns of the user in dialect E: `server_vad` tells them, and they end a response."""

from __future__ import annotations

from typing import Any

import orjson
import pybase64
import pytest
from support.protocols.transcripts import CODES, spoken

from duplane.edge.clock import Moment
from duplane.edge.dialects.e import DialectE
from duplane.edge.dialects.e_settings import SERVER_VAD, TurnDetection
from duplane.edge.dialects.e_turns import TurnDetector, TurnEdge
from duplane.edge.identity import Identity
from duplane.edge.modes import REALTIME_MODE
from duplane.edge.routing import ENDPOINTS, Route
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.settings import Limits
from duplane.edge.speech.spectral_scorer import SpectralScorer
from duplane.fabric.audio import resample_pcm
from duplane.fabric.v1 import session_pb2

NOW = Moment(1000.0, 1_714_200_000_000_000_000)
IDENTITY = Identity("sess_0123456789ab", "rt_0", model="m")
OPENED = session_pb2.ConverseResponse(opened=session_pb2.Opened())
VAD = TurnDetection(SERVER_VAD)
QUESTIONS_MS = 16_000
# Each question of the sample begins 300 ms after its turn.
BEGINS_MS = [1500, 5000, 9000, 13_000]
BEGIN, END = "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"


def sound(begin_ms: int, end_ms: int, rate_hertz: int = 24_000) -> bytes:
    return resample_pcm(spoken(str(begin_ms), str(end_ms)), 16_000, rate_hertz)


def edges(detector: TurnDetector, pcm: bytes, piece: int) -> list[TurnEdge]:
    pieces = (pcm[at : at + 4 * piece] for at in range(0, len(pcm), 4 * piece))
    return [edge for each in pieces for edge in detector.hear(each)]


@pytest.mark.parametrize(
    ("rate_hertz", "piece"), [(24_000, 2400), (24_000, 48_000), (24_000, 777), (8_000, 160)]
)
def test_turns_are_found_at_any_rate_in_any_pieces(rate_hertz: int, piece: int) -> None:
    detector = TurnDetector(VAD, rate_hertz, 7000, SpectralScorer)
    found = edges(detector, sound(0, QUESTIONS_MS, rate_hertz), piece)
    assert [edge.is_begin for edge in found] == [True, False] * len(BEGINS_MS)
    begins = [edge.at_ms - 7000 for edge in found if edge.is_begin]
    assert all(abs(a - b) < 300 for a, b in zip(begins, BEGINS_MS, strict=True)), begins
    assert not detector.is_in_turn


class Talk:
    """A session whose conversation is open, with `server_vad`."""

    def __init__(self, **detection: object) -> None:
        self.session = DuplexSession(DialectE(IDENTITY, Limits(), REALTIME_MODE), Limits(), NOW)
        self.session.granted(60.0, NOW)
        self.update(type="server_vad", **detection)
        self.append(bytes(4 * 24_000))
        self.session.expire(Moment(NOW.monotonic_s + DialectE.grace_s, NOW.wall_ns))
        assert self.session.take(NOW)
        self.session.responded(OPENED, NOW)
        assert self.units() == [False]

    def send(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        told = self.session.receive(orjson.dumps(event), NOW)
        return [orjson.loads(each) for each in told]

    def update(self, **detection: object) -> None:
        audio = {"input": {"turn_detection": detection}}
        self.send({"type": "session.update", "session": {"audio": audio}})

    def append(self, pcm: bytes) -> list[dict[str, Any]]:
        audio = pybase64.b64encode_as_string(CODES["int16"].encode(pcm))
        return self.send({"type": "input_audio_buffer.append", "audio": audio})

    def units(self) -> list[bool]:
        """Return which of the units that are complete must be listened to."""
        taken: list[bool] = []
        while outgoing := self.session.take(NOW):
            taken.append(outgoing.request.unit.force_listen)
        return taken

    def answered(self, sequence: int, text: str, *, is_end: bool = False) -> list[dict[str, Any]]:
        """Let the model speak in a unit, or listen if there is no text."""
        delta = session_pb2.Delta(sequence=sequence, end_of_turn=is_end)
        delta.listen.SetInParent()
        if text:
            delta.speech.text = text
        told = self.session.responded(session_pb2.ConverseResponse(delta=delta), NOW)
        return [orjson.loads(each) for each in told]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def test_speech_of_the_user_ends_a_response_and_the_model_must_listen() -> None:
    talk = Talk()
    assert talk.answered(0, "hello how")
    told = talk.append(sound(5200, 6200))
    assert kinds(told)[0] == BEGIN
    assert told[-1]["response"]["status_details"]["reason"] == "turn_detected"
    assert talk.units() == [True]
    assert talk.answered(1, "can i help") == []
    told = talk.append(sound(7200, 8200))
    assert kinds(told) == [
        END,
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
    ]
    assert talk.units() == [False]
    assert talk.answered(2, "") == []
    assert kinds(talk.answered(3, "two plus", is_end=True))[0] == "response.created"


def test_response_goes_on_if_the_client_does_not_want_it_to_be_interrupted() -> None:
    talk = Talk(interrupt_response=False)
    assert talk.answered(0, "hello how")
    assert kinds(talk.append(sound(5200, 6200))) == [BEGIN]
    assert talk.units() == [False]
    assert kinds(talk.answered(1, " can i help")) == ["response.output_audio_transcript.delta"]


def test_the_turn_of_the_user_ends_before_the_response() -> None:
    talk = Talk(silence_duration_ms=5000)
    assert kinds(talk.append(sound(5200, 6200))) == [BEGIN]
    told = kinds(talk.answered(0, "two plus three is five"))
    assert told[:2] == [END, "input_audio_buffer.committed"]
    assert told[4] == "response.created"


def test_another_detection_ends_the_turn() -> None:
    talk = Talk(silence_duration_ms=5000)
    assert kinds(talk.append(sound(5200, 6200))) == [BEGIN]
    talk.update(type="semantic_vad")
    assert kinds(talk.append(sound(5200, 6200)))[0] == END
    assert talk.append(sound(5200, 6200)) == []


def test_turns_are_found_by_the_scorer_that_the_operator_has_chosen() -> None:
    made: list[SpectralScorer] = []

    def new_scorer() -> SpectralScorer:
        made.append(SpectralScorer())
        return made[-1]

    endpoint = ENDPOINTS[Route.OPENAI_REALTIME, "audio"]
    session = endpoint.new_session(IDENTITY, Limits(), NOW, scorers=new_scorer)
    assert isinstance(session, ChatSession)
    audio = {"input": {"turn_detection": {"type": "server_vad"}}}
    session.receive(orjson.dumps({"type": "session.update", "session": {"audio": audio}}), NOW)
    piece = pybase64.b64encode_as_string(bytes(9600))
    session.receive(orjson.dumps({"type": "input_audio_buffer.append", "audio": piece}), NOW)
    assert session.successor
    assert len(made) == 1
