"""A session of a model whose units are not one second, or whose sound has other rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest

from duplane.edge.clock import Moment
from duplane.edge.identity import Identity
from duplane.edge.routing import ENDPOINTS, Route
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.settings import Limits
from duplane.fabric.audio import resample_pcm
from duplane.fabric.model import DEFAULT_FORMAT, ModelFormat
from duplane.fabric.v1 import session_pb2

NOW = Moment(36_077.123, 1_714_200_000_000_000_000)
SHORT = ModelFormat(unit_ns=80_000_000)
SHORT_24K = ModelFormat(unit_ns=80_000_000, input_rate_hertz=24_000, output_rate_hertz=12_000)
OPENED = session_pb2.ConverseResponse(opened=session_pb2.Opened(prompt_token_count=7))
LIMITS = Limits(early_unit_count=2, pending_unit_count=3)
OPENINGS = {
    "A": {"type": "session.update", "session": {"instructions": "x"}},
    "B": {"type": "session.init", "payload": {}},
    "C": {"type": "prepare"},
}
ROUTES = {"A": Route.REALTIME, "B": Route.REALTIME, "C": Route.DUPLEX}
DIALECTS = pytest.mark.parametrize("dialect", ["A", "B", "C"])


def tone(count: int) -> bytes:
    return (0.1 * np.sin(np.arange(count) * 0.05)).astype("<f4").tobytes()


class Client:
    """A client of one dialect, its session, and a worker that answers when the test says so."""

    def __init__(
        self, dialect: str, limits: Limits = LIMITS, opening: Mapping[str, str] | None = None
    ) -> None:
        self.dialect = dialect
        endpoint = ENDPOINTS[ROUTES[dialect], "audio"]
        session = endpoint.new_session(Identity("s", "rt_0"), limits, NOW)
        assert isinstance(session, DuplexSession)
        self.session = session
        self.events: list[dict[str, Any]] = []
        self.units: list[session_pb2.Unit] = []
        self.opening = session_pb2.Open()
        self.accepts = True  # the worker accepts units
        self.say({**OPENINGS[dialect], **(opening or {})})

    def say(self, event: dict[str, Any]) -> None:
        self.hear(self.session.receive(orjson.dumps(event), NOW))

    def hear(self, events: list[bytes]) -> None:
        self.events += map(orjson.loads, events)

    def append(self, sample_count: int, **fields: Any) -> None:
        """Send this much sound at 16 kHz."""
        audio = pybase64.b64encode(tone(sample_count)).decode()
        match self.dialect:
            case "A":
                self.say({"type": "input_audio_buffer.append", "audio": audio, **fields})
            case "B":
                self.say({"type": "input.append", "input": {"audio": audio, **fields}})
            case _:
                self.say({"type": "audio_chunk", "audio_base64": audio, **fields})
        self.take()

    def grant(self, model: ModelFormat) -> None:
        self.hear(self.session.granted(60.0, NOW, model))
        self.take()

    def open(self) -> None:
        self.hear(self.session.responded(OPENED, NOW))
        self.take()
        self.events.clear()

    def take(self) -> None:
        """Take what the worker gets, unless it accepts nothing."""
        while self.accepts and (outgoing := self.session.take(NOW)):
            if outgoing.request.HasField("open"):
                self.opening = outgoing.request.open
            else:
                self.units.append(outgoing.request.unit)

    def answer(self, *sequences: int, sample_count: int = 1920, **fields: Any) -> None:
        """Speak in units, with this many samples in each; listen if there are none."""
        for sequence in sequences:
            delta = session_pb2.Delta(sequence=sequence, context_token_count=10 + sequence)
            delta.listen.SetInParent()
            if sample_count:
                delta.speech.text = f"{sequence} "
                delta.speech.audio = tone(sample_count)
                delta.speech.sample_count = sample_count
            delta.MergeFrom(session_pb2.Delta(**fields))
            self.hear(self.session.responded(session_pb2.ConverseResponse(delta=delta), NOW))

    def heard(self) -> bytes:
        """Return the speech that the client has got."""
        audio = (event.get("audio") or event.get("audio_data") or "" for event in self.events)
        return b"".join(map(pybase64.b64decode, audio))


@DIALECTS
def test_unit_has_the_duration_of_the_model(dialect: str) -> None:
    client = Client(dialect)
    client.grant(SHORT)
    client.open()
    client.append(1_280)
    client.append(2_000)
    client.append(560)
    assert [len(unit.audio) for unit in client.units] == [4 * 1_280] * 3
    assert b"".join(unit.audio for unit in client.units) == tone(1_280) + tone(2_000) + tone(560)


@DIALECTS
def test_unit_has_the_rate_of_the_model(dialect: str) -> None:
    client = Client(dialect)
    client.grant(SHORT_24K)
    client.open()
    for _ in range(25):
        client.append(1_280)
    assert [len(unit.audio) for unit in client.units] == [4 * 1_920] * 25
    got = np.frombuffer(b"".join(unit.audio for unit in client.units), "<f4")
    expected = np.frombuffer(resample_pcm(tone(1_280) * 25, 16_000, 24_000), "<f4")
    late = 150  # 6.25 ms
    assert got[late:] == pytest.approx(expected[:-late], abs=1e-5)


@DIALECTS
def test_speech_has_the_rate_of_the_dialect(dialect: str) -> None:
    client = Client(dialect)
    client.grant(SHORT_24K)
    client.open()
    for _ in range(5):
        client.append(1_280)
    client.answer(0, 1, 2, 3, sample_count=960)
    client.answer(4, sample_count=960, end_of_turn=True)
    expected = np.frombuffer(resample_pcm(tone(960) * 5, 12_000, 24_000), "<f4")
    assert np.frombuffer(client.heard(), "<f4") == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dialect", ["A", "B"])
def test_each_unit_has_a_reply_of_its_own(dialect: str) -> None:
    client = Client(dialect)
    client.grant(SHORT)
    client.open()
    client.append(4 * 1_280)
    client.answer(0, 1, sample_count=0)
    client.answer(2, 3)
    kinds = [event.get("kind", event["type"]) for event in client.events]
    if dialect == "A":
        assert kinds == ["response.listen"] * 2 + ["response.output_audio.delta"] * 2
    else:
        assert kinds == ["listen", "listen", "text", "audio", "text", "audio"]


def test_result_of_c_joins_the_units_of_its_chunk() -> None:
    client = Client("C")
    client.grant(SHORT)
    client.open()
    client.append(4 * 1_280)
    client.append(1_280)
    client.append(640)  # completes no unit
    client.answer(0, sample_count=0)
    client.answer(1, 2)
    assert client.events == []
    client.answer(3, sample_count=0, end_of_turn=True)
    client.answer(4, sample_count=0)
    listens = [event["is_listen"] for event in client.events]
    assert listens == [False, True, True]
    joined = client.events[0]
    assert (joined["text"], joined["end_of_turn"]) == ("1 2 ", True)
    assert joined["kv_cache_length"] == 13
    assert client.heard() == tone(1_920) * 2


@DIALECTS
def test_sound_before_the_grant_is_cut_again(dialect: str) -> None:
    client = Client(dialect)
    for _ in range(15):
        client.append(1_600)
    assert client.units == []
    client.grant(SHORT)
    client.open()
    assert [len(unit.audio) for unit in client.units] == [4 * 1_280] * 18
    client.append(320)
    assert b"".join(unit.audio for unit in client.units) == tone(1_600) * 15 + tone(320)


@DIALECTS
def test_of_the_sound_before_the_grant_the_newest_seconds_are_kept(dialect: str) -> None:
    client = Client(dialect)
    for _ in range(5):
        client.append(16_000)
    client.append(1_280)
    client.grant(SHORT)
    client.open()
    kept = b"".join(unit.audio for unit in client.units)
    assert len(kept) == 4 * 32_000  # two seconds
    assert kept == (tone(16_000) * 2 + tone(1_280))[-len(kept) :]
    client.answer(0)
    event = client.events[0]
    # Three seconds, rounded up to whole units, and one unit that came with the newest sound.
    dropped_count = 38 + 1
    assert event.get("metrics", event)["dropped_units"] == dropped_count


def test_early_chunks_of_c_are_answered_once_each() -> None:
    client = Client("C", Limits())
    for _ in range(25):
        client.append(1_600)
    client.grant(SHORT)
    client.hear(client.session.responded(OPENED, NOW))
    client.take()
    assert len(client.units) == 31
    client.answer(*range(31), sample_count=240)
    results = [event for event in client.events if event["type"] == "result"]
    assert len(results) == 25
    # The chunk that ends a second, and the last chunk, have the output of the units before.
    assert [len(event["text"].split()) for event in results if event["text"]] == [12, 19]
    assert client.events[-1]["kv_cache_length"] == 40


@DIALECTS
def test_bounds_are_in_seconds_of_sound(dialect: str) -> None:
    client = Client(dialect)
    client.grant(SHORT)
    client.open()
    client.accepts = False
    for _ in range(100):
        client.append(1_280)
    client.accepts = True
    client.take()
    assert len(client.units) == SHORT.unit_count(LIMITS.pending_unit_count) == 38


@DIALECTS
def test_force_listen_of_dropped_sound_holds_for_the_next_unit(dialect: str) -> None:
    client = Client(dialect)
    client.append(16_000, force_listen=True)
    client.append(32_000)
    client.append(1_280)
    client.grant(SHORT)
    client.open()
    assert [unit.force_listen for unit in client.units[:3]] == [True, False, False]


@DIALECTS
def test_scheduler_of_an_older_release_grants_without_a_model(dialect: str) -> None:
    client = Client(dialect)
    client.append(40_000)
    client.grant(DEFAULT_FORMAT)
    client.open()
    client.append(8_000)
    assert b"".join(unit.audio for unit in client.units) == tone(40_000) + tone(8_000)
    assert [len(unit.audio) for unit in client.units] == [4 * 16_000] * 3


def test_voice_has_the_rate_of_the_model() -> None:
    client = Client("C", opening={"tts_ref_audio_base64": pybase64.b64encode(tone(8_000)).decode()})
    client.grant(SHORT_24K)
    assert client.opening.tts_voice == resample_pcm(tone(8_000), 16_000, 24_000)
    assert client.opening.llm_voice == b""
