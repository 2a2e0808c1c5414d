"""Replaying recorded sessions through a live edge."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pybase64
import pytest
from support.edge.live_edge import (
    APPEND,
    AUDIO,
    CLOSE,
    UPDATE,
    LiveEdge,
    closed,
    live_edge,
    receive,
    send,
)
from support.protocols.transcripts import pcm
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection

from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import Meta, read_events, recordings, write_meta
from duplane.fabric.v1 import session_pb2
from duplane.tools.talk.replay import (
    Outcome,
    ReplayError,
    Script,
    compare_events,
    play,
    read_script,
    replay_recording,
    session_url,
)

INIT = {"type": "session.init", "payload": {"system_prompt": "x", "voice": {"ref_audio": AUDIO}}}
INT16 = pybase64.b64encode(bytes(range(256)) * 188)[:64_000].decode()  # a second at 24 kHz
FAULT = {"type": "input_audio_buffer.append"}
SESSIONS: dict[str, list[dict[str, Any]]] = {
    "A": [UPDATE, APPEND, FAULT, APPEND, APPEND, CLOSE],
    "B": [
        INIT,
        *({"type": "input.append", "input": {"audio": AUDIO, "input_id": "i"}} for _ in range(3)),
        {"type": "session.close", "reason": "enough"},
    ],
    "E": [
        {"type": "session.update", "session": {"type": "realtime"}},
        *({"type": "input_audio_buffer.append", "audio": INT16} for _ in range(3)),
    ],
    "L": [
        {"type": "session.start", "session": {"model": "m"}},
        *({"type": "session.input_audio.append", "audio": INT16} for _ in range(3)),
        {"type": "session.close"},
    ],
}
ANSWERS = {"A": [1, 1, 1, 1, 1, 1], "B": [1, 1, 3, 1, 1], "E": [2, 0, 12, 0], "L": [1, 2, 3, 2, 1]}
PATHS = {
    "A": "/v1/realtime?mode=audio",
    "B": "/v1/realtime?mode=audio",
    "E": "/openai/v1/realtime?model=m",
    "L": "/v1/live/sessions",
}


def speaks_second(samples: int = 24_000, text: str = "so") -> Any:
    """Return a worker's answer to a unit: speech for the second unit, `listen` for all others."""

    def answer(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
        delta = session_pb2.Delta(sequence=unit.sequence, context_token_count=1)
        if unit.sequence == 1:
            delta.speech.text, delta.speech.audio = text, pcm(samples)
            delta.end_of_turn = True
        else:
            delta.listen.SetInParent()
        return [session_pb2.ConverseResponse(delta=delta)]

    return answer


async def converse(client: ClientConnection, dialect: str) -> None:
    if dialect not in ("E", "L"):
        assert (await receive(client))["type"] == "session.queue_done"
    for event, answer_count in zip(SESSIONS[dialect], ANSWERS[dialect], strict=True):
        await send(client, event)
        for _ in range(answer_count):
            await receive(client)
    if dialect == "E":  # it has no event that ends a session
        await client.close()
    await closed(client, 1000)


async def record(root: Path, dialect: str) -> Path:
    async with live_edge(recording=RecordingSettings(root, Consent.ALWAYS)) as edge:
        edge.fabric.on_unit = speaks_second()
        async with edge.connect_to(PATHS[dialect]) as client:
            await converse(client, dialect)
    (directory,) = recordings(root)
    return directory


async def replay_again(edge: LiveEdge, script: Script, **changes: Any) -> Outcome:
    options = {"is_paced": False, "timeout_s": WITHIN_S, **changes}
    return await play(script, edge.edge.address, **options)


def differences(script: Script, outcome: Outcome) -> list[tuple[str, str]]:
    rows = compare_events(script.received, outcome.received)
    return [(was, came) for was, came, is_same in rows if not is_same]


@pytest.mark.parametrize("dialect", ["A", "B", "E", "L"])
async def test_the_same_model_says_the_same(tmp_path: Path, dialect: str) -> None:
    script = read_script(await record(tmp_path / "first", dialect))
    assert len(script.received) == sum(ANSWERS[dialect])
    async with live_edge(recording=RecordingSettings(tmp_path / "again", Consent.ALWAYS)) as edge:
        edge.fabric.on_unit = speaks_second()
        outcome = await replay_again(edge, script)
    assert not differences(script, outcome)
    assert not outcome.failure
    (again,) = recordings(tmp_path / "again")
    assert sent_events(again) == sent_events(script.directory)
    assert payloads(again) == payloads(script.directory)


ASK = {"messages": [{"role": "user", "content": [{"type": "audio", "data": AUDIO}]}]}


async def chat(client: ClientConnection, *said: tuple[object, str]) -> None:
    """Send each event and wait for an answer of the given type."""
    for event, answer in said:
        await send(client, event)
        while (await receive(client))["type"] != answer:
            pass


async def record_chat(root: Path, dialect: str) -> Path:
    async with live_edge(recording=RecordingSettings(root, Consent.ALWAYS)) as edge:
        if dialect == "D":
            async with edge.connect_to("/ws/chat") as client:
                await chat(client, (ASK, "done"))
                await closed(client, 1000)
        else:
            async with edge.connect("?mode=chat") as client:
                append = {"type": "input.append", "input": ASK}
                await chat(
                    client,
                    ({"type": "session.init", "payload": {}}, "session.created"),
                    (append, "response.done"),
                    (append, "response.done"),
                    (CLOSE, "session.closed"),
                )
                await closed(client, 1000)
    (directory,) = recordings(root)
    return directory


@pytest.mark.parametrize(("dialect", "event_count"), [("B", 8), ("D", 4)])
async def test_chats_are_replayed_too(tmp_path: Path, dialect: str, event_count: int) -> None:
    script = read_script(await record_chat(tmp_path / "first", dialect))
    assert len(script.received) == event_count
    async with live_edge(recording=RecordingSettings(tmp_path / "again", Consent.ALWAYS)) as edge:
        outcome = await replay_again(edge, script)
    assert not differences(script, outcome)
    assert not outcome.failure
    (again,) = recordings(tmp_path / "again")
    assert sent_events(again) == sent_events(script.directory)
    assert payloads(again) == payloads(script.directory)


async def test_one_request_over_http_is_not_replayed(tmp_path: Path) -> None:
    async with (
        live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge,
        edge.asked() as http,
    ):
        assert (await http.ask("POST", "/api/chat", json=ASK))[0] == 200
    (directory,) = recordings(tmp_path)
    with pytest.raises(ReplayError, match="send it to /api/chat again"):
        read_script(directory)


def sent_events(directory: Path) -> list[Any]:
    return [event["frame"] for event in read_events(directory) if event["dir"] == "up"]


def payloads(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "blob").iterdir()}


