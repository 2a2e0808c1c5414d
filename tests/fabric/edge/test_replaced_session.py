"""A chat session without a slot, whose turns can be cancelled, and a duplex session after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pytest
import soundfile
from support.edge.live_edge import AUDIO, LiveEdge, live_edge, receive, send
from support.time_limits import WITHIN_S
from websockets.asyncio.client import ClientConnection

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.dialects.actions import Action, Append, CancelTurn, Turn
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.dialect import Decoders, Phase, Replies, ServerEvents, Transitions
from duplane.edge.dialects.duplex import DuplexDialect
from duplane.edge.dialects.first_event import implied_init
from duplane.edge.modes import CHAT_MODE, MODES
from duplane.edge.payload.fields import Fields
from duplane.edge.payload.media import decode_audio
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.recording.storage import recordings
from duplane.edge.routing import ENDPOINTS, Endpoint, Route
from duplane.fabric.errors import Reason
from duplane.fabric.v1 import lease_pb2, session_pb2

KINDS = ("input.append", "turn", "cancel")


class DialectOfBoth(ChatDialect):
    """Turns until the first append. From then on, the client speaks B."""

    name: ClassVar[str] = "B"
    begins_with_slot: ClassVar[bool] = False
    takes_sound: ClassVar[bool] = True
    transitions: ClassVar[Transitions] = {(Phase.ACTIVE, kind): Phase.ACTIVE for kind in KINDS}
    replies: ClassVar[Replies] = {}
    server_events: ClassVar[ServerEvents] = {}

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.phase = Phase.ACTIVE
        self.held: list[Append] = []

    def _event_decoders(self) -> Decoders:
        return {
            "turn": lambda _: Turn(
                session_pb2.ChatRequest(messages=[session_pb2.ChatMessage()]), kind="turn"
            ),
            "cancel": lambda _: CancelTurn("cancel"),
            "input.append": self._decode_append,
        }

    def _decode_append(self, event: Fields) -> Append:
        encoded = event.required_fields("input").get("audio", str, required=True)
        return Append(decode_audio(encoded, "input.audio", 1.0), kind="input.append")

    def appended(self, append: Append) -> list[bytes]:
        self.held.append(append)
        return []

    def continuation(self, append: Append) -> tuple[DuplexDialect, tuple[Action, ...]] | None:
        dialect = DialectB(self.identity, self.limits, MODES["audio"])
        return dialect, (dialect.decode(implied_init()), *self.held, append)

    def taken(self, turn: Turn, now: Moment) -> list[bytes]:
        return [orjson.dumps({"type": "taken"})]

    def cancelled(self, cancel: CancelTurn, now: Moment) -> list[bytes]:
        return [orjson.dumps({"type": "cancelled"})]

    def queued(self, queued: lease_pb2.Queued, *, is_update: bool) -> list[bytes]:
        return [orjson.dumps({"type": "queued"})]

    def queue_done(self) -> list[bytes]:
        return []

    def done(self, done: session_pb2.Done, now: Moment) -> list[bytes]:
        return [orjson.dumps({"type": "done"})]

    def error(
        self, code: ErrorCode, message: str, now: Moment, input_id: str | None = None
    ) -> bytes:
        return orjson.dumps({"type": "error", "message": message})


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clients of /ws/chat speak this dialect."""
    endpoints: Any = ENDPOINTS
    monkeypatch.setitem(endpoints, (Route.CHAT, "chat"), Endpoint(DialectOfBoth, CHAT_MODE))


@pytest.fixture
async def edge(both: None) -> AsyncGenerator[LiveEdge]:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        yield edge


async def expect(client: ClientConnection, kind: str) -> dict[str, Any]:
    event = await receive(client)
    assert event["type"] == kind, event
    return event


async def ended(over: asyncio.Event) -> None:
    async with asyncio.timeout(WITHIN_S):
        await over.wait()


APPEND = {"type": "input.append", "input": {"audio": AUDIO}}


async def test_only_a_turn_asks_for_a_slot(edge: LiveEdge) -> None:
    async with edge.connect_to("/ws/chat") as client:
        await send(client, {"type": "nothing"})
        await expect(client, "error")
        assert edge.fabric.acquisitions.empty()
        await send(client, {"type": "turn"})
        await expect(client, "taken")
        acquisition = await edge.fabric.acquisition()
        assert acquisition.request.kind == lease_pb2.SESSION_KIND_CHAT
        acquisition.grant()
        turn = await edge.fabric.turn()
        turn.say(session_pb2.ChatResponse(done=session_pb2.Done()))
        await expect(client, "done")
        await edge.fabric.settled()  # the slot is free between turns
    await edge.settled()


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.KIND_NOT_SERVED])
async def test_turn_without_a_slot_fails_alone(edge: LiveEdge, reason: Reason) -> None:
    async with edge.connect_to("/ws/chat") as client:
        await send(client, {"type": "turn"})
        await expect(client, "taken")
        (await edge.fabric.acquisition()).refuse(reason)
        await expect(client, "error")
        await send(client, {"type": "turn"})
        await expect(client, "taken")
        (await edge.fabric.acquisition()).grant()
        (await edge.fabric.turn()).say(session_pb2.ChatResponse(done=session_pb2.Done()))
        await expect(client, "done")
    await edge.settled()


