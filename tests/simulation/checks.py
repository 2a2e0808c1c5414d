"""Checks of the laws that a simulated fabric must keep at every step, whatever fails."""

from __future__ import annotations

from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.policy.needs import needs_of
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Change, Grant, GrantGone, GrantPut, Ticket
from duplane.scheduler.waiters import Waiters


class BrokenLawError(Exception):
    """A law of the fabric is broken."""


def require(is_met: object, law: str) -> None:
    """Raise BrokenLawError with `law` unless it holds."""
    if not is_met:
        raise BrokenLawError(law)


class Laws:
    """Checks the changes of the scheduler's store, and the observations of workers and callers.

    `_highest` has the highest granted fencing number of each slot; they also rise after a restart
    of the scheduler. `broken` is the first broken law: tasks of the scheduler may hide exceptions.
    """

    def __init__(self) -> None:
        self.broken: BrokenLawError | None = None
        self.grant_count = 0
        self.history: list[str] = []  # the kind of every change, in order
        self._highest: dict[tuple[str, int], int] = {}
        self._sessions: dict[tuple[str, int], str] = {}

    def scheduler_began(self, state: SchedulerState) -> None:
        """Check every change of a scheduler, from its start."""
        live: dict[tuple[str, int], Grant] = {}
        state.listeners.append(lambda change: self._noted(self._check, change, state, live))

    def session_began(self, worker_id: str, slot: int, lease_id: str) -> None:
        """Check that no other session holds the slot."""
        key = (worker_id, slot)
        self._noted(require, key not in self._sessions, f"two sessions on slot {slot}")
        self._sessions[key] = lease_id

    def slot_cleaned(self, worker_id: str, slot: int) -> None:
        """Record that a slot is clean, or that its process has died."""
        self._sessions.pop((worker_id, slot), None)

    def position_shown(self, before: int | None, after: int) -> None:
        """Check two positions that one scheduler showed for one ticket."""
        self._noted(require, before is None or after <= before, "a position has grown")

    def check_left(self, state: SchedulerState, waiters: Waiters) -> None:
        """Check that the scheduler holds nothing after all callers have gone."""
        for name, left in {
            "tickets": state.tickets,
            "grants": state.grants,
            "requests": state.requests,
            "waiting pools": state.waiting_pools,
            "waiting calls": waiters.count,
            "sessions": self._sessions,
        }.items():
            require(not left, f"{name} are left: {left}")

    def _noted(self, check: object, *arguments: object) -> None:
        try:
            check(*arguments)  # type: ignore[operator]  # pyright: ignore[reportCallIssue, reportGeneralTypeIssues]
        except BrokenLawError as broken:
            self.broken = self.broken or broken
            raise

    def _check(
        self, change: Change, state: SchedulerState, live: dict[tuple[str, int], Grant]
    ) -> None:
        self.history.append(type(change).__name__)
        match change:
            case GrantPut(grant=grant):
                self._check_grant(grant, state, live)
            case GrantGone(grant=grant):
                del live[_slot(grant)]
            case _:
                pass

    def _check_grant(
        self, grant: Grant, state: SchedulerState, live: dict[tuple[str, int], Grant]
    ) -> None:
        key, number = _slot(grant), grant.claims.fencing_number
        present = live.get(key)
        is_same = present is not None and present.claims.fencing_number == number
        require(present is None or is_same, "two live grants on one slot")
        live[key] = grant
        if is_same or grant.ticket is None:
            return
        self.grant_count += 1
        require(number > self._highest.get(key, 0), "a fencing number did not rise")
        self._highest[key] = number
        ahead = [one for one in state.tickets.values() if _is_ahead(one, grant.ticket)]
        require(not ahead, "a ticket was overtaken")


def _slot(grant: Grant) -> tuple[str, int]:
    return grant.claims.worker_id, grant.claims.slot


def _is_ahead(one: Ticket, other: Ticket) -> bool:
    return one.order < other.order and _demand(one.request) == _demand(other.request)


def _demand(request: lease_pb2.AcquireLeaseRequest) -> object:
    return request.pool, request.kind, needs_of(request)
