"""Checks the laws of a simulated fabric after every step. The laws must hold despite all faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import ParamSpec

from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.policy.needs import needs_of
from duplane.scheduler.policy.turns import place
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantGone,
    GrantPut,
    Ticket,
    TicketGone,
    TicketPut,
    Worker,
)
from duplane.scheduler.waiters import Waiters

OCCUPIED = registry_pb2.SLOT_STATE_OCCUPIED
SlotKey = tuple[str, int]
Arguments = ParamSpec("Arguments")
# Twice the number of slots: grants of all slots may be in progress together, and a scheduler that
# reads everything again sees all grants before it sees that a ticket has ended.
MAX_OVERTAKEN = 12
MAX_PASSED = 1  # grants to each other tenant while a ticket is the first of its tenant


class BrokenLawError(Exception):
    """A law of the fabric is broken."""


def require(is_met: object, law: str) -> None:
    """Raise BrokenLawError with `law` unless it holds."""
    if not is_met:
        raise BrokenLawError(law)


class View:
    """The state that one scheduler has published so far."""

    def __init__(self, highest: dict[SlotKey, int], max_overtaken: int) -> None:
        self.live: dict[SlotKey, Grant] = {}
        self.highest = highest  # highest fencing numbers
        self.max_overtaken = max_overtaken
        # How many later tickets got a slot first, by the order number of the ticket that waits.
        self.overtaken: Counter[int] = Counter()
        # How many tickets of each other tenant got a slot while a ticket was the first of its
        # tenant, by its order number.
        self.passed: dict[int, Counter[str]] = {}

    def forget(self, ticket: Ticket) -> None:
        """Forget which tickets were granted while this ticket waited."""
        self.overtaken.pop(ticket.order, None)
        self.passed.pop(ticket.order, None)


class Laws:
    """Checks the changes of the schedulers' stores, and the observations of workers and callers.

    `broken` is the first law that was broken. It is stored, because a scheduler's tasks may hide
    exceptions.
    """

    def __init__(self) -> None:
        self.broken: BrokenLawError | None = None
        self.grant_count = 0
        self.history: list[str] = []  # the kind of every change, in order
        # The highest fencing number of each slot. A lone scheduler has to obey it after a restart.
        self._highest: dict[SlotKey, int] = {}
        self._leases: dict[tuple[SlotKey, int], str] = {}  # lease ids, by slot and fencing number
        self._sessions: dict[SlotKey, int] = {}
        self._seen: dict[SlotKey, int] = {}  # highest number that was claimed or revoked

    def scheduler_began(self, state: SchedulerState, *, is_alone: bool) -> None:
        """Check every change of a scheduler, from its start.

        If schedulers share a store, one of them may grant slots to later tickets before it receives
        the change that an earlier ticket has returned to its place.
        """
        view = View(self._highest if is_alone else {}, 0 if is_alone else MAX_OVERTAKEN)
        state.listeners.append(lambda change: self._noted(self._check, change, state, view))

    def session_began(self, worker_id: str, slot: int, number: int) -> None:
        """Check that no other session holds the slot.

        No earlier session may have had a later lease.
        """
        key = (worker_id, slot)
        self._noted(require, key not in self._sessions, f"two sessions on slot {slot}")
        is_later = number > self._seen.get(key, 0)
        self._noted(require, is_later, "a session began with an earlier lease")
        self._sessions[key] = self._seen[key] = number

    def number_revoked(self, worker_id: str, slot: int, number: int) -> None:
        """Record that a worker was told to refuse leases with this number and lower ones."""
        key = (worker_id, slot)
        self._seen[key] = max(number, self._seen.get(key, 0))

    def slot_cleaned(self, worker_id: str, slot: int) -> None:
        """Record that a slot is clean, or that the process of its worker has died."""
        self._sessions.pop((worker_id, slot), None)

    def position_shown(self, before: int | None, after: int) -> None:
        """Check that a ticket's position has not grown between two messages of one scheduler."""
        self._noted(require, before is None or after <= before, "a position has grown")

    def place_shown(self, before: str, after: str) -> None:
        """Check the tickets of a caller: a caller that returns keeps its ticket."""
        self._noted(require, before in ("", after), "a caller has lost its place")

    def reports_of(self, state: SchedulerState) -> Callable[[registry_pb2.AttachRequest], None]:
        """Return a check for one attach stream: call it when a message was applied to `state`.

        An occupied slot must have a grant in `state`. A grant may end at the moment of a message,
        so the check fails only if the same lease has no grant at two messages in a row.
        """
        register = registry_pb2.Register()
        missing: Collection[str] = ()  # leases without a grant

        def check(message: registry_pb2.AttachRequest) -> None:
            nonlocal missing
            register.MergeFrom(message.register)
            former, missing = missing, set[str]()
            worker = state.workers.get(register.worker_id)
            if worker and _is_of_stream(worker, register):
                held = message.register.slots or message.report.slots
                missing = {
                    one.lease_id
                    for one in held
                    if one.state == OCCUPIED and not state.grant_of(worker.worker_id, one.slot)
                }
            require(missing.isdisjoint(former), "an occupied slot has no grant")

        return lambda message: self._noted(check, message)

    def left(self, state: SchedulerState, waiters: Waiters) -> str:
        """Return what a scheduler holds for callers that have gone, as a text that may be empty."""
        held = {
            "tickets": state.tickets,
            "grants": state.grants,
            "requests": state.requests,
            "waiting pools": state.waiting_pools,
            "waiting calls": waiters.count,
            "sessions": self._sessions,
        }
        return next((name for name, left in held.items() if left), "")

    def _noted(
        self,
        check: Callable[Arguments, None],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> None:
        try:
            check(*arguments, **named)
        except BrokenLawError as broken:
            self.broken = self.broken or broken
            raise

    def _check(self, change: Change, state: SchedulerState, view: View) -> None:
        self.history.append(type(change).__name__)
        match change:
            case GrantPut(grant=grant):
                self._check_grant(grant, state, view)
                if grant.ticket:
                    self._check_request(grant.ticket, view, 1)
            case GrantGone(grant=grant):
                del view.live[_slot(grant)]
            case TicketPut(ticket=ticket):
                view.forget(ticket)
                self._check_request(ticket, view, 0)
            case TicketGone(ticket=ticket):
                view.forget(ticket)
            case _:
                pass

    def _check_grant(self, grant: Grant, state: SchedulerState, view: View) -> None:
        key = _slot(grant)
        number = grant.claims.fencing_number
        present = view.live.get(key)
        is_same = present is not None and present.claims.fencing_number == number
        require(present is None or is_same, "two live grants on one slot")
        view.live[key] = grant
        if is_same or grant.ticket is None:
            return
        self.grant_count += 1
        require(number > view.highest.get(key, 0), "a fencing number did not rise")
        view.highest[key] = number
        lease_id = self._leases.setdefault((key, number), grant.claims.lease_id)
        require(lease_id == grant.claims.lease_id, "two leases have one number")
        for ahead in state.tickets.values():
            if _is_ahead(ahead, grant.ticket):
                view.overtaken[ahead.order] += 1
                is_rare = view.overtaken[ahead.order] <= view.max_overtaken
                require(is_rare, "a ticket was overtaken")
        self._check_turns(grant.ticket, state, view)

    def _check_turns(self, granted: Ticket, state: SchedulerState, view: View) -> None:
        """Check that tenants take turns: nobody is passed by the backlog of another tenant."""
        tenant_id = place(granted)
        firsts: dict[str | None, int] = {}
        for waiting in state.tickets.values():
            line = place(waiting)
            firsts[line] = min(firsts.get(line, waiting.order), waiting.order)
        for waiting in state.tickets.values():
            line = place(waiting)
            if line is None or firsts[line] != waiting.order:
                view.passed.pop(waiting.order, None)
            elif tenant_id not in (None, line):
                passed = view.passed.setdefault(waiting.order, Counter())
                passed[tenant_id or ""] += 1
                is_rare = passed[tenant_id or ""] <= MAX_PASSED + view.max_overtaken
                require(is_rare, "a tenant did not get its turn")

    def _check_request(self, ticket: Ticket, view: View, grant_count: int) -> None:
        """Check that a request has `grant_count` grants, even if its caller has repeated it."""
        request_id = ticket.request.request_id
        tickets = (grant.ticket for grant in view.live.values())
        served = [one for one in tickets if one and one.request.request_id == request_id]
        require(len(served) == grant_count, "one request is served twice")


def _slot(grant: Grant) -> SlotKey:
    return grant.claims.worker_id, grant.claims.slot


def _is_ahead(one: Ticket, other: Ticket) -> bool:
    """True if one ticket is granted before the other: both of one tenant, or one has returned."""
    if _demand(one.request) != _demand(other.request):
        return False
    if place(one) == place(other):
        return one.order < other.order
    return place(one) is None


def _is_of_stream(worker: Worker, register: registry_pb2.Register) -> bool:
    one, other = worker.register, register
    return (one.incarnation, one.stream_number) == (other.incarnation, other.stream_number)


def _demand(request: lease_pb2.AcquireLeaseRequest) -> object:
    return request.pool, request.kind, needs_of(request)