async def test_cancelled_turn_leaves_the_queue_at_once_and_the_next_one_is_normal(
    edge: LiveEdge,
) -> None:
    async with edge.connect_to("/ws/chat") as client:
        await send(client, {"type": "turn"})
        await expect(client, "taken")
        waiting = await edge.fabric.acquisition()
        waiting.queued(lease_pb2.Queued(position=1))
        await expect(client, "queued")
        await send(client, {"type": "cancel"})
        await expect(client, "cancelled")
        await ended(waiting.is_over)
        await send(client, {"type": "turn"})
        await expect(client, "taken")
        (await edge.fabric.acquisition()).grant()
        (await edge.fabric.turn()).say(session_pb2.ChatResponse(done=session_pb2.Done()))
        await expect(client, "done")
    await edge.settled()


async def test_cancelled_turn_ends_its_call_at_once_and_the_next_one_is_normal(
    edge: LiveEdge,
) -> None:
    async with edge.connect_to("/ws/chat") as client:
        await send(client, {"type": "turn"})
        await expect(client, "taken")
        (await edge.fabric.acquisition()).grant()
        running = await edge.fabric.turn()  # it says nothing, like a worker that reads a long text
        await send(client, {"type": "cancel"})
        await expect(client, "cancelled")
        await ended(running.is_over)
        await send(client, {"type": "turn"})
        await expect(client, "taken")
        (await edge.fabric.acquisition()).grant()
        (await edge.fabric.turn()).say(session_pb2.ChatResponse(done=session_pb2.Done()))
        await expect(client, "done")
    await edge.settled()


async def test_duplex_session_goes_on_with_the_client_and_gets_its_first_sound(
    edge: LiveEdge,
) -> None:
    async with edge.connect_to("/ws/chat") as client:
        await send(client, APPEND)
        acquisition = await edge.fabric.acquisition()
        assert acquisition.request.kind == lease_pb2.SESSION_KIND_AUDIO_DUPLEX
        acquisition.grant()
        conversation = await edge.fabric.conversation()
        assert (await conversation.next_request()).HasField("open")
        conversation.say(session_pb2.ConverseResponse(opened=session_pb2.Opened()))
        await expect(client, "session.queue_done")
        await expect(client, "session.created")
        for number in range(3):
            unit = (await conversation.next_request()).unit
            assert len(unit.audio) == 64_000
            delta = session_pb2.Delta(sequence=unit.sequence, listen=session_pb2.Listen())
            conversation.say(session_pb2.ConverseResponse(delta=delta))
            await expect(client, "response.output.delta")
            if number < 2:
                await send(client, APPEND)
        await send(client, {"type": "session.close", "reason": "user_stop"})
        await expect(client, "session.closed")
    await edge.settled()


async def test_sound_during_a_turn_is_heard_by_the_duplex_session_after_it(edge: LiveEdge) -> None:
    async with edge.connect_to("/ws/chat") as client:
        await send(client, {"type": "turn"})
        await expect(client, "taken")
        await send(client, APPEND)
        (await edge.fabric.acquisition()).grant()
        (await edge.fabric.turn()).say(session_pb2.ChatResponse(done=session_pb2.Done()))
        await expect(client, "done")
        await send(client, APPEND)
        acquisition = await edge.fabric.acquisition()
        assert acquisition.request.kind == lease_pb2.SESSION_KIND_AUDIO_DUPLEX
        acquisition.grant()
        conversation = await edge.fabric.conversation()
        assert (await conversation.next_request()).HasField("open")
        conversation.say(session_pb2.ConverseResponse(opened=session_pb2.Opened()))
        units = [(await conversation.next_request()).unit for _ in range(2)]
        assert [len(unit.audio) for unit in units] == [64_000, 64_000]
    await edge.settled()


async def test_edge_that_drains_ends_a_session_that_waits_after_it_was_replaced(
    edge: LiveEdge,
) -> None:
    async with edge.connect_to("/ws/chat") as client:
        await send(client, APPEND)
        waiting = await edge.fabric.acquisition()
        edge.drain()
        await expect(client, "session.closed")
        async with asyncio.timeout(WITHIN_S):
            await client.wait_closed()
        assert client.close_code == 1001
        await ended(waiting.is_over)


async def test_recording_has_the_sound_of_both_sessions(both: None, tmp_path: Path) -> None:
    async with (
        live_edge(recording=RecordingSettings(tmp_path, Consent.ALWAYS)) as edge,
        edge.connect_to("/ws/chat") as client,
    ):
        edge.fabric.is_automatic = False
        await send(client, {"type": "turn"})
        await expect(client, "taken")
        await send(client, APPEND)
        (await edge.fabric.acquisition()).grant()
        (await edge.fabric.turn()).say(session_pb2.ChatResponse(done=session_pb2.Done()))
        await expect(client, "done")
        await send(client, APPEND)
        await edge.fabric.acquisition()
    (directory,) = recordings(tmp_path)
    user, _ = soundfile.read(directory / "user.wav")
    assert user.size == 2 * 16_000
