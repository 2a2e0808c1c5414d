"""Reads rules from the tables of the dialects: the phases after an event, and its legal answers."""

from __future__ import annotations

from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.b_events import APPEND, INIT
from duplane.edge.dialects.dialect import LIFECYCLE, Dialect, Phase


def is_implied(dialect: type[Dialect], before: Phase, kind: str | None) -> bool:
    """Return whether the event is B's first `input.append`. It implies an empty `session.init`."""
    return dialect is DialectB and before is Phase.START and kind == APPEND


def is_legal(dialect: type[Dialect], before: Phase, kind: str) -> bool:
    return (before, kind) in dialect.transitions or is_implied(dialect, before, kind)


def reachable(dialect: type[Dialect], before: Phase, kind: str | None) -> set[Phase]:
    """Return the phases in which a session may be right after an event of the client."""
    if is_implied(dialect, before, kind):
        kind = INIT
    firsts = {before, dialect.transitions.get((before, kind or ""), before)}
    return firsts | {after for (phase, _), after in LIFECYCLE.items() if phase in firsts}


def may_say(dialect: type[Dialect], before: Phase, kind: str | None, told: str) -> bool:
    """Return whether the server may send an event of type `told` after this event of the client."""
    return bool(reachable(dialect, before, kind) & dialect.server_events[told])


def may_answer(dialect: type[Dialect], kind: str, told: str) -> bool:
    """Return whether an event of type `told` is a legal immediate answer to a client's event."""
    is_first_turn = dialect is DialectBChat and kind == APPEND and told == "session.created"
    is_end = told in ("error", "session.closed")
    return is_end or is_first_turn or told in dialect.replies.get(kind, ())
