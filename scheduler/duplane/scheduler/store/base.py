"""What the schedulers of a fabric agree on, and the only verbs that change it.

A store keeps facts and makes each change atomic. It knows no policy: whose turn it is and which
slot is best are decided above it, from the changes it tells.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto

from duplane.fabric.v1 import lease_pb2, registry_pb2


@dataclass(frozen=True, slots=True)
class Worker:
    """A registration. `register.slots` are as last reported; the message is never changed."""

    epoch: int
    register: registry_pb2.Register
    is_draining: bool  # says the worker
    is_drain_wanted: bool = False  # says an operator; lasts as long as the registration
    is_silent: bool = False  # attached, but its reports are overdue

    @property
    def worker_id(self) -> str:
        """Its name in the fabric."""
        return self.register.worker_id

    @property
    def takes_sessions(self) -> bool:
        """False while none of its slots may be granted."""
        return not (self.is_draining or self.is_drain_wanted or self.is_silent)


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants. `owner` is the call that waits: a repeated call has the same
    `request_id` and another owner."""

    request_id: str
    owner: str
    kind: lease_pb2.SessionKind
    pool: str = ""
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue. A lower order is served first."""

    order: int
    wish: Wish

    @property
    def ticket_id(self) -> str:
        """Names the place to those outside, and carries its order over a restart."""
        return f"q_{self.order:016x}"


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot that is given away. `token` is its fencing number."""

    token: int
    lease_id: str
    worker_id: str
    worker_epoch: int
    slot: int
    kind: lease_pb2.SessionKind
    session_id: str = ""
    ticket: Ticket | None = None  # None: the worker told of it, another scheduler granted it
    expire_time: datetime | None = None  # as signed; None without a ticket
    is_claimed: bool = False
    is_revoked: bool = False  # its session was asked to end


class End(Enum):
    """Why a grant ended."""

    RELEASED = auto()  # the worker said that the slot is no longer held by it
    RETURNED = auto()  # given back before it was claimed
    EXPIRED = auto()  # not claimed in time
    WORKER_GONE = auto()


@dataclass(frozen=True, slots=True)
class WorkerPut:
    """A worker registered or changed."""

    revision: int
    worker: Worker


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A registration ended."""

    revision: int
    worker: Worker


@dataclass(frozen=True, slots=True)
class TicketPut:
    """A ticket came, or another call took it over."""

    revision: int
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class TicketGone:
    """A ticket was granted or cancelled."""

    revision: int
    ticket: Ticket
    is_granted: bool


@dataclass(frozen=True, slots=True)
class GrantPut:
    """A grant was made or changed."""

    revision: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class GrantGone:
    """A grant ended."""

    revision: int
    grant: Grant
    end: End


Change = WorkerPut | WorkerGone | TicketPut | TicketGone | GrantPut | GrantGone


class LeaseStore(ABC):
    """Registrations, tickets and grants.

    One number, the revision, rises with every change; epochs, orders and fencing tokens are
    revisions. It never falls below what workers have seen, over restarts of the store too.
    A verb on something that is gone or has changed does nothing and says so.
    """

    @abstractmethod
    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Tell `listener` what is there, as changes, and then every change, each once, in order.

        It is called on the event loop and must not call a verb. A change may be told before or
        after the verb that made it returns.
        """

    @abstractmethod
    async def run(self) -> None:
        """Keep the store's own business going, such as expiry, until cancelled."""

    @abstractmethod
    async def register(self, register: registry_pb2.Register) -> Worker | None:
        """Add a worker under a new epoch, above every fencing number it has seen.

        A registration of the same incarnation is replaced and its grants end. None if another
        incarnation is registered under the id.
        """

    @abstractmethod
    async def report(self, worker: Worker) -> bool:
        """Replace slots, `is_draining` and `is_silent` of a registration.

        Later tokens are above every fencing number reported. False if its epoch is over.
        """

    @abstractmethod
    async def drain(self, worker_id: str) -> bool:
        """Set `is_drain_wanted`. False if the worker is not registered."""

    @abstractmethod
    async def unregister(self, worker_id: str, epoch: int) -> bool:
        """End a registration and its grants. False if its epoch is over."""

    @abstractmethod
    async def enqueue(self, wish: Wish, order: int | None = None) -> Ticket | Grant:
        """Give `wish` a ticket: at `order` if that was handed out before, else behind all others.

        A ticket that waits at this order, or for this `request_id`, is taken over by the wish; a
        grant that was made for this `request_id` is returned as it is.
        """

    @abstractmethod
    async def cancel(self, order: int, owner: str | None = None) -> bool:
        """Remove a ticket; with `owner`, only while it is that call's. False if it is not there."""

    @abstractmethod
    async def try_grant(self, proposal: Grant, claim_timeout_s: float) -> Grant | None:
        """Turn the ticket of `proposal` into a grant with a new token, in one step.

        None, and nothing is changed, if the ticket is gone or taken over, the epoch is over, or
        the slot is granted. Not before `claim_timeout_s` an unclaimed grant ends EXPIRED.
        """

    @abstractmethod
    async def claim(self, grant: Grant) -> bool:
        """Say that the worker has accepted the lease: it no longer expires. False if it ended."""

    @abstractmethod
    async def give_back(self, grant: Grant) -> bool:
        """The caller's end of a grant: RETURNED at once if unclaimed; a claimed one is marked
        `is_revoked` and stays until its worker releases it. False if it ended."""

    @abstractmethod
    async def release(self, grant: Grant) -> bool:
        """The worker's end of a grant: its slot is no longer held by it. False if it ended."""

    @abstractmethod
    async def adopt(self, grant: Grant) -> bool:
        """Record a claimed lease that the worker says it holds and no grant here stands for.

        False if the epoch is over or the slot is granted.
        """
