"""Places among the events of a session, and the state of its dialect at a place. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from duplane.edge.dialects.actions import NO_TAG, Tag


class Cursor(NamedTuple):
    """The place of an event: the number of its unit, and its number among the events of the unit.

    An event that belongs to no unit counts as one of the unit before it.
    """

    unit: int
    part: int


NO_EVENT = Cursor(-1, -1)
"""The cursor of a client that has no event of a unit."""

State = Sequence[Any]
"""The state of a dialect, as JSON: only the dialect itself reads it."""


@dataclass(frozen=True, slots=True)
class UnitState:
    """The state before the events of a unit were rendered.

    `cursor` is the place of the event before. `reply_ends` has, for each append without a reply,
    the sequence of the first unit after it.
    """

    unit: int
    cursor: Cursor
    dialect: State
    tag: Tag = NO_TAG
    reply_ends: Sequence[int] = ()
