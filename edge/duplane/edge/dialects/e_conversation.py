"""The state of one client of dialect E, and its answers to commands. Pure.

A dialect that runs the conversation decides what the commands mean for the model.
"""

from __future__ import annotations

import dataclasses

from duplane.edge.dialects.e_commands import DELETE, CreateItem, ItemCommand, Truncate, Update
from duplane.edge.dialects.e_events import EventWriter
from duplane.edge.dialects.e_items import Item, ItemTable, Part
from duplane.edge.dialects.e_response import (
    COMPLETED,
    End,
    Response,
    ResponseRequest,
    ResponseUsage,
)
from duplane.edge.dialects.e_settings import SessionSettings
from duplane.edge.dialects.openai_errors import (
    RESPONSE_ACTIVE,
    RESPONSE_NOT_ACTIVE,
    UNKNOWN_ITEM,
    named_error,
)
from duplane.edge.identity import Identity

_RESPONSE_ACTIVE = "Conversation already has an active response in progress"
_RESPONSE_NOT_ACTIVE = "Cancellation failed: no active response found"


class Conversation:
    """The settings, the items and the open response of one client, and the events about them."""

    def __init__(self, identity: Identity) -> None:
        self.settings = SessionSettings(identity.model)
        self.events = EventWriter(identity.session_id)
        self.items = ItemTable()
        self.usage = ResponseUsage()
        self.response: Response | None = None
        self._session_id = identity.session_id
        self._conversation_id = self.events.new_id("conv")

    # --- the session ---

    def created(self, expires_s: int) -> bytes:
        """Render the first event of the session, which expires at this Unix time."""
        return self.events.event("session.created", {"session": self._session(expires_s)})

    def update(self, command: Update, expires_s: int, fixed: frozenset[str]) -> bytes:
        """Change the settings that are not `fixed`, and render those that are now in effect."""
        self.settings = self.settings.changed(command.change, fixed)
        return self.events.event("session.updated", {"session": self._session(expires_s)})

    def _session(self, expires_s: int) -> dict[str, object]:
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self._session_id,
            "expires_at": expires_s,
            **self.settings.to_json(),
        }

    # --- items ---

    def change_items(self, command: CreateItem | ItemCommand | Truncate) -> list[bytes]:
        """Apply a command about items, and render its answer."""
        match command:
            case CreateItem():
                return self._create(command)
            case Truncate():
                return [self._truncate(command)]
            case _:
                is_deletion = command.kind == DELETE
                return [self._delete(command) if is_deletion else self._retrieve(command)]

    def _create(self, command: CreateItem) -> list[bytes]:
        item = command.item
        if not item.id:
            item = dataclasses.replace(item, id=self.events.new_id("item"))
        return self._add(item, command.after)

    def speech_started(self, at_ms: int) -> tuple[str, bytes]:
        """Render the begin of a turn of the user; also return the id of the item to come."""
        item_id = self.events.new_id("item")
        fields = {"item_id": item_id, "audio_start_ms": at_ms}
        return item_id, self.events.event("input_audio_buffer.speech_started", fields)

    def speech_stopped(self, item_id: str, at_ms: int) -> list[bytes]:
        """Render the end of a turn of the user, and add its item."""
        fields = {"item_id": item_id, "audio_end_ms": at_ms}
        event = self.events.event("input_audio_buffer.speech_stopped", fields)
        return [event, *self.commit(item_id)]

    def commit(self, item_id: str = "") -> list[bytes]:
        """Add a message with sound of the user. `item_id` is empty if the message has no id yet."""
        item_id = item_id or self.events.new_id("item")
        committed = {"item_id": item_id, "previous_item_id": self.items.last_id}
        item = Item(item_id, role="user", parts=(Part("input_audio"),))
        event = self.events.event("input_audio_buffer.committed", committed)
        return [event, *self._add(item, None)]

    def _add(self, item: Item, after: str | None) -> list[bytes]:
        fields = {"previous_item_id": self.items.add(item, after), "item": item.to_json()}
        kinds = ("conversation.item.added", "conversation.item.done")
        return [self.events.event(kind, fields) for kind in kinds]

    def _retrieve(self, command: ItemCommand) -> bytes:
        item = self.items.get(command.item_id)
        if item is None:
            error = named_error(UNKNOWN_ITEM, "item_id: there is no such item")
            return self.events.error(error, "item_id", command.input_id)
        return self.events.event("conversation.item.retrieved", {"item": item.to_json()})

    def _delete(self, command: ItemCommand) -> bytes:
        """Delete an item. An unknown one counts as deleted: the table is bounded."""
        self.items.remove(command.item_id)
        return self.events.event("conversation.item.deleted", {"item_id": command.item_id})

    def _truncate(self, command: Truncate) -> bytes:
        """Cut the text of an item in proportion to its sound."""
        if item := self.items.get(command.item_id):
            self.items.replace(item.cut(command.end_ms))
        fields = {
            "item_id": command.item_id,
            "content_index": command.content_index,
            "audio_end_ms": command.end_ms,
        }
        return self.events.event("conversation.item.truncated", fields)

    # --- responses ---

    def begin_response(self, request: ResponseRequest | None = None) -> list[bytes]:
        """Open a response. None may be open."""
        self.response = Response(
            self.events, self.items, self.settings, self._conversation_id, request
        )
        return self.response.begin()

    def end_response(self, end: End) -> list[bytes]:
        """Close the response, if one is open."""
        response, self.response = self.response, None
        return response.close(end, self.usage.take()) if response else []

    def empty_response(self, request: ResponseRequest) -> list[bytes]:
        """Render a response without any output."""
        return [*self.begin_response(request), *self.end_response(COMPLETED)]

    def already_active(self, input_id: str | None) -> bytes:
        """Render the error for a `response.create` while a response is open."""
        error = named_error(RESPONSE_ACTIVE, _RESPONSE_ACTIVE)
        return self.events.error(error, input_id=input_id)

    def not_active(self, input_id: str | None) -> bytes:
        """Render the error for a `response.cancel` while that response is not open."""
        return self.events.error(
            named_error(RESPONSE_NOT_ACTIVE, _RESPONSE_NOT_ACTIVE), None, input_id
        )
