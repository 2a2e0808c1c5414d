"""A session that its client can take up again after its socket is lost. Pure.

The session is *attached* while it has a socket. Without one it is *detached*: first it is held (it
keeps its slot), later it is parked (it has given the slot back). A client that returns names the
last event that it has, and gets the events after it again.
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from duplane.edge.clock import Moment
from duplane.edge.session.unit_state import NO_EVENT, Cursor, UnitState
from duplane.fabric.journal import JournalSpace
from duplane.fabric.token_secrets import digest_of, is_secret_of

KEPT_S = 30.0
"""The events of units of so many seconds are kept for a client that returns."""
KEPT_BYTES = 4 * 1024 * 1024
_RESUMES = 10  # of one session within _RESUMES_WITHIN_S; further ones are refused
_RESUMES_WITHIN_S = 60.0
_SECRET_BYTES = 32
_MAX_STATES = 32
_ID_BYTES = 6  # of the id of a turn


class Presence(StrEnum):
    """Whether a session has a socket and a slot."""

    ATTACHED = "attached"  # it has a socket
    HELD = "held"  # it has no socket, and keeps its slot
    PARKED = "parked"  # it has no socket, and has given its slot back
    ENDED = "ended"


class Resumed(NamedTuple):
    """What a client that is back has missed.

    `unit` is the last unit with events. `gap_s` is the time in which the session had no socket.
    """

    unit: int
    gap_s: float
    events: Sequence[bytes]
    unit_count: int


class _Kept(NamedTuple):
    cursor: Cursor
    event: bytes


class Detachment:
    """The token of a session, the numbers of its events, and the newest events.

    The events of the last `kept_unit_count` units are kept, at most KEPT_BYTES of them, while they
    and the journals fit into `space`; then the oldest are dropped, except those of the newest unit.
    """

    def __init__(self, kept_unit_count: int, space: JournalSpace | None) -> None:
        self.presence = Presence.ATTACHED
        self.cursor = NO_EVENT  # of the newest event
        self.kept_bytes = 0
        self.digest = b""
        self.turn_key = secrets.token_bytes(_SECRET_BYTES)
        # The states of the dialect before the newest units with events.
        self.states: deque[UnitState] = deque(maxlen=_MAX_STATES)
        self._kept_unit_count = kept_unit_count
        self._space = space  # None: the edge has no bound for all sessions together
        self._kept: deque[_Kept] = deque()
        self.lost_s: float | None = None  # monotonic: since when there is no socket
        self._resumes_s: deque[float] = deque(maxlen=_RESUMES)

    def new_secret(self) -> str:
        """Draw the secret of the token. Only its digest is kept."""
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        self.digest = digest_of(secret)
        return secret

    def restore(self, turn_key: bytes, digest: bytes, cursor: Cursor) -> None:
        """Go on with a session of another edge, after its event at `cursor`."""
        self.turn_key, self.digest, self.cursor = turn_key, digest, cursor

    def is_proved_by(self, secret: str) -> bool:
        """Return whether this is the secret of the session."""
        return self.presence is not Presence.ENDED and is_secret_of(self.digest, secret)

    @property
    def is_detached(self) -> bool:
        """Whether the session goes on without a socket."""
        return self.presence in (Presence.HELD, Presence.PARKED)

    def turn_id(self, unit: int) -> str:
        """Return the hexadecimal digits that name a turn that begins with this unit.

        An edge that renders the unit again finds the same.
        """
        name = unit.to_bytes(8, "big")
        return hmac.digest(self.turn_key, name, "sha256")[:_ID_BYTES].hex()

    # --- events ---

    def number(self, events: Sequence[bytes], unit: int, next_sample: int) -> list[bytes]:
        """Return events about a unit with their numbers, and keep them.

        `next_sample` is the first sample of the client's input that no unit so far has.
        """
        if unit > self.cursor.unit:
            self.cursor = Cursor(unit, -1)
        numbered: list[bytes] = []
        for event in events:
            self.cursor = Cursor(self.cursor.unit, self.cursor.part + 1)
            fields = b',"unit":%d,"part":%d,"next_sample":%d}' % (*self.cursor, next_sample)
            # Each event is an object with fields, so only its last byte is replaced.
            numbered.append(b"".join((memoryview(event)[:-1], fields)))
            self._keep(numbered[-1])
        return numbered

    def _keep(self, event: bytes) -> None:
        self._kept.append(_Kept(self.cursor, event))
        self._count(len(event))
        oldest_unit = self.cursor.unit - self._kept_unit_count + 1
        while (first := self._kept[0].cursor.unit) < self.cursor.unit and (
            first < oldest_unit or self._is_full
        ):
            self._count(-len(self._kept.popleft().event))

    @property
    def _is_full(self) -> bool:
        return self.kept_bytes > KEPT_BYTES or (self._space is not None and self._space.is_exceeded)

    def _count(self, byte_count: int) -> None:
        self.kept_bytes += byte_count
        if self._space:
            self._space.used_bytes += byte_count

    def _after(self, cursor: Cursor) -> list[_Kept]:
        return [kept for kept in self._kept if kept.cursor > cursor]

    # --- the socket ---

    def lose(self, now: Moment) -> None:
        """Record that the socket is lost."""
        if self.presence is not Presence.ATTACHED:
            raise AssertionError(f"a session that is {self.presence} loses no socket")
        self.presence = Presence.HELD
        self.lost_s = now.monotonic_s

    def park(self) -> None:
        """Record that the slot is given back."""
        if self.presence is not Presence.HELD:
            raise AssertionError(f"a session that is {self.presence} is not parked")
        self.presence = Presence.PARKED

    def may_resume(self, now: Moment) -> bool:
        """Return whether the client has not returned too often lately."""
        resumes_s = self._resumes_s
        is_recent = bool(resumes_s) and now.monotonic_s - resumes_s[0] < _RESUMES_WITHIN_S
        return not (is_recent and len(resumes_s) == _RESUMES)

    def catch_up(self, cursor: Cursor) -> None:
        """Note that the client has had these events from another edge."""
        self.cursor = max(self.cursor, cursor)

    def is_ahead(self, cursor: Cursor) -> bool:
        """Return whether a client has an event that this session has not rendered."""
        return cursor > self.cursor

    def resume(self, cursor: Cursor, heard_s: float, now: Moment) -> Resumed:
        """Record that the client has a new socket, and return what it has missed.

        If its old socket looks alive, it was silent since `heard_s`. Call this only if
        `may_resume`, and not if the client `is_ahead`.
        """
        lost_s = heard_s if self.lost_s is None else self.lost_s
        self.presence = Presence.ATTACHED
        self.lost_s = None
        self._resumes_s.append(now.monotonic_s)
        missed = self._after(cursor)
        return Resumed(
            self.cursor.unit,
            max(now.monotonic_s - lost_s, 0.0),
            [b"".join((memoryview(kept.event)[:-1], b',"replayed":true}')) for kept in missed],
            len({kept.cursor.unit for kept in missed}),
        )

    def end(self) -> None:
        """Forget the token and the events."""
        self.presence = Presence.ENDED
        self._kept.clear()
        self.states.clear()
        self._count(-self.kept_bytes)
