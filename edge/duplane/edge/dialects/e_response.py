"""The events of one response of dialect E, and what a response has used. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from duplane.edge.dialects.e_events import EventWriter
from duplane.edge.dialects.e_items import Item, ItemTable, Part
from duplane.edge.dialects.e_settings import TEXT, SessionSettings, sound_fields
from duplane.fabric.v1 import session_pb2

_MAX_TEXT_BYTES = 64 * 1024  # of the whole text, which some of the last events repeat


class Status(StrEnum):
    """How a response has ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class End:
    """The end of a response. `reason` belongs to a status, and `error` to a failure."""

    status: Status
    reason: str = ""
    error: Mapping[str, object] | None = None

    def to_json(self) -> dict[str, object] | None:
        """Return the `status_details`; None if the response is complete."""
        if self.status is Status.COMPLETED:
            return None
        details: dict[str, object] = {"type": self.status}
        if self.reason:
            details["reason"] = self.reason
        return details if self.error is None else {**details, "error": self.error}


COMPLETED = End(Status.COMPLETED)
TURN_DETECTED = End(Status.CANCELLED, "turn_detected")
CLIENT_CANCELLED = End(Status.CANCELLED, "client_cancelled")
FULL = End(Status.INCOMPLETE, "max_output_tokens")


class ResponseUsage:
    """The tokens that were used since the last response ended."""

    def __init__(self) -> None:
        self._text_in = self._sound_in = self._pictures_in = 0
        self._text_out = self._sound_out = 0

    def add(self, counts: session_pb2.TokenCounts) -> None:
        """Add what one unit or one turn has used."""
        self._text_in += counts.input_text_token_count
        self._sound_in += counts.input_audio_token_count
        self._pictures_in += counts.input_video_token_count
        self._text_out += counts.output_text_token_count
        self._sound_out += counts.output_audio_token_count

    def take(self) -> dict[str, object]:
        """Return the usage of a response, and begin with the next one."""
        tokens_in = self._text_in + self._sound_in + self._pictures_in
        tokens_out = self._text_out + self._sound_out
        usage: dict[str, object] = {
            "total_tokens": tokens_in + tokens_out,
            "input_tokens": tokens_in,
            "output_tokens": tokens_out,
            "input_token_details": {
                "text_tokens": self._text_in,
                "audio_tokens": self._sound_in,
                "image_tokens": self._pictures_in,
                "cached_tokens": 0,
            },
            "output_token_details": {
                "text_tokens": self._text_out,
                "audio_tokens": self._sound_out,
            },
        }
        self.__init__()
        return usage


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """What a `response.create` asks for. `is_apart` means: outside of the conversation."""

    modalities: tuple[str, ...] | None = None
    max_output_tokens: int | str | None = None
    metadata: Mapping[str, str] | None = None
    is_apart: bool = False


