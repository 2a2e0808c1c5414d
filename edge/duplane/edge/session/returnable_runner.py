"""Runs a session that may lose its socket, and get another one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import NamedTuple

from duplane.edge.clock import Clock, Moment
from duplane.edge.close import CLOSE_CODES, GONE, TOO_SLOW, Close, CloseReason
from duplane.edge.dialects.actions import Return
from duplane.edge.metrics import EdgeMetrics
from duplane.edge.session.attachment import Attachment
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.runner import ReplacedError, SessionRunner
from duplane.edge.settings import Limits
from duplane.edge.spans import SessionSpans
from duplane.edge.transport.client import NO_CLIENT, Client
from duplane.edge.transport.outbox import OutboxFullError
from duplane.fabric.client import FabricClient
from duplane.fabric.converse import ConverseStream

_log = logging.getLogger(__name__)


class Adoption(NamedTuple):
    """A session that another edge had: the events for its client, and its call, if it has one.

    `is_safe` is set when the session has another slot, so that its former worker needs no copy.
    """

    events: list[bytes]
    stream: ConverseStream | None
    is_safe: asyncio.Event


class ReturnableRunner(SessionRunner[DuplexSession]):
    """The part of the runner of a duplex session that concerns its sockets."""

    def __init__(
        self,
        session: DuplexSession,
        client: Client,
        limits: Limits,
        fabric: FabricClient,
        spans: SessionSpans,
        clock: Clock,
        metrics: EdgeMetrics,
    ) -> None:
        super().__init__(session, client, limits, fabric, spans, clock, metrics)
        self.adoption: Adoption | None = None  # set before `run` if another edge had the session
        self._attachment: Attachment | None = Attachment(self, client)
        self._closing: set[asyncio.Task[None]] = set()  # sockets that the session has left

    async def _serve(self) -> None:
        if self._attachment:
            with contextlib.suppress(ReplacedError):
                await self._attachment.serve()

    @property
    def _leaves_client(self) -> bool:
        return super()._leaves_client or self.session.returned is not None

    async def _close(self, close: Close) -> None:
        if self._attachment:
            await self._attachment.close(close, self.session.close_code)
        if self._closing:
            await asyncio.wait(self._closing)

    def disconnected(self, close: Close) -> None:
        """Keep the session for a while if its client may return; otherwise end it."""
        now = self._clock.now()
        if close.may_return and self._detach(now, GONE):
            self._apply([], now)
        else:
            self.end(close)

    def _too_slow(self, now: Moment) -> None:
        if not self._detach(now, TOO_SLOW):
            super()._too_slow(now)

    def _detach(self, now: Moment, close: Close) -> bool:
        """Go on without a socket. Return False if the session ends with it."""
        if not self.session.detach(now):
            return False
        _log.info("the client is away")
        self._drop_socket(close)
        self._client = NO_CLIENT
        return True

    def _drop_socket(self, close: Close) -> None:
        """Close the present socket, if there is one. The session continues."""
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        attachment.is_current = False
        closing = asyncio.create_task(attachment.close(close, CLOSE_CODES[close.reason]))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _connected(self, now: Moment) -> list[bytes]:
        return self.adoption.events if self.adoption else super()._connected(now)

    def resume(self, client: Client, returned: Return) -> Attachment:
        """Give the session another socket, unless the session refuses.

        All changes are made before this method returns, so that nothing can interrupt them.
        """
        now = self._clock.now()
        if self._attachment:
            with contextlib.suppress(OutboxFullError):
                self._attachment.client.send(self.session.replaced(now))
            self._drop_socket(Close(CloseReason.REPLACED))
        self.generation += 1
        self._client = client
        self._attachment = attachment = Attachment(self, client)
        resumed, *missed = self.session.resume(returned, now)
        self._apply([resumed], now)
        if missed:  # they are recorded already
            try:
                client.send(missed)
            except OutboxFullError:
                self._too_slow(now)
                self._apply([], now)
        self._wake.set()
        return attachment

    def go_away(self, after_s: float) -> None:
        """Ask the client to go to another edge in `after_s` seconds."""
        now = self._clock.now()
        self._apply(self.session.go_away(after_s, now), now)
