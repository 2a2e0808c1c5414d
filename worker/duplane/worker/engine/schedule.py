"""Chooses the next launch of each lane of the device. Pure: no clock, no threads, no model.

A launch is one call of `Model.advance` for one block of the model. A slot has at most one piece of
work at a time, and so it is in at most one launch. Two lanes can run side by side: lane L hears,
sees and thinks, lane S speaks. Openings and rebuilds need both. A device with one lane runs the
launch of both that has the earliest deadline.

Lane L, the first that applies:

1. BEGIN: all units that have arrived. This is work of the host.
2. HEAR: the sound of at most `hear` units, the earliest first.
3. An opening, a share of a rebuild, a settle or the sound of a chat, if its deadline is earlier
   than those of all units with other work in this lane; without such units, than those of the
   chats and prompts. Of openings, of rebuilds and so on, the one that began first is meant: if they
   took turns, all of them would end late.
4. SEE: `pieces` pieces of pictures, or `many_pieces` for a large unit; never twice in a row while
   rows wait. Chats see when no unit does.
5. PASS: at most `rows` rows: all next ids of units, those of chats that are due, the input of
   units, and then at most `background` rows of prompts. With `many_rows`, a pass also has the rest
   of one large unit; without units, it has the rows of prompts.

SEE and the input of units go by deadline, which is `ROW_S` later for each row of the unit: units
without pictures do not wait for all pieces of a large one, and this one does not wait for ever.

Lane S, the first that applies: a voice whose deadline is the earliest; VOCODE, at most `vocode`
chunks by deadline; TALK, all units that wait, at most `talk`; the same two for chats; a voice.

So a unit waits for at most the launch in progress, one HEAR, one SEE and one PASS before its rows
are in a pass, and in lane S for one TALK and the chunks with an earlier deadline, and in each for
the works of rule 3 whose deadlines are earlier. In company of open conversations the next
text of a chat waits until `CHAT_PERIOD_S` after the one before it; alone it runs as fast as its
client reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from operator import attrgetter

from duplane.worker.models.interface import (
    Continue,
    Item,
    Open,
    Part,
    Rebuild,
    RunUnit,
    StartChat,
)

UNIT_DEADLINE_S = 0.5
"""A unit's deadline: this long after the worker received it."""
CHAT_PERIOD_S = 0.8
CHAT_DEADLINE_S = 2.0
BACKGROUND_DEADLINE_S = 0.25
"""Deadlines of a piece of a chat, and of other work, after the piece before it."""
ROW_S = 0.0005
"""The input of a unit is due this much later for each of its rows."""


class Block(Enum):
    """What a launch runs."""

    BEGIN = "begin"
    HEAR = "hear"
    SEE = "see"
    PASS = "pass"
    SETTLE = "settle"
    TALK = "talk"
    VOCODE = "vocode"
    VOICE = "voice"
    OPEN = "open"
    REBUILD = "rebuild"

    @property
    def is_shared(self) -> bool:
        """Whether the block uses the state of both lanes, so that nothing may run beside it."""
        return self in (Block.OPEN, Block.REBUILD)


_PASS = (Part.FEED, Part.DECODE)
_PARTS = {part: Block.PASS if part in _PASS else Block(part.value) for part in Part}
_SPEECH = (Block.TALK, Block.VOCODE, Block.VOICE)


class Kind(IntEnum):
    """Whose work it is, in the order of importance."""

    UNIT = 0
    CHAT = 1
    BACKGROUND = 2  # prompts, openings, rebuilds


@dataclass(frozen=True, slots=True)
class Work:
    """The next piece of work of a slot.

    - `item`: the item. The rows of a `Continue` are those that are left.
    - `deadline_s`: when it should be done; only the order counts.
    - `due_s`: a chat in company of conversations does not run before this time.
    - `size`: the rows of the whole unit.
    - `since_s`: when background work began.
    """

    item: Item
    kind: Kind
    deadline_s: float
    due_s: float = 0.0
    size: int = 0
    since_s: float = 0.0

    @property
    def slot(self) -> int:
        return self.item.slot

    @property
    def block(self) -> Block:
        """The block that does this work."""
        match self.item:
            case Continue(part=part):
                return _PARTS[part]
            case RunUnit():
                return Block.BEGIN
            case Open() | StartChat():
                return Block.OPEN
            case Rebuild():
                return Block.REBUILD


