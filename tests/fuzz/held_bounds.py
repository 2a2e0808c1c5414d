"""Checks that a session does not store more data of its client than `Limits` allow."""

from __future__ import annotations

from fuzz.event_rules import IllegalError

from duplane.edge.dialects.e_chat import DialectEChat
from duplane.edge.payload.rates import INPUT_RATE_HERTZ
from duplane.edge.routing import AnySession
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.half_duplex_session import HalfDuplexSession
from duplane.edge.session.request_queue import RequestQueue
from duplane.edge.settings import Limits
from duplane.fabric.model import DEFAULT_FORMAT

_EARLY_S = 6.0  # sound before speech that a half duplex session keeps: padding and lookback
UNIT_BYTES = 4 * DEFAULT_FORMAT.unit_sample_count


def check_held(session: AnySession, limits: Limits) -> None:
    """Raise IllegalError for the first exceeded bound."""
    if isinstance(session, ChatSession):
        held = {"turns": (session.turn_count, limits.pending_turn_count + 1)}
        if isinstance(session.dialect, DialectEChat):
            sound_s = limits.chat_audio_s + limits.early_unit_count * 1.5
            most_bytes = limits.chat_media_bytes + int(sound_s * 4 * INPUT_RATE_HERTZ)
            held["bytes of media"] = session.dialect.held_bytes, most_bytes
        if isinstance(session, HalfDuplexSession):
            speech_s = limits.chat_audio_s + limits.append_s + _EARLY_S
            most_bytes = limits.chat_media_bytes + int(speech_s * 4 * INPUT_RATE_HERTZ)
            held["bytes of sound"] = session.held_bytes, most_bytes
    else:
        units, replies = session.moves.queue.held, session.replies
        # While the model is not known, a unit has the rate of the client.
        rate_hertz = session.dialect.input_sound.rate_hertz
        unit_bytes = UNIT_BYTES if session.has_slot else 4 * max(rate_hertz, INPUT_RATE_HERTZ)
        most_units = max(limits.early_unit_count, limits.pending_unit_count)
        held = {
            "units": (units.unit_count, most_units),
            "bytes of a unit": (units.rest_bytes, unit_bytes - 4),
            "pictures": (units.frame_count, limits.frame_count),
            "pending replies": (replies.held_count, replies.LIMIT),
            "units sent": (units.sent_count, RequestQueue.MAX_SENT),
            "requests": (units.request_count, most_units + 2),
        }
    for name, (count, bound) in held.items():
        if count > bound:
            raise IllegalError(f"{count} {name} are held, {bound} is the bound")
