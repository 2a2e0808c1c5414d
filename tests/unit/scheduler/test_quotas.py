"""Quotas: what a tenant uses is counted from the changes of the store, and limits hold exactly."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pytest
from support.scheduler.scheduler_harness import AUDIO

from duplane.fabric.durations import to_duration
from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.quotas import Quotas, waiting_limit
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import (
    Grant,
    GrantEnd,
    GrantGone,
    GrantPut,
    TenantTime,
    Ticket,
    TicketGone,
    TicketPut,
    TimePut,
)
from duplane.scheduler.store.memory import MemoryStore

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp()
DAY = int(NOON // 86_400)


class SavingStore(MemoryStore):
    """A store that keeps the times of tenants for the test."""

    def __init__(self) -> None:
        super().__init__(1)
        self.saved: list[TenantTime] = []

    async def save_time(self, time: TenantTime) -> bool:
        self.saved.append(time)
        return True


class Counted:
    """Quotas that count the changes which the test makes."""

    def __init__(self, waiting_limit: int = 100) -> None:
        self.now = NOON
        self.store = SavingStore()
        self.state = SchedulerState(lambda: 0.0)
        self.quotas = Quotas(self.store, self.state, waiting_limit, lambda: self.now)

    def wait(self, order: int, tenant_id: str = "a") -> Ticket:
        request = lease_pb2.AcquireLeaseRequest(
            request_id=f"r{order}", kind=AUDIO, tenant_id=tenant_id
        )
        ticket = Ticket(order, "", request)
        self.state.apply(TicketPut(order, ticket))
        return ticket

    def grant(self, ticket: Ticket | None, number: int, *, is_claimed: bool = True) -> Grant:
        """Grant a slot; without a ticket, adopt a session of tenant `a`."""
        claims = lease_pb2.LeaseClaims(lease_id=f"l{number}", fencing_number=number, slot=number)
        claims.kind = AUDIO
        if ticket:
            claims.expire_time.FromNanoseconds(int((self.now + 5) * 1e9))
            claims.claim_timeout.CopyFrom(to_duration(5))
        else:
            claims.tenant_id = "a"
        grant = Grant(claims, ticket, is_claimed=is_claimed)
        self.state.apply(GrantPut(number, grant))
        if ticket and ticket.order in self.state.tickets:
            self.state.apply(TicketGone(number, ticket, is_granted=True))
        return grant

    def end(self, grant: Grant) -> None:
        number = grant.claims.fencing_number
        self.state.apply(GrantGone(number, grant, GrantEnd.RELEASED))

    def refusal(self, *, is_returning: bool = False, may_wait: bool = True, **limits: int) -> str:
        """Return the limit for which a request of tenant `a` is refused; empty if it is not."""
        request = lease_pb2.AcquireLeaseRequest(
            tenant_id="a", tenant_limits=lease_pb2.TenantLimits(**limits)
        )
        try:
            self.quotas.check(request, is_returning=is_returning, may_wait=may_wait)
        except FabricError as error:
            return error.field
        return ""


def test_slots_and_tickets_of_the_tenant_count_together() -> None:
    counted = Counted()
    first, _, _ = counted.wait(1), counted.wait(2), counted.wait(3, "b")
    grant = counted.grant(first, 10)
    assert counted.refusal(session_count=3, waiting_count=2) == ""
    assert counted.refusal(session_count=2) == "tenant_limits.session_count"
    assert counted.refusal(waiting_count=1) == "tenant_limits.waiting_count"
    counted.end(grant)
    assert counted.refusal(session_count=2) == ""


def test_absent_limit_is_none_and_zero_allows_nothing() -> None:
    counted = Counted()
    assert counted.refusal() == ""
    assert counted.refusal(session_count=0) == "tenant_limits.session_count"
    assert counted.refusal(waiting_count=0) == "tenant_limits.waiting_count"
    assert counted.refusal(waiting_count=0, may_wait=False) == ""
    assert counted.refusal(daily_minutes=0) == "tenant_limits.daily_minutes"


def test_request_without_a_tenant_has_no_limit() -> None:
    counted = Counted(waiting_limit=1)
    counted.wait(1, "")
    request = lease_pb2.AcquireLeaseRequest(tenant_limits={"session_count": 0})
    counted.quotas.check(request, is_returning=False, may_wait=True)


def test_a_tenant_has_its_share_of_the_queue() -> None:
    assert waiting_limit(10_000, 0.1) == 1000
    assert waiting_limit(5, 0.1) == 1
    counted = Counted(waiting_limit=2)
    counted.wait(1)
    assert counted.refusal(waiting_count=5) == ""
    counted.wait(2)
    assert counted.refusal(waiting_count=5) == "tenant_limits.waiting_count"


def test_session_that_moves_counts_once_and_adopted_sessions_count() -> None:
    counted = Counted()
    ticket = counted.wait(1)
    counted.grant(ticket, 10)
    counted.wait(1)  # the session has lost its worker, and waits for another one
    assert counted.refusal(session_count=2) == ""
    counted.grant(None, 11)
    assert counted.refusal(session_count=2) == "tenant_limits.session_count"


def test_caller_that_returns_is_refused_above_twice_the_limit() -> None:
    counted = Counted()
    for order in range(1, 4):
        counted.wait(order)
    assert counted.refusal(session_count=2, is_returning=True) == ""
    counted.wait(4)
    assert counted.refusal(session_count=2, is_returning=True) == "tenant_limits.session_count"
    assert counted.refusal(daily_minutes=0, is_returning=True) == ""


@pytest.mark.parametrize("is_waiting", [True, False])
def test_of_requests_that_arrive_together_the_first_stay(is_waiting: bool) -> None:
    counted = Counted()
    for order in range(1, 6):
        counted.wait(order)
    limits = {"waiting_count": 3} if is_waiting else {"session_count": 3}
    request = lease_pb2.AcquireLeaseRequest(tenant_id="a", tenant_limits=limits)
    stays: list[int] = []
    for order in range(1, 6):
        with contextlib.suppress(FabricError):
            counted.quotas.check_order(request, order, is_waiting=is_waiting)
            stays.append(order)
    assert stays == [1, 2, 3]


def test_minutes_of_ended_and_running_sessions_count() -> None:
    counted = Counted()
    first = counted.grant(counted.wait(1), 10)
    counted.grant(counted.wait(2), 11)
    counted.grant(counted.wait(3), 12, is_claimed=False)
    counted.now += 90
    counted.end(first)
    counted.now += 29
    assert counted.quotas.held_s("a") == pytest.approx(90 + 119)
    assert counted.refusal(daily_minutes=4) == ""
    counted.now += 31
    assert counted.refusal(daily_minutes=4) == "tenant_limits.daily_minutes"


def test_minutes_begin_again_at_midnight() -> None:
    counted = Counted()
    ended, _ = counted.grant(counted.wait(1), 10), counted.grant(counted.wait(2), 11)
    counted.now += 60
    counted.end(ended)
    counted.now = NOON + 43_200 + 7
    assert counted.quotas.held_s("a") == pytest.approx(7)


async def test_times_are_saved_once_and_higher_saved_times_are_taken_over() -> None:
    counted = Counted()
    grant = counted.grant(counted.wait(1), 10)
    counted.now += 60
    counted.end(grant)
    await counted.quotas.save()
    await counted.quotas.save()
    (saved,) = counted.store.saved
    assert (saved.tenant_id, saved.day, saved.held_s) == ("a", DAY, pytest.approx(60))
    for time in (TenantTime("a", DAY, 100.0), TenantTime("a", DAY, 50.0)):
        counted.state.apply(TimePut(20, time))
    counted.state.apply(TimePut(21, TenantTime("a", DAY - 1, 1000.0)))
    assert counted.quotas.held_s("a") == 100


def test_nothing_is_kept_of_a_tenant_that_has_left() -> None:
    counted = Counted()
    ticket = counted.wait(1)
    counted.end(counted.grant(ticket, 10, is_claimed=False))
    assert not counted.quotas.waiting_tenant_count
    assert not counted.quotas.holding_tenant_count
    assert not counted.quotas.highest_waiting_count
    assert counted.refusal(session_count=1) == ""
