"""Checks that a session does not store more data of its client than `Limits` allow."""

from __future__ import annotations

from fuzz.event_rules import IllegalError

from duplane.edge.routing import AnySession
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.settings import Limits
from duplane.fabric.model import DEFAULT_FORMAT

UNIT_BYTES = 4 * DEFAULT_FORMAT.unit_sample_count


def check_held(session: AnySession, limits: Limits) -> None:
    """Raise IllegalError for the first exceeded bound."""
    if isinstance(session, ChatSession):
        held = {"turns": (len(session._turns), limits.pending_turn_count + 1)}
    else:
        units, replies = session.moves.queue, session._replies
        assembler = units._assembler
        most_units = max(limits.early_unit_count, limits.pending_unit_count)
        held = {
            "units": (len(units._waiting), most_units),
            "bytes of a unit": (assembler._held_bytes, UNIT_BYTES - 4),
            "pictures": (len(assembler._frames), limits.frame_count),
            "pending replies": (len(replies._ends), replies._LIMIT),
            "outcomes": (len(replies._outcomes), replies._LIMIT),
            "units sent": (len(units.sent), units._MAX_SENT),
            "requests": (len(units._requests), most_units + 2),
        }
    for name, (count, bound) in held.items():
        if count > bound:
            raise IllegalError(f"{count} {name} are held, {bound} is the bound")
