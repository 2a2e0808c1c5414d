"""What an edge needs to go on with a session that another edge has begun. Pure.

The edge sends a note with each unit of a resumable session. The worker keeps the newest one without
reading it, and gives it to the edge at which the client returns. A note is short: it has neither
settings nor sound, which the worker has itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import orjson

from duplane.edge.dialects.actions import NO_TAG, Tag
from duplane.edge.identity import Identity
from duplane.edge.session.speech_requests import NotedSpeech
from duplane.edge.session.unit_state import Cursor, UnitState
from duplane.fabric.bounds import MAX_NOTE_BYTES

_VERSION = 1  # edges of another version cannot read the note


@dataclass(frozen=True, slots=True)
class EdgeNote:
    """A session as its edge has it.

    `units` has the newest units with their states, oldest first; then `latest` is the state. `tags`
    has the tags of units without an outcome. `speech` has the number of the next text to speak, and
    the texts that were sent. `next_sample` is the first sample of the input that no
    unit has. `ends_at_s` is the time (Unix) at which the session ends; None if it has no such
    limit.
    """

    identity: Identity
    dialect: str
    mode: str
    turn_key: bytes = field(repr=False)
    latest: UnitState
    next_sample: int = 0
    ends_at_s: float | None = None
    units: Sequence[UnitState] = ()
    tags: Mapping[int, Tag] = field(default_factory=dict[int, Tag])
    max_slice_count: int | None = None
    paths: Mapping[str, str] = field(default_factory=dict[str, str])
    speech: tuple[int, Sequence[NotedSpeech]] = (0, ())

    def to_bytes(self) -> bytes:
        """Return the note; if it is too long, without the oldest units."""
        for units in (self.units, self.units[len(self.units) // 2 :], ()):
            packed = replace(self, units=units)._pack()
            if len(packed) <= MAX_NOTE_BYTES:
                return packed
        speech = self.speech[0], ()
        return replace(self, units=(), tags={}, paths={}, speech=speech)._pack()

    def _pack(self) -> bytes:
        return orjson.dumps(
            {
                "version": _VERSION,
                "identity": asdict(self.identity),
                "dialect": self.dialect,
                "mode": self.mode,
                "turn_key": self.turn_key.hex(),
                "next_sample": self.next_sample,
                "ends_at_s": self.ends_at_s,
                "latest": _packed(self.latest),
                "units": [_packed(state) for state in self.units],
                "tags": [[unit, tag.input_id, tag.response_id] for unit, tag in self.tags.items()],
                "max_slice_count": self.max_slice_count,
                "paths": self.paths,
                "speech": [self.speech[0], *map(list, self._open_speech())],
            }
        )

    def _open_speech(self) -> Sequence[NotedSpeech]:
        """Return the texts without an end before the first unit that can be rendered again."""
        first = self.units[0].unit if self.units else self.latest.unit
        return [one for one in self.speech[1] if one.ended is None or one.ended >= first]

    @classmethod
    def from_bytes(cls, packed: bytes) -> EdgeNote:
        """Read a note. Raises ValueError."""
        try:
            note = cast("dict[str, Any]", orjson.loads(packed))
            if note["version"] != _VERSION:
                raise ValueError(f"the note has version {note['version']}")
            return cls(
                Identity(**note["identity"]),
                note["dialect"],
                note["mode"],
                bytes.fromhex(note["turn_key"]),
                _unpacked(note["latest"]),
                note["next_sample"],
                note["ends_at_s"],
                [_unpacked(state) for state in note["units"]],
                {unit: Tag(input_id, turn_id) for unit, input_id, turn_id in note["tags"]},
                note["max_slice_count"],
                note["paths"],
                _unpacked_speech(*note.get("speech", (0,))),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"the note is not one of this release: {error}") from None

    def tag_of(self, unit: int) -> Tag:
        """Return the tag of a unit."""
        known = {state.unit: state.tag for state in self.units}
        return self.tags.get(unit) or known.get(unit, NO_TAG)

    def state_for(self, cursor: Cursor) -> UnitState:
        """Return the state from which the events after `cursor` can be rendered.

        Its `unit` is the first one whose delta is needed.
        """
        for state in self.units:
            if state.unit >= cursor.unit:
                return state
        return self.latest

    def reply_ends_from(self, state: UnitState) -> Sequence[int]:
        """Return the reply ends at a state, and those of the appends that came after it."""
        ends = list(state.reply_ends)
        for later in (*self.units, self.latest):
            if later.unit > state.unit:
                # Those of answered units are gone by then; the others are followed by new ones.
                known_count = sum(end > later.unit for end in ends)
                ends += later.reply_ends[known_count:]
        return ends


def _packed(state: UnitState) -> Sequence[Any]:
    tag = state.tag
    ids = () if tag is NO_TAG else (tag.input_id, tag.response_id)
    return [state.unit, *state.cursor, list(state.dialect), list(state.reply_ends), *ids]


def _unpacked(packed: Sequence[Any]) -> UnitState:
    unit, last_unit, part, dialect, reply_ends, *ids = packed
    tag = Tag(*ids) if ids else NO_TAG
    return UnitState(unit, Cursor(last_unit, part), dialect, tag, reply_ends)


def _unpacked_speech(next_number: int, *noted: Any) -> tuple[int, Sequence[NotedSpeech]]:
    return next_number, [NotedSpeech(*one) for one in noted]
