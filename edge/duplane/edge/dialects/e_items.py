"""The items of dialect E: messages, calls of functions and their results, and a bounded table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from duplane.edge.payload.fields import BASE64, Fields, invalid, missing
from duplane.edge.settings import Limits

_MAX_PARTS = 128
ROOT = "root"  # the place before all items
ROLES = ("system", "user", "assistant")
# Role -> the types of the parts of its messages.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "system": ("input_text",),
    "user": ("input_text", "input_audio", "input_image"),
    "assistant": ("output_text", "output_audio"),
}
# Type of item -> its fields, all of them text.
_CALLS: Mapping[str, tuple[str, ...]] = {
    "function_call": ("name", "arguments", "call_id"),
    "function_call_output": ("call_id", "output"),
}
_OPTIONAL = ("function_call", "call_id")
_SOUND_PARTS = ("input_audio", "output_audio")  # their text is a transcript


class Part(NamedTuple):
    """A part of a message: its text or transcript, if it has one. Sound and pictures are not kept.

    A picture has no text.
    """

    kind: str
    text: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the part. An absent text is left out: clients refuse `null`."""
        name = "transcript" if self.kind in _SOUND_PARTS else "text"
        return {"type": self.kind} if self.text is None else {"type": self.kind, name: self.text}


@dataclass(frozen=True, slots=True)
class Item:
    """One item. `role` is empty unless it is a message; `sound_ms` is the length of its sound."""

    id: str = ""
    kind: str = "message"
    role: str = ""
    status: str = "completed"
    parts: tuple[Part, ...] = ()
    call: Mapping[str, str] = field(default_factory=dict[str, str])  # of a function, or its result
    sound_ms: int = 0

    @property
    def text(self) -> str:
        """The texts of all parts."""
        return " ".join(part.text for part in self.parts if part.text)

    @property
    def byte_count(self) -> int:
        """The bytes of all texts."""
        texts = (*self.call.values(), *(part.text or "" for part in self.parts))
        return sum(len(text.encode()) for text in texts)

    def to_json(self) -> dict[str, object]:
        """Return the item."""
        item: dict[str, object] = {
            "id": self.id,
            "object": "realtime.item",
            "type": self.kind,
            "status": self.status,
        }
        if self.kind != "message":
            return {**item, **self.call}
        content = [part.to_json() for part in self.parts]
        return {**item, "role": self.role, "content": content}

    def cut(self, end_ms: int) -> Item:
        """Return the item as if its sound had ended at `end_ms`, with that share of its text."""
        if not 0 <= end_ms < self.sound_ms:
            return self
        parts = tuple(
            part._replace(text=part.text[: len(part.text) * end_ms // self.sound_ms])
            if part.kind in _SOUND_PARTS and part.text
            else part
            for part in self.parts
        )
        return dataclasses.replace(self, parts=parts, sound_ms=end_ms)


class ItemTable:
    """The items of a session in their order. A full table drops its oldest item."""

    MAX_ITEMS = 256
    MAX_BYTES = 512 * 1024  # of all texts

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._byte_count = 0

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def byte_count(self) -> int:
        """The bytes of all texts."""
        return self._byte_count

    @property
    def last_id(self) -> str | None:
        """The id of the last item."""
        return self._items[-1].id if self._items else None

    def previous_id(self, item_id: str) -> str | None:
        """Return the id of the item before this one; None if there is none."""
        ids = [None, *(item.id for item in self._items)]
        return ids[ids.index(item_id) - 1] if item_id in ids else None

    def get(self, item_id: str) -> Item | None:
        """Return the item with this id, if it is there."""
        return next((item for item in self._items if item.id == item_id), None)

    def add(self, item: Item, after: str | None = None) -> str | None:
        """Add an item after another one; return the id of the item before it, None for the first.

        Without `after`, or if that item is unknown, the item is the last. An item with the same id
        is replaced.
        """
        self.remove(item.id)
        places = [place for place, other in enumerate(self._items) if other.id == after]
        at = 0 if after == ROOT else places[0] + 1 if places else len(self._items)
        previous = self._items[at - 1].id if at else None
        self._items.insert(at, item)
        self._byte_count += item.byte_count
        while len(self._items) > self.MAX_ITEMS or (
            self._byte_count > self.MAX_BYTES and len(self._items) > 1
        ):
            self._byte_count -= self._items.pop(0).byte_count
        return previous

    def replace(self, item: Item) -> None:
        """Put an item in the place of the one with its id; do nothing if that is not there."""
        for at, other in enumerate(self._items):
            if other.id == item.id:
                self._byte_count += item.byte_count - other.byte_count
                self._items[at] = item

    def remove(self, item_id: str) -> Item | None:
        """Remove and return an item; None if it is not there."""
        item = self.get(item_id)
        if item:
            self._items.remove(item)
            self._byte_count -= item.byte_count
        return item


def read_item(item: Fields, limits: Limits) -> Item:
    """Return the item that a client creates; its id is empty if the client has chosen none.

    Raises ClientError.
    """
    kind = item.required_text("type", 64)
    item_id = item.text("id", limits.text_bytes) or ""
    if kind in _CALLS:
        call = {
            name: text
            for name in _CALLS[kind]
            if (text := item.text(name, limits.instructions_bytes)) is not None
        }
        for name in _CALLS[kind]:
            if name not in call and (kind, name) != _OPTIONAL:
                raise missing(item.path(name))
        return Item(item_id, kind, call=call)
    if kind != "message":
        raise invalid(item.path("type"), f"must be one of {', '.join(('message', *_CALLS))}")
    role = item.required_text("role", 64)
    if role not in ROLES:
        raise invalid(item.path("role"), f"must be one of {', '.join(ROLES)}")
    return Item(item_id, kind, role, parts=_read_parts(item, role, limits))


def _read_parts(item: Fields, role: str, limits: Limits) -> tuple[Part, ...]:
    contents = item.items("content", _MAX_PARTS)
    if contents is None:
        raise missing(item.path("content"))
    parts: list[Part] = []
    for number, content in enumerate(contents):
        path = f"{item.path('content')}[{number}]"
        if not isinstance(content, dict):
            raise invalid(path, "must be an object")
        part = Fields(cast("dict[str, object]", content), path)
        parts.append(_read_part(part, role, limits))
    if sum(len((part.text or "").encode()) for part in parts) > limits.instructions_bytes:
        fault = f"must have at most {limits.instructions_bytes} bytes of text"
        raise invalid(item.path("content"), fault)
    return tuple(parts)


def _read_part(part: Fields, role: str, limits: Limits) -> Part:
    kind = part.required_text("type", 64)
    if kind not in _PARTS[role]:
        raise invalid(part.path("type"), f"must be one of {', '.join(_PARTS[role])}")
    if kind == "input_image":
        part.get("image_url", BASE64)
        return Part(kind)
    if kind in _SOUND_PARTS:
        part.get("audio", BASE64)
        return Part(kind, part.text("transcript", limits.instructions_bytes))
    return Part(kind, part.required_text("text", limits.instructions_bytes))