@dataclass(frozen=True)
class Limits:
    """The sizes of launches; see the module."""

    hear: int = 8
    pieces: int = 2
    many_pieces: int = 8
    rows: int = 128
    many_rows: int = 512
    background: int = 64
    vocode: int = 8
    talk: int = 64
    large_unit: int = 1300
    """Rows of a unit that is large."""
    large_rest: int = 384
    """A pass has `many_rows` for the rest of a large unit with at least this number of rows."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of the model: a block and its items, whose `rows` are those of this launch."""

    block: Block
    items: tuple[Item, ...]
    deadline_s: float = math.inf


_by_deadline = attrgetter("deadline_s")
_by_order = attrgetter("kind", "since_s", "deadline_s")


def _input_deadline_s(work: Work) -> float:
    return work.deadline_s + ROW_S * work.size


def next_llm(
    waiting: Sequence[Work], limits: Limits, now_s: float, *, is_shared: bool, has_seen: bool
) -> Launch | None:
    """Return the next launch of lane L; None if it has no work now.

    `is_shared`: conversations are open, so chats keep their period. `has_seen`: the last launch of
    the lane was SEE.
    """
    queues = _queues(waiting)
    if begun := queues[Block.BEGIN]:
        return _launch(Block.BEGIN, begun)
    heard = queues[Block.HEAR]
    if units := _of(Kind.UNIT, heard):
        return _launch(Block.HEAR, units[: limits.hear])
    passing = [work for work in queues[Block.PASS] if not (is_shared and _is_early(work, now_s))]
    seen = queues[Block.SEE]
    blocks = (queues[Block.OPEN], queues[Block.REBUILD], queues[Block.SETTLE], heard)
    if alone := [works[0] for works in blocks if works]:
        first = min(alone, key=_by_deadline)
        others = [*passing, *seen]
        others = _of(Kind.UNIT, others) or others
        if all(first.deadline_s <= work.deadline_s for work in others):
            return _launch(first.block, [first])
    if seen and not (has_seen and passing):
        return _see(_of(seen[0].kind, seen), limits)
    return _pass(passing, limits) if passing else None


def next_speech(
    waiting: Sequence[Work], limits: Limits, now_s: float, *, is_shared: bool
) -> Launch | None:
    """Return the next launch of lane S; None if it has no work now."""
    queues = _queues(work for work in waiting if not (is_shared and _is_early(work, now_s)))
    voices = queues[Block.VOICE]
    for kind in (Kind.UNIT, Kind.CHAT):
        decoding, talking = _of(kind, queues[Block.VOCODE]), _of(kind, queues[Block.TALK])
        spoken = [*decoding, *talking]
        if not spoken:
            continue
        if voices and voices[0].deadline_s <= min(work.deadline_s for work in spoken):
            break
        if decoding:
            return _launch(Block.VOCODE, decoding[: limits.vocode])
        return _launch(Block.TALK, talking[: limits.talk])
    return _launch(Block.VOICE, voices[:1]) if voices else None


def next_single(
    waiting: Sequence[Work], limits: Limits, now_s: float, *, is_shared: bool, has_seen: bool
) -> Launch | None:
    """Return the next launch of a device with one lane.

    It is that of the lane whose units have the earliest deadline, also if they wait behind the
    launch: rows of a unit wait behind the sound of later ones.
    """
    first = next_llm(waiting, limits, now_s, is_shared=is_shared, has_seen=has_seen)
    spoken = next_speech(waiting, limits, now_s, is_shared=is_shared)
    if first is None or spoken is None:
        return first or spoken
    if first.block is Block.BEGIN:
        return first
    return min(spoken, first, key=lambda launch: _lane_deadline_s(launch, waiting))


