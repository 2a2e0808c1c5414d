"""The client events of dialect E that are no appends, decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from duplane.edge.dialects.actions import Command
from duplane.edge.dialects.dialect import Decoders
from duplane.edge.dialects.e_items import Item, read_item
from duplane.edge.dialects.e_response import ResponseRequest
from duplane.edge.dialects.e_settings import (
    SettingsChange,
    read_change,
    read_max_output_tokens,
    read_modalities,
)
from duplane.edge.payload.fields import Fields, invalid
from duplane.edge.settings import Limits

APPEND = "input_audio_buffer.append"
UPDATE = "session.update"
COMMIT = "input_audio_buffer.commit"
CLEAR = "input_audio_buffer.clear"
CREATE_ITEM = "conversation.item.create"
RETRIEVE = "conversation.item.retrieve"
DELETE = "conversation.item.delete"
TRUNCATE = "conversation.item.truncate"
CREATE_RESPONSE = "response.create"
CANCEL = "response.cancel"
CLEAR_OUTPUT = "output_audio_buffer.clear"  # for WebRTC, where the server has a buffer

_MAX_MS = 2**53
_MAX_METADATA = 16  # OpenAI's own bounds of `metadata`
_MAX_KEY_CHARACTERS = 64
_MAX_VALUE_CHARACTERS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Command):
    """Change the settings."""

    change: SettingsChange


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateItem(Command):
    """Add an item after another one; None means at the end."""

    item: Item
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemCommand(Command):
    """Retrieve or delete an item."""

    item_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate(Command):
    """Cut the text of an item, of which the user has heard only the beginning."""

    item_id: str
    content_index: int
    end_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateResponse(Command):
    """Answer now."""

    request: ResponseRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Command):
    """Cancel a response; None means the one that is open."""

    response_id: str | None


def command_decoders(limits: Limits, input_id: Callable[[Fields], str | None]) -> Decoders:
    """Return the decoders of all commands. `input_id` reads the client's id of an event."""

    def simple(event: Fields) -> Command:
        kind = event.get("type", str, required=True)
        return Command(kind, input_id(event), drops_audio=kind == CLEAR)

    def update(event: Fields) -> Command:
        change = read_change(event.required_fields("session"), limits)
        return Update(UPDATE, input_id(event), change=change)

    def create_item(event: Fields) -> Command:
        item = read_item(event.required_fields("item"), limits)
        after = event.text("previous_item_id", limits.text_bytes)
        return CreateItem(CREATE_ITEM, input_id(event), item=item, after=after)

    def item_command(event: Fields) -> Command:
        kind = event.get("type", str, required=True)
        item_id = event.required_text("item_id", limits.text_bytes)
        return ItemCommand(kind, input_id(event), item_id=item_id)

    def truncate(event: Fields) -> Command:
        return Truncate(
            TRUNCATE,
            input_id(event),
            item_id=event.required_text("item_id", limits.text_bytes),
            content_index=event.integer("content_index", 0, _MAX_MS) or 0,
            end_ms=event.integer("audio_end_ms", 0, _MAX_MS) or 0,
        )

    def create_response(event: Fields) -> Command:
        given = event.fields("response")
        request = read_request(given) if given else ResponseRequest()
        return CreateResponse(CREATE_RESPONSE, input_id(event), request=request)

    def cancel(event: Fields) -> Command:
        response_id = event.text("response_id", limits.text_bytes)
        return Cancel(CANCEL, input_id(event), response_id=response_id)

    return {
        UPDATE: update,
        COMMIT: simple,
        CLEAR: simple,
        CREATE_ITEM: create_item,
        RETRIEVE: item_command,
        DELETE: item_command,
        TRUNCATE: truncate,
        CREATE_RESPONSE: create_response,
        CANCEL: cancel,
        CLEAR_OUTPUT: simple,
    }


def read_request(response: Fields) -> ResponseRequest:
    """Return what the object `response` of a `response.create` asks for. Raises ClientError."""
    return ResponseRequest(
        modalities=read_modalities(response),
        max_output_tokens=read_max_output_tokens(response),
        metadata=_read_metadata(response),
        is_apart=response.get("conversation", str) == "none",
    )


def _read_metadata(response: Fields) -> Mapping[str, str] | None:
    given = response.fields("metadata")
    if given is None:
        return None
    if len(given.whole) > _MAX_METADATA:
        raise invalid(response.path("metadata"), f"must be at most {_MAX_METADATA}")
    metadata = {
        key: value
        for key, value in given.whole.items()
        if isinstance(value, str)
        and len(key) <= _MAX_KEY_CHARACTERS
        and len(value) <= _MAX_VALUE_CHARACTERS
    }
    if len(metadata) < len(given.whole):
        fault = f"must have keys of at most {_MAX_KEY_CHARACTERS} characters,"
        fault += f" and texts of at most {_MAX_VALUE_CHARACTERS}"
        raise invalid(response.path("metadata"), fault)
    return metadata
