"""What the model reads of the items of dialect E, in turns of chat. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from duplane.edge.dialects.e_items import Item, ItemTable, Part
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

_ROLES: Mapping[str, session_pb2.ChatRole] = {
    "system": session_pb2.CHAT_ROLE_SYSTEM,
    "user": session_pb2.CHAT_ROLE_USER,
    "assistant": session_pb2.CHAT_ROLE_ASSISTANT,
}
_SOUND, _PICTURE = "input_audio", "input_image"
MEDIA_PARTS = (_SOUND, _PICTURE)

Media = Sequence[bytes]
"""The sounds and pictures of a message, one for each of its parts of these kinds, in their order.

Sounds are PCM at the rate of the dialects. An empty one stands for a part without its content.
"""


class History:
    """The sounds and pictures of the items in a table, and the messages that a turn consists of.

    The media have at most `Limits.chat_media_bytes`. Above this bound, the oldest media are
    dropped. A message without its media would mean something else, so from then on the model reads
    only what follows this message, and no answer before the next question. The bounds on the
    number and the texts of messages are kept in the same way.
    """

    def __init__(self, items: ItemTable, limits: Limits) -> None:
        self._items = items
        self._limits = limits
        self._media: dict[str, Media] = {}  # by the id of the item
        self._dropped: set[str] = set()  # ids of items that the model does not read any more

    @property
    def media_bytes(self) -> int:
        """The bytes of all media."""
        return sum(map(_size, self._media.values()))

    def keep(self, item_id: str, media: Media) -> None:
        """Keep the media of an item in the table."""
        ids = [item.id for item in self._items]
        self._dropped.intersection_update(ids)
        self._dropped.discard(item_id)
        self._media[item_id] = media
        self._media = {each: self._media[each] for each in ids if each in self._media}
        excess = self.media_bytes - self._limits.chat_media_bytes
        for oldest in list(self._media):
            if excess <= 0:
                break
            if size := _size(self._media[oldest]):
                excess -= size
                self._dropped.add(oldest)
                del self._media[oldest]

    def forget(self, item_id: str) -> None:
        """Drop the media of an item that is deleted."""
        self._media.pop(item_id, None)
        self._dropped.discard(item_id)

    def clear(self) -> None:
        """Drop all media."""
        self._media.clear()

    def halve(self) -> None:
        """Let the model read only the newer half of what it reads now: its context is full."""
        ids: list[str] = []
        for item in self._items:
            if item.id in self._dropped:
                ids.clear()
            elif self._parts(item):
                ids.append(item.id)
        older = ids[: len(ids) // 2]
        for item_id in older:
            self._media.pop(item_id, None)
        self._dropped.intersection_update(item.id for item in self._items)
        self._dropped.update(older)

    def messages(self, instructions: str) -> list[session_pb2.ChatMessage]:
        """Return the messages of a turn: instructions, and the newest items within the bounds."""
        limits = self._limits
        left_bytes = limits.chat_text_bytes - len(instructions.encode())
        left_parts, left_messages = limits.chat_part_count - 1, limits.chat_message_count - 1
        newest: list[session_pb2.ChatMessage] = []
        is_cut = False
        for item in reversed(list(self._items)):
            parts = self._parts(item)
            left_bytes -= item.byte_count
            left_parts -= len(parts)
            left_messages -= bool(parts)
            is_cut = item.id in self._dropped or min(left_bytes, left_parts, left_messages) < 0
            if is_cut:
                break
            if parts:
                newest.append(session_pb2.ChatMessage(role=_ROLES[item.role], parts=parts))
        while is_cut and newest and newest[-1].role == session_pb2.CHAT_ROLE_ASSISTANT:
            newest.pop()
        return [_system(instructions), *reversed(newest)]

    def chosen(
        self, instructions: str, given: Iterable[tuple[Item, Media]]
    ) -> list[session_pb2.ChatMessage]:
        """Return the messages of a turn about given items, instead of those in the table."""
        messages = [_system(instructions)]
        for item, media in given:
            if parts := _parts(item, media):
                messages.append(session_pb2.ChatMessage(role=_ROLES[item.role], parts=parts))
        return messages

    def media(self, item_id: str) -> Media:
        """Return the media of an item; none if they were dropped."""
        return self._media.get(item_id, ())

    def _parts(self, item: Item) -> list[session_pb2.ChatPart]:
        return _parts(item, self.media(item.id))


def _size(media: Media) -> int:
    return sum(map(len, media))


def _system(instructions: str) -> session_pb2.ChatMessage:
    parts = [session_pb2.ChatPart(text=instructions)]
    return session_pb2.ChatMessage(role=session_pb2.CHAT_ROLE_SYSTEM, parts=parts)


def _parts(item: Item, media: Media) -> list[session_pb2.ChatPart]:
    """Return the parts of a message; none for an item that is no message."""
    if not item.role:
        return []
    contents = iter(media)
    found = (_part(part, next(contents, b"") if _has_media(part) else b"") for part in item.parts)
    return [part for part in found if part is not None]


def _has_media(part: Part) -> bool:
    return part.kind in MEDIA_PARTS


def _part(part: Part, content: bytes) -> session_pb2.ChatPart | None:
    """Return a part. Without its sound, the transcript stands for it."""
    if content and part.kind == _SOUND:
        return session_pb2.ChatPart(audio=content)
    if content:
        return session_pb2.ChatPart(image=content)
    return session_pb2.ChatPart(text=part.text) if part.text else None
