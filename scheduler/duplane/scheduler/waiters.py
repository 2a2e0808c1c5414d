"""The AcquireLease calls that wait in this scheduler, and their tickets and grants.

Each call has a waiter, which holds at most one ticket or one grant. When the call ends, the ticket
is cancelled immediately, or the undelivered grant is given back. This module contains no policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.kinds import kind_name
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.holders import is_open_to, is_proven, is_proven_of_session
from duplane.scheduler.policy.fair_queue import QueueEntry
from duplane.scheduler.policy.needs import MODEL, demand_of, needs_of
from duplane.scheduler.queue_tokens import QueueTokens, read_ticket_key
from duplane.scheduler.quotas import Quotas
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantGone,
    GrantPut,
    LeaseStore,
    Ticket,
    TicketGone,
    TicketPut,
)
from duplane.scheduler.validation import parse_ticket_id

# Puts a request into the queue: takes the owner, the order and the holder, too.
Enqueue = Callable[
    [lease_pb2.AcquireLeaseRequest, str, int | None, bytes], Awaitable[Ticket | Grant]
]
_MAX_NAMED = 20  # models that a refusal lists
MAX_POSITION = 2**31 - 1  # of the contract's int32


class Waiter:
    """One waiting call. `changed` is set when there is something new to send to the caller."""

    def __init__(self, request: lease_pb2.AcquireLeaseRequest, holder: bytes) -> None:
        self.request = request
        self.holder = holder
        self.owner = secrets.token_hex(8)
        self.order: int | None = None
        self.position = MAX_POSITION  # the last position that was sent
        self.grant: Grant | None = None
        self.is_delivered = False
        self.has_lost_place = False  # has lost its ticket or grant, and must enqueue again
        self.failure: FabricError | None = None
        self.changed = asyncio.Event()

    def fail(self, reason: Reason, message: str) -> None:
        """End the wait with an error; the first error counts."""
        self.failure = self.failure or FabricError(reason, message)
        self.changed.set()


class Waiters:
    """The waiting calls of one scheduler.

    At most `limit` tickets wait in the fabric. Callers that return with a ticket from an earlier
    call are accepted until twice as many wait. `quotas` refuses requests above a tenant's limits.
    """

    def __init__(
        self,
        store: LeaseStore,
        state: SchedulerState,
        limit: int,
        quotas: Quotas,
        enqueue: Enqueue | None = None,
        may_return: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """`enqueue` replaces `store.enqueue`, and may grant a slot in the same step.

        `may_return` says whether a ticket that nobody knows keeps its order without a proof.
        """
        self.limit = limit
        self._may_return = may_return
        self._store = store
        self._enqueue_request = enqueue or self._enqueue_in_store
        self._state = state
        self._quotas = quotas
        self._tokens = QueueTokens()
        self._why_refused = ""
        self._waiters: dict[str, Waiter] = {}  # by owner
        self._by_order: dict[int, Waiter] = {}
        self._by_request: dict[str, set[Waiter]] = {}  # by request id
        state.listeners.append(self._on_change)
        state.listeners.append(self._tokens.on_change)
        state.position_listeners.append(self._on_moved)

    @property
    def count(self) -> int:
        """The number of calls that wait."""
        return len(self._waiters)

    @contextlib.asynccontextmanager
    async def waiting(
        self,
        request: lease_pb2.AcquireLeaseRequest,
        holder: bytes = b"",
        proof: bytes = b"",
        queue_token: str = "",
    ) -> AsyncGenerator[Waiter]:
        """Hold a ticket or grant for a valid request during the body of the `with`.

        `proof` belongs to the ticket that the request names, `queue_token` to the ticket of a
        client that comes from another caller. Raises FabricError if the request is refused.
        """
        if queue_token and not request.ticket_id:
            key = await read_ticket_key(self._store)
            order = self._tokens.exchange(key, request, queue_token)
        else:
            order = await self._kept_order(request, holder, proof)
        if self._why_refused:
            raise FabricError(Reason.UNAVAILABLE, self._why_refused)
        request = self._decided(request, order)
        is_known = self._is_known(request, order)
        if not is_known:
            self._admit(request, is_returning=order is not None)
        waiter = Waiter(request, holder)
        self._waiters[waiter.owner] = waiter
        self._by_request.setdefault(request.request_id, set()).add(waiter)
        try:
            try:
                await self._enqueue(waiter, order)
            finally:
                # The slots are given back only now, when the ticket waits again. If they were given
                # back earlier, the next ticket could get them.
                if order is not None:
                    await self._give_back_former_grants(waiter, order)
            if not is_known and order is None and waiter.order is not None:
                is_waiting = waiter.grant is None
                self._quotas.check_order(request, waiter.order, is_waiting=is_waiting)
            yield waiter
        finally:
            await self._leave(waiter)

    async def enqueue_again(self, waiter: Waiter) -> None:
        """Return a waiter to its place in the queue.

        A waiter loses its place if the store drops its ticket, or if its grant ends undelivered.
        """
        waiter.has_lost_place = False
        await self._enqueue(waiter, waiter.order)

    def check_model(self, request: lease_pb2.AcquireLeaseRequest) -> None:
        """Refuse a request that asks for none of the models that are served, if there are several.

        A caller that returns with a ticket may return before the workers of its model attach again,
        so it is not refused. Raises FabricError.
        """
        if request.ticket_id or not (models := self._state.ambiguous_models(request)):
            return
        named = [model for model in models if model]
        more = ", ..." if len(named) > _MAX_NAMED else ""
        served = ", ".join(named[:_MAX_NAMED]) + more
        message = f"no worker serves the model {request.model!r}; served are: {served}"
        raise FabricError(Reason.MODEL_NOT_SERVED, message)

    def cancel_request(self, request_id: str) -> None:
        """End the calls of a request that its caller has cancelled."""
        for waiter in self._by_request.get(request_id, ()):
            waiter.fail(Reason.SUPERSEDED, "the request was cancelled")

    def refuse(self, why: str) -> None:
        """Refuse calls for the reason `why`, or accept calls again if `why` is empty.

        A refusal ends every wait with UNAVAILABLE.
        """
        self._why_refused = why
        for waiter in self._waiters.values() if why else ():
            waiter.fail(Reason.UNAVAILABLE, why)

    def entry(self, waiter: Waiter) -> QueueEntry | None:
        """Return the queue entry of a waiter, or None until the store has published its ticket."""
        ticket = None if waiter.order is None else self._state.tickets.get(waiter.order)
        return self._state.entry(ticket) if ticket else None

    def queue_token(self, ticket: Ticket) -> str:
        """Return a token with which a client returns to the place of `ticket` at another caller."""
        return self._tokens.seal(self._store.ticket_key, ticket)

    async def _leave(self, waiter: Waiter) -> None:
        """Forget a waiter: cancel its ticket, or give its grant back if it was not delivered."""
        del self._waiters[waiter.owner]
        same = self._by_request[waiter.request.request_id]
        same.remove(waiter)
        if not same:
            del self._by_request[waiter.request.request_id]
        if waiter.order is not None and self._by_order.get(waiter.order) is waiter:
            del self._by_order[waiter.order]
        with contextlib.suppress(FabricError):  # without contact, the store does it later
            if waiter.grant is None and waiter.order is not None:
                await self._store.cancel(waiter.order, waiter.owner)
            elif waiter.grant and not waiter.is_delivered:
                await self._store.give_back(waiter.grant)

    def _decided(
        self, request: lease_pb2.AcquireLeaseRequest, order: int | None
    ) -> lease_pb2.AcquireLeaseRequest:
        """Return the request with the model that it names as a need, if a worker has this model.

        So the ticket goes on waiting for this model while its only worker restarts. A request that
        is already known keeps the decision.
        """
        if not request.model:
            return request
        named = lease_pb2.AcquireLeaseRequest()
        named.CopyFrom(request)
        named.needs[MODEL] = request.model
        named.model = ""
        if ticket := self._known_ticket(request, order):
            return named if demand_of(ticket.request) == demand_of(named) else request
        return named if self._state.has_model(request) else request

    def _known_ticket(
        self, request: lease_pb2.AcquireLeaseRequest, order: int | None
    ) -> Ticket | None:
        """Return the ticket of an earlier request with the same id, or that waits at `order`."""
        ticket = self._state.requests.get(request.request_id)
        return ticket or (None if order is None else self._state.tickets.get(order))

    def _is_known(self, request: lease_pb2.AcquireLeaseRequest, order: int | None) -> bool:
        """True if an earlier request has the same `request_id`, or if a ticket waits at `order`.

        Raises FabricError if the earlier request has another kind, pool or needs.
        """
        ticket = self._known_ticket(request, order)
        if ticket is None:
            return False
        if demand_of(ticket.request) != demand_of(request):
            is_repeated = ticket.request.request_id == request.request_id
            field = "request_id" if is_repeated else "ticket_id"
            message = f"{field} names a request of another kind or pool, or with other needs"
            raise FabricError(Reason.INVALID_FIELD, message, field=field)
        if ticket.request.tenant_id != request.tenant_id:
            message = "names another tenant than the request with this request_id or ticket_id"
            raise FabricError(Reason.INVALID_FIELD, f"tenant_id {message}", field="tenant_id")
        return True

    def _admit(self, request: lease_pb2.AcquireLeaseRequest, *, is_returning: bool) -> None:
        # A caller may return before the worker that serves its kind attaches again.
        self.check_model(request)
        is_first = not request.ticket_id
        if is_first and not self._state.may_wait(request):
            kind = kind_name(request.kind)
            message = f"no worker of pool {request.pool!r}{needs_of(request)} serves {kind}"
            raise FabricError(Reason.KIND_NOT_SERVED, message)
        if len(self._state.tickets) >= self.limit * (2 if is_returning else 1):
            raise FabricError(Reason.QUEUE_FULL, f"{self.limit} requests wait already")
        may_wait = self._state.free_candidate(request) is None
        self._quotas.check(request, is_returning=is_returning, may_wait=may_wait)

    async def _kept_order(
        self, request: lease_pb2.AcquireLeaseRequest, holder: bytes, proof: bytes
    ) -> int | None:
        """Return the order to which a request returns; None if it goes to the end of the queue.

        A caller may return with an order that a scheduler has issued to it, or to the former caller
        of the session that it continues. Callers of older releases cannot prove this.
        """
        if not request.ticket_id:
            return None
        order = parse_ticket_id(request.ticket_id)
        key = await read_ticket_key(self._store)
        grants = self._state.grants_of_order(order)
        session = request.session_id, request.tenant_id
        had_slot = (
            is_proven(key, order, holder, proof, is_granted=True)
            or is_proven_of_session(key, order, *session, proof)
            or any(is_open_to(grant.holder, holder) for grant in grants)
        )
        if had_slot:
            return order
        waiting = self._state.tickets.get(order)
        if waiting is None and not grants and self._may_return(order):
            return order
        request.was_granted = False  # or the ticket would come before those of all tenants
        is_own = waiting is not None and is_open_to(waiting.holder, holder)
        return order if is_own or is_proven(key, order, holder, proof) else None

    async def _give_back_former_grants(self, waiter: Waiter, order: int) -> None:
        """Give back the unclaimed grants that earlier requests got for the ticket at `order`.

        The caller returns with this ticket because it could not claim the slot of such a grant.
        """
        request_id = waiter.request.request_id
        for grant in self._state.grants_of_order(order):
            ticket = grant.ticket
            is_former = ticket and ticket.request.request_id != request_id
            is_own = is_open_to(grant.holder, waiter.holder)
            if ticket and is_former and is_own and not grant.is_claimed:
                self._supersede(ticket.owner)
                await self._store.give_back(grant)

    async def _enqueue_in_store(
        self, request: lease_pb2.AcquireLeaseRequest, owner: str, order: int | None, holder: bytes
    ) -> Ticket | Grant:
        return await self._store.enqueue(request, owner, order, holder=holder)

    async def _enqueue(self, waiter: Waiter, order: int | None) -> None:
        found = await self._enqueue_request(waiter.request, waiter.owner, order, waiter.holder)
        while isinstance(found, Grant) and found.claims.lease_id not in self._state.grants:
            # The grant has ended.
            found = await self._enqueue_request(waiter.request, waiter.owner, order, waiter.holder)
        match found:
            case Ticket(order=taken):
                waiter.order = taken
                is_known = taken in self._state.tickets or waiter.grant or waiter.failure
                if not is_known:  # the events that show the end of the ticket were missed
                    waiter.has_lost_place = True
            case Grant(ticket=Ticket(order=taken, owner=owner)) if owner == waiter.owner:
                waiter.order = taken  # granted at once; the store has published the grant
            case Grant(ticket=ticket) as grant:
                # If an earlier call has not delivered the grant yet, that call ends and this call
                # delivers the grant. Otherwise the grant was delivered, and the caller asks again.
                waiter.is_delivered = not (ticket and self._supersede(ticket.owner))
                waiter.order = ticket.order if ticket else None
                waiter.grant = grant
                if waiter.order is not None:
                    self._by_order[waiter.order] = waiter

    def _supersede(self, owner: str) -> bool:
        """End the call of `owner`, because another call takes its ticket or grant.

        Returns False if the call has already ended.
        """
        waiter = self._waiters.get(owner)
        if waiter:
            waiter.grant = None
            waiter.fail(Reason.SUPERSEDED, "a later call took this one's place")
        return waiter is not None

    def _on_change(self, change: Change) -> None:
        match change:
            case TicketPut(ticket=ticket):
                self._on_ticket(ticket)
            case TicketGone(ticket=ticket, is_granted=False, is_expired=is_expired):
                self._on_ticket_gone(ticket, is_expired)
            case GrantPut(grant=Grant(ticket=Ticket(order=order, owner=owner)) as grant):
                if waiter := self._waiters.get(owner):
                    self._by_order[order] = waiter
                    waiter.grant = grant
                    waiter.changed.set()
            case GrantGone(grant=Grant(ticket=Ticket(order=order)) as grant):
                self._on_grant_gone(order, grant)
            case _:
                pass

    def _on_moved(self, moved: Sequence[QueueEntry]) -> None:
        for entry in moved:
            if waiter := self._by_order.get(entry.ticket.order):
                waiter.changed.set()

    def _on_ticket(self, ticket: Ticket) -> None:
        former = self._by_order.pop(ticket.order, None)
        waiter = self._waiters.get(ticket.owner)
        if former and former is not waiter:
            self._supersede(former.owner)
        if waiter:
            self._by_order[ticket.order] = waiter
            waiter.changed.set()

    def _on_ticket_gone(self, ticket: Ticket, is_expired: bool) -> None:
        waiter = self._waiters.get(ticket.owner)
        if waiter and is_expired:
            waiter.has_lost_place = True
            waiter.changed.set()
        elif waiter:
            waiter.fail(Reason.TICKET_CANCELLED, "the ticket was cancelled")

    def _on_grant_gone(self, order: int, grant: Grant) -> None:
        waiter = self._by_order.get(order)
        if waiter and waiter.grant and waiter.grant.claims.lease_id == grant.claims.lease_id:
            # Even if an earlier call has delivered the grant, this call has not yet done so.
            waiter.grant = None
            waiter.is_delivered = False
            waiter.has_lost_place = True
            waiter.changed.set()
