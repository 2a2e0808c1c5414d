"""Manual turns of dialect E on a live edge: the recording, and the way to full duplex."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
import soundfile
from support.edge.live_edge import LiveEdge, live_edge, receive, send
from support.protocols.transcripts import pcm
from websockets.asyncio.client import ClientConnection

from duplane.edge.clock import Moment
from duplane.edge.payload.sound_format import Encoding, SoundFormat
from duplane.edge.recording.events import join
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import read_events, recordings
from duplane.edge.session.chat_session import ChatSession
from duplane.fabric.v1 import lease_pb2, session_pb2

PATH = "/openai/v1/realtime?model=gpt-realtime-2.1"
PCM = SoundFormat(Encoding.INT16, 24_000)
SECOND = PCM.encode(pcm(24_000))
APPEND = {"type": "input_audio_buffer.append", "audio": pybase64.b64encode_as_string(SECOND)}
GREET = {"type": "response.create", "response": {"instructions": "Greet the user."}}


def detection(kind: str | None) -> dict[str, Any]:
    """Return the event that changes the detection of turns."""
    value = kind and {"type": kind}
    return {"type": "session.update", "session": {"audio": {"input": {"turn_detection": value}}}}


async def until(client: ClientConnection, kind: str) -> list[dict[str, Any]]:
    """Return the events up to one of this type."""
    events = [await receive(client)]
    while events[-1]["type"] != kind:
        assert events[-1]["type"] != "error", events[-1]
        events.append(await receive(client))
    return events


def speaks(request: session_pb2.ChatRequest) -> list[session_pb2.ChatResponse]:
    """Answer with a second of sound."""
    delta = session_pb2.ChatDelta(text="hello", audio=pcm(24_000))
    done = session_pb2.Done(reason=session_pb2.FINISH_REASON_STOP)
    return [session_pb2.ChatResponse(delta=delta), session_pb2.ChatResponse(done=done)]


async def test_recording_of_a_manual_turn_is_audible(tmp_path: Path) -> None:
    async with live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge:
        edge.fabric.on_turn = speaks
        async with edge.connect_to(PATH) as client:
            events = [await receive(client)]
            for event in (detection(None), APPEND, {"type": "input_audio_buffer.commit"}):
                await send(client, event)
            await send(client, {"type": "response.create"})
            events += await until(client, "response.done")
    (directory,) = recordings(tmp_path)
    frames = [
        (event["dir"], join(event["frame"], lambda name: (directory / name).read_bytes()))
        for event in read_events(directory)
    ]
    assert [frame for side, frame in frames if side == "down"] == events
    assert ("up", APPEND) in frames
    for name in ("user.wav", "model.wav"):
        sound, rate_hertz = soundfile.read(directory / name)
        assert (sound.size, rate_hertz) == (24_000, 24_000)
        assert np.allclose(sound, np.frombuffer(pcm(24_000), "<f4"), atol=1e-3)


async def asked(edge: LiveEdge, kind: lease_pb2.SessionKind) -> None:
    """Grant the next slot, which must be one of this kind."""
    acquisition = await edge.fabric.acquisition()
    assert acquisition.request.kind == kind
    acquisition.grant()


async def test_sound_right_after_a_cancelled_turn_begins_full_duplex() -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        async with edge.connect_to(PATH) as client:
            await send(client, GREET)
            await until(client, "response.created")
            await asked(edge, lease_pb2.SESSION_KIND_CHAT)
            turn = await edge.fabric.turn()
            for event in ({"type": "response.cancel"}, APPEND, detection(None)):
                await send(client, event)
            done, updated = (await until(client, "session.updated"))[-2:]
            assert done["response"]["status"] == "cancelled"
            # Sound flows to the model, so the client can no longer decide about turns.
            assert updated["session"]["audio"]["input"]["turn_detection"] is not None
            await asked(edge, lease_pb2.SESSION_KIND_AUDIO_DUPLEX)
            conversation = await edge.fabric.conversation()
            assert (await conversation.next_request()).HasField("open")
            assert turn.is_over.is_set()
        await edge.settled()


async def test_turns_go_on_after_the_detection_of_turns_has_changed_twice() -> None:
    async with live_edge() as edge, edge.connect_to(PATH) as client:
        edge.fabric.on_turn = speaks
        await receive(client)
        for event in (detection("semantic_vad"), GREET):
            await send(client, event)
        await until(client, "response.done")
        for event in (detection(None), APPEND, {"type": "input_audio_buffer.commit"}):
            await send(client, event)
        await send(client, {"type": "response.create"})
        await until(client, "response.done")
        messages = [(await edge.fabric.turn()).request.messages for _ in range(2)][-1]
        assert [len(message.parts) for message in messages] == [1, 1, 1]
        assert messages[1].parts[0].text == "hello"
        assert len(messages[2].parts[0].audio) == 4 * 16_000
        await send(client, detection("semantic_vad"))
        await until(client, "session.updated")
        await send(client, APPEND)
        conversation = await edge.fabric.conversation()
        conversation.say(session_pb2.ConverseResponse(closed=session_pb2.Closed()))


@pytest.mark.parametrize("text", ["", "[1]", '"response.create"'])
async def test_odd_frames_end_at_most_their_own_session(text: str) -> None:
    async with live_edge() as edge, edge.connect_to(PATH) as other:
        await receive(other)
        async with edge.connect_to(PATH) as client:
            await receive(client)
            await client.send(text)
            if text:
                assert orjson.loads(await client.recv())["type"] == "error"
        await send(other, GREET)
        await until(other, "response.done")


async def test_request_of_a_turn_is_not_kept_until_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[session_pb2.ChatRequest] = []
    next_turn = ChatSession.next_turn

    def note(session: ChatSession, now: Moment) -> session_pb2.ChatRequest | None:
        if (request := next_turn(session, now)) is not None:
            requests.append(request)
        return request

    monkeypatch.setattr(ChatSession, "next_turn", note)
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        async with edge.connect_to(PATH) as client:
            await send(client, GREET)
            await asked(edge, lease_pb2.SESSION_KIND_CHAT)
            turn = await edge.fabric.turn()
            turn.say(*speaks(turn.request))
            await until(client, "response.done")
            await send(client, GREET)
            acquisition = await edge.fabric.acquisition()  # the runner waits for it
            gc.collect()  # of what gRPC has kept of the call
            count = sys.getrefcount(requests[0])
            assert count == 2  # of the list and of this call
            acquisition.grant()
            await until(client, "response.created")
        await edge.settled()