class Response:
    """One response: opens with its first event, adds texts and sound, and closes.

    Its item is added with the first text or sound, so a response without any has no item.
    """

    def __init__(
        self,
        events: EventWriter,
        items: ItemTable,
        settings: SessionSettings,
        conversation_id: str,
        request: ResponseRequest | None = None,
    ) -> None:
        request = request or ResponseRequest()
        self.id = events.new_id("resp")
        self._events = events
        self._items = items
        self._modalities = request.modalities or settings.modalities
        self._sound = settings.output_sound
        self._item: Item | None = None
        self._texts: list[str] = []
        self._text_bytes = 0
        self._sound_bytes = 0
        self._place: dict[str, object] = {}  # ids and indices that most events have
        self._is_apart = request.is_apart
        self._resource: dict[str, object] = {
            "conversation_id": None if request.is_apart else conversation_id,
            "output_modalities": self._modalities,
            "max_output_tokens": request.max_output_tokens or settings.max_output_tokens,
            "audio": {
                "output": {
                    "format": sound_fields(settings.output_sound),
                    "voice": settings.voice.name,
                }
            },
            "metadata": request.metadata,
        }

    def begin(self) -> list[bytes]:
        """Render the first event."""
        return [self._events.event("response.created", {"response": self._to_json("in_progress")})]

    def add(self, text: str, sound: bytes = b"") -> list[bytes]:
        """Render what the model says: its text, and sound in the format of the session."""
        if not (text or sound):
            return []
        events = [] if self._item else self._begin_item()
        if text:
            self._keep(text)
            name = "output_text" if self._is_text else "output_audio_transcript"
            fields = {**self._place, "delta": text}
            events.append(self._events.event(f"response.{name}.delta", fields))
        if sound and not self._is_text:
            self._sound_bytes += len(sound)
            kind = "response.output_audio.delta"
            events.append(self._events.sound(kind, self._place, sound))
        return events

    def close(self, end: End, usage: Mapping[str, object]) -> list[bytes]:
        """Render the last events."""
        events = self._close_item(self._item, end) if self._item else []
        response = self._to_json(end.status, end.to_json(), usage)
        return [*events, self._events.event("response.done", {"response": response})]

    @property
    def _is_text(self) -> bool:
        return self._modalities == TEXT

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _keep(self, text: str) -> None:
        """Keep a text for the last events, up to a bound."""
        self._text_bytes += len(text.encode())
        if self._text_bytes <= _MAX_TEXT_BYTES:
            self._texts.append(text)

    def _begin_item(self) -> list[bytes]:
        item_id = self._events.new_id("item")
        self._item = item = Item(item_id, role="assistant", status="in_progress")
        previous_id = self._items.last_id
        if not self._is_apart:
            self._items.add(item)
        added = {"response_id": self.id, "output_index": 0, "item": item.to_json()}
        part = {"type": "text", "text": ""} if self._is_text else _sound_part("")
        self._place = {
            "response_id": self.id,
            "item_id": item_id,
            "output_index": 0,
            "content_index": 0,
        }
        write = self._events.event
        events = [write("response.output_item.added", added)]
        if not self._is_apart:
            fields = {"previous_item_id": previous_id, "item": item.to_json()}
            events.append(write("conversation.item.added", fields))
        return [*events, write("response.content_part.added", {**self._place, "part": part})]

    def _close_item(self, begun: Item, end: End) -> list[bytes]:
        write, place, text = self._events.event, self._place, self._text
        status = "completed" if end.status is Status.COMPLETED else "incomplete"
        kind = "output_text" if self._is_text else "output_audio"
        sound_ms = self._sound_bytes * 1000 // (self._sound.sample_bytes * self._sound.rate_hertz)
        self._item = item = Item(
            begun.id,
            role=begun.role,
            status=status,
            parts=(Part(kind, text),),
            sound_ms=sound_ms,
        )
        if self._is_text:
            part: dict[str, object] = {"type": "text", "text": text}
            events = [write("response.output_text.done", {**place, "text": text})]
        else:
            part = _sound_part(text)
            events = [
                write("response.output_audio.done", place),
                write("response.output_audio_transcript.done", {**place, "transcript": text}),
            ]
        events.append(write("response.content_part.done", {**place, "part": part}))
        if not self._is_apart:
            previous_id = self._items.previous_id(item.id)
            self._items.replace(item)
            fields = {"previous_item_id": previous_id, "item": item.to_json()}
            events.append(write("conversation.item.done", fields))
        done = {"response_id": self.id, "output_index": 0, "item": item.to_json()}
        return [*events, write("response.output_item.done", done)]

    def _to_json(
        self,
        status: str,
        details: Mapping[str, object] | None = None,
        usage: Mapping[str, object] | None = None,
    ) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "output": [self._item.to_json()] if self._item else [],
            **self._resource,
            "usage": usage,
        }


def _sound_part(transcript: str) -> dict[str, object]:
    return {"type": "audio", "transcript": transcript}
