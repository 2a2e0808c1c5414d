"""What is spoken at each URL, and the session that begins there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from duplane.edge.chat_session import ChatSession
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.d import DialectD
from duplane.edge.dialects.dialect import Dialect, Identity, Moment
from duplane.edge.ends import End, Ending
from duplane.edge.entry import Route
from duplane.edge.modes import CHAT_MODE, DUPLEX_MODES, MODES, Mode
from duplane.edge.session import Session
from duplane.edge.settings import Limits


@dataclass(frozen=True, slots=True)
class Place:
    """One URL in one mode; without a dialect the client's first event decides."""

    dialect: type[Dialect] | None
    mode: Mode

    def begin(self, identity: Identity, limits: Limits, now: Moment) -> Session:
        """Return a session that begins here."""
        if self.dialect is not None and issubclass(self.dialect, ChatDialect):
            return ChatSession(identity, limits, self.mode, now, self.dialect)
        return Session(identity, limits, self.mode, now, self.dialect)


PLACES: Mapping[tuple[Route, str], Place] = {
    **{(Route.REALTIME, name): Place(None, mode) for name, mode in MODES.items()},
    (Route.REALTIME, "chat"): Place(DialectBChat, CHAT_MODE),
    **{(Route.DUPLEX, name): Place(DialectC, mode) for name, mode in DUPLEX_MODES.items()},
    (Route.CHAT, "chat"): Place(DialectD, CHAT_MODE),
}


def no_such_mode(mode: str) -> Ending:
    """Return the end of a session that never began: `mode` is not served at its URL."""
    return Ending(End.MODE_REFUSED, f"Unsupported realtime mode: {mode}")


# What a client is refused in, where no session begins.
REFUSING: Mapping[Route, type[Dialect]] = {
    Route.REALTIME: DialectA,
    Route.DUPLEX: DialectC,
    Route.CHAT: DialectD,
}
