"""One request of chat that is answered at once and whole. Pure, as `chat_session.py` is."""

from __future__ import annotations

from duplane.edge.chat_session import ChatSession
from duplane.edge.dialects.d_http import DialectDHttp, Waited
from duplane.edge.dialects.dialect import Identity, Moment
from duplane.edge.modes import CHAT_MODE
from duplane.edge.settings import Limits
from duplane.fabric.v1 import lease_pb2, session_pb2


class AskedSession(ChatSession):
    """A chat of one turn whose client hears nothing until it is over."""

    def __init__(self, identity: Identity, limits: Limits, now: Moment) -> None:
        super().__init__(identity, limits, CHAT_MODE, now, DialectDHttp)
        self._asked = now
        self._estimated_wait_s: float | None = None

    def queued(self, queued: lease_pb2.Queued, now: Moment) -> list[bytes]:
        """Remember the first estimate."""
        super().queued(queued, now)
        if self._estimated_wait_s is None:
            self._estimated_wait_s = queued.estimated_wait.ToMicroseconds() / 1e6
        return []

    def _queue_update(self, queued: lease_pb2.Queued, now: Moment) -> list[bytes]:
        super()._queue_update(queued, now)
        return []

    def granted(self, open_s: float, now: Moment) -> list[bytes]:
        """Take the slot."""
        super().granted(open_s, now)
        return []

    def next_turn(self, now: Moment) -> session_pb2.ChatRequest | None:
        """Return the turn once there is a slot for it; a turn that is tried again waited longer."""
        request = super().next_turn(now)
        if request is not None and isinstance(self.chat, DialectDHttp):
            waited_s = now.monotonic_s - self._asked.monotonic_s
            self.chat.waited = Waited(now, waited_s, self._estimated_wait_s or 0.0)
        return request