async def test_the_pace_of_the_recording_can_be_kept(tmp_path: Path) -> None:
    script = read_script(await record(tmp_path, "A"))
    slow = [replace(each, at_s=5.0 + number * 0.1) for number, each in enumerate(script.sent)]
    script = replace(script, sent=slow)
    begin = time.monotonic()
    async with live_edge() as edge:
        edge.fabric.on_unit = speaks_second()
        outcome = await replay_again(edge, script, is_paced=True)
    assert time.monotonic() - begin >= 0.5
    assert sorted(map(str, outcome.received)) == sorted(map(str, script.received))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (speaks_second(text="no"), "response.output_audio.delta 1.000 s 'no' end of turn"),
        (speaks_second(samples=12_000), "response.output_audio.delta 0.500 s 'so' end of turn"),
    ],
    ids=["text", "length"],
)
async def test_answers_of_another_model_differ(tmp_path: Path, model: Any, expected: str) -> None:
    script = read_script(await record(tmp_path, "A"))
    async with live_edge() as edge:
        edge.fabric.on_unit = model
        outcome = await replay_again(edge, script)
    was = "response.output_audio.delta 1.000 s 'so' end of turn"
    assert differences(script, outcome) == [(was, expected)]


@pytest.mark.timing
async def test_server_that_answers_less_differs(tmp_path: Path) -> None:
    script = read_script(await record(tmp_path, "B"))
    async with live_edge() as edge:
        outcome = await replay_again(edge, script, timeout_s=0.2)
    assert outcome.failure.startswith("no further answer")
    assert ("session.closed enough", "-") in differences(script, outcome)


async def test_the_command_tells_by_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = await record(tmp_path, "A")
    async with live_edge() as edge:
        edge.fabric.on_unit = speaks_second()
        address = edge.edge.address
        assert await asyncio.to_thread(replay_recording, directory, address, is_paced=False) == 0
        assert "6 events, 0 differ" in capsys.readouterr().out
        edge.fabric.on_unit = speaks_second(text="else")
        assert await asyncio.to_thread(replay_recording, directory, address, is_paced=False) == 1
    out = capsys.readouterr().out
    assert "6 events, 1 differ" in out
    assert "DIFFERS" in out


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="is not a recording"):
        read_script(tmp_path)
    write_meta(tmp_path, Meta("s", "/v1/realtime", "audio", 0.0))
    with pytest.raises(ReplayError, match="cannot be read"):
        read_script(tmp_path)
    (tmp_path / "stream.jsonl").touch()
    with pytest.raises(ReplayError, match="sent nothing"):
        read_script(tmp_path)


def test_a_session_is_replayed_at_the_path_it_was_held() -> None:
    meta = Meta("s", "/ws/duplex/adx_1", "video", 0.0)
    assert session_url("h:1", meta) == "ws://h:1/ws/duplex/adx_1?mode=video"
    realtime = Meta("s", "/v1/realtime", "audio", 0.0, dialect="E")
    assert session_url("h:1", realtime) == "ws://h:1/openai/v1/realtime?mode=audio"
    assert session_url("wss://h/v1/realtime?mode=audio", meta) == "wss://h/v1/realtime?mode=audio"