def next_due_s(waiting: Iterable[Work], now_s: float) -> float:
    """Return when the first chat that waits for its period is due; infinity if there is none."""
    return min((work.due_s for work in waiting if _is_early(work, now_s)), default=math.inf)


def _is_early(work: Work, now_s: float) -> bool:
    """Return whether the work is of a chat that waits for its period."""
    return work.kind is Kind.CHAT and work.due_s > now_s


def _lane_deadline_s(launch: Launch, waiting: Iterable[Work]) -> float:
    """Return the earliest deadline of a launch and of the units that wait for its lane."""
    is_speech = launch.block in _SPEECH
    units = (work for work in waiting if work.kind is Kind.UNIT)
    behind = (work.deadline_s for work in units if (work.block in _SPEECH) is is_speech)
    return min([launch.deadline_s, *behind])


def _queues(waiting: Iterable[Work]) -> dict[Block, list[Work]]:
    """Return the works of each block: of units and chats by deadline, then others by beginning."""
    queues: dict[Block, list[Work]] = {block: [] for block in Block}
    for work in sorted(waiting, key=_by_order):
        queues[work.block].append(work)
    return queues


def _of(kind: Kind, works: Iterable[Work]) -> list[Work]:
    """Return the works of one kind."""
    return [work for work in works if work.kind is kind]


def _see(seen: Sequence[Work], limits: Limits) -> Launch:
    """Share the pieces of a launch among these units or chats."""
    ordered = sorted(seen, key=_input_deadline_s)
    left = limits.many_pieces if ordered[0].size >= limits.large_unit else limits.pieces
    taken: list[tuple[Work, int]] = []
    _fill(taken, ordered, left)
    return _granted(Block.SEE, taken)


def _pass(passing: Sequence[Work], limits: Limits) -> Launch:
    """Fill one pass of the LLM; see the module for the order."""
    units = _of(Kind.UNIT, passing)
    taken = [(work, 1) for work in units if _is_step(work)]
    taken += [(work, 1) for work in _of(Kind.CHAT, passing) if _is_step(work)]
    taken = taken[: limits.rows]
    large = next((work for work in units if _is_rest(work, limits)), None)
    fills = sorted((work for work in units if not _is_step(work)), key=_input_deadline_s)
    ordinary = (work for work in fills if work is not large)
    left = _fill(taken, ordinary, limits.rows - len(taken))
    if large is not None:
        left = _fill(taken, (large,), left + limits.many_rows - limits.rows)
    others = (work for work in passing if work.kind is not Kind.UNIT and not _is_step(work))
    left = min(left, limits.background) if units else limits.many_rows - len(taken)
    _fill(taken, others, left)
    return _granted(Block.PASS, taken)


def _fill(taken: list[tuple[Work, int]], works: Iterable[Work], left: int) -> int:
    """Take as many rows of these works as are left; return what is left then."""
    for work in works:
        if count := min(left, work.item.rows):
            taken.append((work, count))
            left -= count
    return left


def _is_step(work: Work) -> bool:
    """Return whether the work feeds the next id of a text."""
    return isinstance(work.item, Continue) and work.item.part is Part.DECODE


def _is_rest(work: Work, limits: Limits) -> bool:
    return work.size >= limits.large_unit and work.item.rows >= limits.large_rest


def _launch(block: Block, works: Sequence[Work]) -> Launch:
    """Return a launch with the whole items of these works."""
    return Launch(block, tuple(work.item for work in works), _deadline_s(works))


def _granted(block: Block, taken: Sequence[tuple[Work, int]]) -> Launch:
    """Return a launch with these numbers of rows, or of pieces, of these works."""
    items = tuple(
        replace(work.item, rows=rows) if isinstance(work.item, Continue) else work.item
        for work, rows in taken
    )
    return Launch(block, items, _deadline_s([work for work, _ in taken]))


def _deadline_s(works: Sequence[Work]) -> float:
    """Return the earliest deadline of units; of other works if there is no unit."""
    kind = min(work.kind for work in works)
    return min(work.deadline_s for work in works if work.kind is kind)
