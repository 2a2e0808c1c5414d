"""The waiting line: the calls that wait for a slot, and what becomes of each.

Takes no decision on whose turn it is. A waiter holds at most one ticket or one grant, and what it
holds when it leaves goes back at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.checks import check_acquire, parse_ticket_id
from duplane.scheduler.policy import Place, is_served
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantGone,
    GrantPut,
    LeaseStore,
    Ticket,
    TicketGone,
    TicketPut,
    Wish,
)
from duplane.scheduler.view import View

_STOPPING = "the scheduler is stopping"


class Waiter:
    """One call that waits. `changed` is set when there is something new to tell it."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.order: int | None = None
        self.grant: Grant | None = None
        self.is_delivered = False
        self.has_lost_grant = False
        self.failure: FabricError | None = None
        self.changed = asyncio.Event()

    def fail(self, reason: Reason, message: str) -> None:
        """End the wait, unless it has ended."""
        self.failure = self.failure or FabricError(reason, message)
        self.changed.set()


class Line:
    """The waiters of one scheduler.

    At most `limit` tickets wait in the fabric; as many again may come back to places they had.
    """

    def __init__(self, store: LeaseStore, view: View, limit: int) -> None:
        self.limit = limit
        self._store = store
        self._view = view
        self._is_closed = False
        self._waiters: dict[str, Waiter] = {}  # by owner
        self._by_order: dict[int, Waiter] = {}
        view.listeners.append(self._on_change)

    @contextlib.asynccontextmanager
    async def stand(self, request: lease_pb2.AcquireLeaseRequest) -> AsyncGenerator[Waiter]:
        """Give a request its place, or its grant, for the body of the `with`.

        Raises FabricError if it may not stand.
        """
        check_acquire(request)
        order = parse_ticket_id(request.ticket_id) if request.ticket_id else None
        if self._is_closed:
            raise FabricError(Reason.UNAVAILABLE, _STOPPING)
        if self._known(request, order) is None:
            self._admit(request, is_back=order is not None)
        waiter = Waiter(
            Wish(
                request_id=request.request_id,
                owner=secrets.token_hex(8),
                kind=request.kind,
                pool=request.pool,
                session_id=request.session_id,
            )
        )
        self._waiters[waiter.wish.owner] = waiter
        try:
            await self._give_up_former(waiter.wish, order)
            await self._enqueue(waiter, order)
            yield waiter
        finally:
            await self._leave(waiter)

    async def rejoin(self, waiter: Waiter) -> None:
        """Take the old place again: the grant ended before the caller was told of it."""
        waiter.has_lost_grant = False
        await self._enqueue(waiter, waiter.order)

    def abandon(self, request_id: str) -> None:
        """End the waits of a wish that nobody has any more."""
        for waiter in self._waiters.values():
            if waiter.wish.request_id == request_id:
                waiter.fail(Reason.SUPERSEDED, "the wish was given up")

    def close(self) -> None:
        """End every wait with UNAVAILABLE, and refuse new ones."""
        self._is_closed = True
        for waiter in self._waiters.values():
            waiter.fail(Reason.UNAVAILABLE, _STOPPING)

    def place(self, waiter: Waiter) -> Place | None:
        """Return where a waiter stands; None while the store has not told."""
        if waiter.order is None:
            return None
        return self._view.place(waiter.wish.pool, waiter.order)

    async def _leave(self, waiter: Waiter) -> None:
        """Give back what the waiter holds; nothing of a call that was taken over."""
        del self._waiters[waiter.wish.owner]
        if waiter.order is not None and self._by_order.get(waiter.order) is waiter:
            del self._by_order[waiter.order]
        if waiter.grant is None and waiter.order is not None:
            await self._store.cancel(waiter.order, waiter.wish.owner)
        elif waiter.grant and not waiter.is_delivered:
            await self._store.give_back(waiter.grant)

    def _known(self, request: lease_pb2.AcquireLeaseRequest, order: int | None) -> Wish | None:
        """Return the wish that the request repeats or takes over, after checking that it may."""
        field, wish = "request_id", self._view.wishes.get(request.request_id)
        if wish is None and order is not None:
            ticket = self._view.tickets.get(order)
            field, wish = "ticket_id", ticket.wish if ticket else None
        if wish and (wish.kind, wish.pool) != (request.kind, request.pool):
            raise FabricError(
                Reason.INVALID_FIELD, f"{field} names a wish of another kind or pool", field=field
            )
        return wish

    def _admit(self, request: lease_pb2.AcquireLeaseRequest, *, is_back: bool) -> None:
        workers = self._view.workers.values()
        if workers and not is_served(workers, request.pool, request.kind):
            kind = lease_pb2.SessionKind.Name(request.kind)
            raise FabricError(
                Reason.KIND_NOT_SERVED, f"no worker of pool {request.pool!r} serves {kind}"
            )
        if len(self._view.tickets) >= self.limit * (2 if is_back else 1):
            raise FabricError(Reason.QUEUE_FULL, f"{self.limit} wait already")

    async def _give_up_former(self, wish: Wish, order: int | None) -> None:
        """Return an unclaimed grant from the place that `wish` comes back to: nobody wants it."""
        for grant in list(self._view.grants.values()) if order is not None else ():
            ticket = grant.ticket
            is_former = ticket and ticket.order == order and not grant.is_claimed
            if ticket and is_former and ticket.wish.request_id != wish.request_id:
                self._supersede(ticket.wish.owner)
                await self._store.give_back(grant)

    async def _enqueue(self, waiter: Waiter, order: int | None) -> None:
        found = await self._store.enqueue(waiter.wish, order)
        match found:
            case Ticket():
                self._seat(found)
            case Grant(ticket=ticket):
                owner = ticket.wish.owner if ticket else ""
                # Whoever has it undelivered hands it over; else the caller asks a second time.
                waiter.is_delivered = not self._supersede(owner)
                waiter.order = ticket.order if ticket else None
                waiter.grant = found
                if waiter.order is not None:
                    self._by_order[waiter.order] = waiter

    def _seat(self, ticket: Ticket) -> None:
        former = self._by_order.pop(ticket.order, None)
        waiter = self._waiters.get(ticket.wish.owner)
        if former and former is not waiter:
            self._supersede(former.wish.owner)
        if waiter:
            waiter.order = ticket.order
            self._by_order[ticket.order] = waiter
            waiter.changed.set()

    def _supersede(self, owner: str) -> bool:
        """End the wait of a call whose place another has taken. False if it waits no more."""
        waiter = self._waiters.get(owner)
        if waiter:
            waiter.grant = None
            waiter.fail(Reason.SUPERSEDED, "a later call took this one's place")
        return waiter is not None

    def _on_change(self, change: Change, moved: Sequence[Place]) -> None:
        match change:
            case TicketPut(ticket=ticket):
                self._seat(ticket)
            case TicketGone(ticket=ticket, is_granted=False):
                if waiter := self._waiters.get(ticket.wish.owner):
                    waiter.fail(Reason.TICKET_CANCELLED, "the ticket was cancelled")
            case GrantPut(grant=Grant(ticket=Ticket(wish=wish)) as grant):
                if waiter := self._waiters.get(wish.owner):
                    waiter.grant = grant
                    waiter.changed.set()
            case GrantGone(grant=Grant(ticket=Ticket(order=order)) as grant):
                waiter = self._by_order.get(order)
                if waiter and waiter.grant and waiter.grant.token == grant.token:
                    waiter.grant = None
                    waiter.has_lost_grant = not waiter.is_delivered
                    waiter.changed.set()
            case _:
                pass
        for place in moved:
            if waiter := self._by_order.get(place.ticket.order):
                waiter.changed.set()
