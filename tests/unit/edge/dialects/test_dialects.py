"""Dialects accept the events that their transition tables allow, and refuse all others."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
from support.protocols.transcripts import pcm

from duplane.edge.client_errors import ClientError, ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.dialects import a, b_events, c
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.actions import NO_TAG, NOTHING_DROPPED, Configure
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.dialect import Dialect, Phase, with_audio
from duplane.edge.dialects.duplex import DuplexDialect
from duplane.edge.dialects.first_event import detect
from duplane.edge.identity import Identity
from duplane.edge.modes import MODES
from duplane.edge.payload.fields import parse
from duplane.edge.settings import Limits
from duplane.fabric.audio import resample_pcm
from duplane.fabric.model import ModelFormat
from duplane.fabric.v1 import session_pb2

NOW = Moment(0.0, 0)
IDENTITY = Identity("sess_0", "rt_0")
AUDIO = pybase64.b64encode(pcm(16_000)).decode()
EVENTS: dict[str, dict[str, Any]] = {
    a.UPDATE: {"session": {"instructions": "x"}},
    a.APPEND: {"audio": AUDIO},
    b_events.INIT: {"payload": {}},
    b_events.APPEND: {"input": {"audio": AUDIO}},
    a.CLOSE: {"reason": "x"},
    c.PREPARE: {},
    c.CHUNK: {"audio_base64": AUDIO},
    **{kind: {} for kind in (c.PAUSE, c.RESUME, c.INTERRUPT, c.STOP, c.DIAGNOSTIC)},
    "unheard.of": {},
}


def dialect_in(kind: type[Dialect], phase: Phase) -> Dialect:
    dialect = kind(IDENTITY, Limits(), MODES["audio"])
    dialect.phase = phase
    return dialect


def event(kind: str) -> bytes:
    return orjson.dumps({"type": kind, **EVENTS[kind]})


@pytest.mark.parametrize("dialect", [DialectA, DialectB, DialectC])
@pytest.mark.parametrize(("phase", "kind"), [*itertools.product(Phase, EVENTS)])
def test_an_event_is_taken_if_the_table_has_it_and_refused_unchanged_if_not(
    dialect: type[Dialect], phase: Phase, kind: str
) -> None:
    client = dialect_in(dialect, phase)
    after = dialect.transitions.get((phase, kind))
    if after is not None:
        action = client.decode(parse(event(kind)))
        assert client.phase is phase
        client.accept(action)
        assert client.phase is after
        return
    with pytest.raises(ClientError) as refusal:
        client.decode(parse(event(kind)))
    assert client.phase is phase
    if dialect is DialectC:
        return  # dialect C has no error codes
    is_early = phase is Phase.START and kind in {known for _, known in dialect.transitions}
    assert refusal.value.code is (ErrorCode.NOT_READY if is_early else ErrorCode.UNKNOWN_EVENT)


@pytest.mark.parametrize(
    ("dialect", "kind"),
    [(DialectA, a.APPEND), (DialectB, b_events.APPEND), (DialectC, c.CHUNK)],
)
def test_no_append_changes_the_phase(dialect: type[Dialect], kind: str) -> None:
    phases = {
        before: after for (before, known), after in dialect.transitions.items() if known == kind
    }
    assert phases == {Phase.OPENING: Phase.OPENING, Phase.ACTIVE: Phase.ACTIVE}


def rendered(dialect: DuplexDialect, *, is_end: bool, count: int = 960) -> bytes:
    """Return the audio of a unit of speech as the client gets it."""
    speech = session_pb2.Speech(text="x", audio=pcm(count))
    delta = session_pb2.Delta(speech=speech, end_of_turn=is_end)
    events = map(orjson.loads, dialect.delta(delta, NO_TAG, NOTHING_DROPPED, NOW))
    audio = (event.get("audio") or event.get("audio_data") or "" for event in events)
    return b"".join(map(pybase64.b64decode, audio))


@pytest.mark.parametrize("kind", [DialectA, DialectB, DialectC])
def test_speech_at_another_rate_is_resampled_as_one_stream_for_each_turn(
    kind: type[DuplexDialect],
) -> None:
    dialect = kind(IDENTITY, Limits(), MODES["audio"])
    dialect.phase = Phase.ACTIVE
    dialect.use_model(ModelFormat(unit_ns=80_000_000, output_rate_hertz=12_000))
    turn = b"".join(rendered(dialect, is_end=number == 4) for number in range(5))
    whole = resample_pcm(pcm(960) * 5, 12_000, 24_000)
    assert len(turn) == len(whole) == 4 * 5 * 1920
    assert np.frombuffer(turn, "<f4") == pytest.approx(np.frombuffer(whole, "<f4"), abs=1e-5)
    first = rendered(dialect, is_end=False)
    listen = session_pb2.Delta(listen=session_pb2.Listen())
    dialect.delta(listen, NO_TAG, NOTHING_DROPPED, NOW)
    assert len(first + rendered(dialect, is_end=True)) == 4 * 2 * 1920
    rendered(dialect, is_end=False)
    listen.end_of_turn = True  # the client has interrupted the model
    dialect.delta(listen, NO_TAG, NOTHING_DROPPED, NOW)
    assert len(rendered(dialect, is_end=True)) == 4 * 1920


@pytest.mark.parametrize("kind", [DialectA, DialectB, DialectC])
def test_speech_at_the_rate_of_the_dialect_is_not_changed(kind: type[DuplexDialect]) -> None:
    dialect = kind(IDENTITY, Limits(), MODES["audio"])
    dialect.phase = Phase.ACTIVE
    dialect.use_model(ModelFormat(unit_ns=80_000_000))
    assert rendered(dialect, is_end=False) == pcm(960)


@pytest.mark.parametrize(
    ("kind", "dialect"),
    [
        (a.UPDATE, DialectA),
        (b_events.INIT, DialectB),
        (b_events.APPEND, DialectB),
        (a.APPEND, None),
        (a.CLOSE, None),
        ("unheard.of", None),
        (None, None),
        (["session.update"], None),
    ],
)
def test_first_event_decides_the_dialect(kind: object, dialect: type[Dialect] | None) -> None:
    assert detect(kind) is dialect


def test_the_last_of_duplicate_keys_counts() -> None:
    client = dialect_in(DialectA, Phase.START)
    message = b'{"type":"x","type":"session.update","session":{"instructions":"x"}}'
    assert isinstance(client.decode(parse(message)), Configure)


def test_every_turn_has_an_id_of_its_own() -> None:
    drawn = iter(("000000000001", "000000000002"))
    client = DialectB(IDENTITY, Limits(), MODES["audio"], new_id=lambda: next(drawn))
    ids: list[str] = []
    for is_last in (False, True, False, True):
        delta = session_pb2.Delta(speech=session_pb2.Speech(text="x"), end_of_turn=is_last)
        events = client.delta(delta, NO_TAG, NOTHING_DROPPED, NOW)
        ids += [orjson.loads(told)["response_id"] for told in events]
    assert ids == ["resp_000000000001"] * 3 + ["resp_000000000002"] * 3


@pytest.mark.parametrize("sample_count", [0, 1, 24_000])
def test_audio_is_rendered_as_any_json_library_would(sample_count: int) -> None:
    audio = pcm(sample_count)
    rendered = with_audio({"type": "x", "text": 'a "quoted" \\ text'}, audio)
    assert orjson.loads(rendered) == {
        "type": "x",
        "text": 'a "quoted" \\ text',
        "audio": pybase64.b64encode(audio).decode(),
    }
