"""The dialects' tables, read as the law: where an event may lead, and what may be said there."""

from __future__ import annotations

from duplane.edge.dialects.b import APPEND, INIT, DialectB
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.dialect import HAPPENINGS, Dialect, Phase


def is_implied(dialect: type[Dialect], before: Phase, kind: str | None) -> bool:
    """Tell whether this is a first `input.append`, which stands for an empty `session.init` too."""
    return dialect is DialectB and before is Phase.START and kind == APPEND


def is_legal(dialect: type[Dialect], before: Phase, kind: str) -> bool:
    return (before, kind) in dialect.transitions or is_implied(dialect, before, kind)


def reachable(dialect: type[Dialect], before: Phase, kind: str | None) -> set[Phase]:
    """Return where one event of a client, and what it leads to at once, may bring a session."""
    if is_implied(dialect, before, kind):
        kind = INIT
    firsts = {before, dialect.transitions.get((before, kind or ""), before)}
    return firsts | {after for (phase, _), after in HAPPENINGS.items() if phase in firsts}


def may_say(dialect: type[Dialect], before: Phase, kind: str | None, told: str) -> bool:
    """Tell whether `told` may be said on the way from `before`."""
    return bool(reachable(dialect, before, kind) & dialect.server_events[told])


def may_answer(dialect: type[Dialect], kind: str, told: str) -> bool:
    """Tell whether a client's event may be answered at once by `told`."""
    is_first_turn = dialect is DialectBChat and kind == APPEND and told == "session.created"
    is_end = told in ("error", "session.closed")
    return is_end or is_first_turn or told in dialect.answers.get(kind, ())
