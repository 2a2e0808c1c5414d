"""The facts that the schedulers of a fabric share, and the operations that change them.

A store keeps registrations, tickets and grants, and makes each change atomic. A store contains no
policy: its callers decide which ticket gets which slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from duplane.fabric.v1 import lease_pb2, registry_pb2

# Callers and workers have this time to return after a scheduler has ended all calls, or after a
# restart has lost the queue. The time begins when the scheduler can serve them. A caller needs
# about 0.4 s to connect.
RETURN_S = 0.75


class DrainRequest(Enum):
    """What operators have asked of a worker last."""

    NONE = auto()
    DRAIN = auto()
    STOP = auto()  # to drain, then to end its process
    UNDRAIN = auto()  # to take a drain back


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's registration, with the latest report of each slot. Messages are never modified."""

    epoch: int
    register: registry_pb2.Register  # the worker's first message; `slots` replaces its slots
    slots: tuple[registry_pb2.SlotReport, ...]  # all slots, in order
    is_draining: bool  # reported by the worker
    drain_request: DrainRequest = DrainRequest.NONE  # ends with the registration
    is_silent: bool = False  # attached, but its reports are overdue
    is_unreachable: bool = False  # a caller could not reach it, and no health check has since
    is_leaving: bool = False  # its process ends as planned, and its stream with it

    @classmethod
    def of(cls, epoch: int, register: registry_pb2.Register) -> Worker:
        """Make a registration from a worker's first message."""
        kept = registry_pb2.Register()
        kept.CopyFrom(register)
        del kept.slots[:]
        return cls(epoch, kept, tuple(register.slots), register.is_draining)

    @property
    def worker_id(self) -> str:
        """The worker's name in the fabric."""
        return self.register.worker_id

    @property
    def is_drain_requested(self) -> bool:
        """True if an operator has asked the worker to drain, and has not taken this back."""
        return self.drain_request in (DrainRequest.DRAIN, DrainRequest.STOP)

    def with_flags_of(self, reported: Worker) -> Worker:
        """Return this registration with the flags that a report of its worker sets."""
        return replace(
            self,
            is_draining=reported.is_draining,
            is_silent=reported.is_silent,
            is_leaving=reported.is_leaving,
        )

    @property
    def takes_sessions(self) -> bool:
        """True if free slots of the worker may be granted."""
        is_drained = self.is_draining or self.is_drain_requested
        return not (is_drained or self.is_silent or self.is_unreachable)


def ticket_id_of(order: int) -> str:
    """Return the id of the ticket with this order."""
    return f"q_{order:016x}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A lease request in the queue. Tickets with a lower order number are served first."""

    order: int
    owner: str  # id of the waiting call; a repeated call has the same request_id, another owner
    request: lease_pb2.AcquireLeaseRequest  # never modified
    holder: bytes = b""  # the caller that may return with the ticket; empty means any

    @property
    def ticket_id(self) -> str:
        """The id that the caller gets.

        It contains the order number, so that the caller keeps its place after a restart of the
        scheduler.
        """
        return ticket_id_of(self.order)


@dataclass(frozen=True, slots=True)
class Grant:
    """The assignment of a slot to a request, from the grant to the release."""

    claims: lease_pb2.LeaseClaims  # the claims of the lease; never modified
    ticket: Ticket | None = None  # None if the lease is known only from its worker's report
    is_claimed: bool = False
    is_revoked: bool = False  # the worker was asked to end the session
    is_ended: bool = False  # revoked by an operator: the session must not continue elsewhere

    @property
    def holder(self) -> bytes:
        """The caller that may give the lease back; empty means any."""
        return self.claims.holder


@dataclass(frozen=True, slots=True)
class TenantTime:
    """For how long the ended sessions of a tenant have held slots in one day."""

    tenant_id: str
    day: int  # number of the day (UTC), from 1970
    held_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """A slot to grant, and the time within which the grant must be claimed."""

    claims: lease_pb2.LeaseClaims  # of the lease; the store adds the fencing number
    claim_timeout_s: float


class GrantEnd(Enum):
    """Why a grant ended."""

    RELEASED = auto()  # the worker reported that the lease no longer holds the slot
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
    """A ticket was added, or another call became its owner."""

    revision: int
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class TicketGone:
    """A ticket was granted or cancelled; or it expired, because its scheduler lost the store."""

    revision: int
    ticket: Ticket
    is_granted: bool
    is_expired: bool = False  # the ticket was not cancelled; its caller may still wait


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
    end: GrantEnd


@dataclass(frozen=True, slots=True)
class TimePut:
    """A scheduler has saved the time of a tenant."""

    revision: int
    time: TenantTime


Change = WorkerPut | WorkerGone | TicketPut | TicketGone | GrantPut | GrantGone | TimePut


def replaces(register: registry_pb2.Register, known: registry_pb2.Register) -> bool:
    """True if the process that sent `known` also sent `register`, at the same time or later."""
    is_later = not register.stream_number or register.stream_number >= known.stream_number
    return register.incarnation == known.incarnation and is_later


class LeaseStore(ABC):
    """Registrations, tickets and grants.

    One number, the revision, rises with every change. Epochs, orders and fencing numbers are
    revisions. The revision never falls below a number that a worker has seen, not even after a
    restart of the store. An operation on an object that has ended or changed does nothing and
    returns False or None.

    While etcd cannot be reached, `register` and `enqueue` raise FabricError UNAVAILABLE after a
    time limit, and every other operation waits. While the contact is lost (`watch_contact`), every
    operation raises FabricError UNAVAILABLE immediately. Nevertheless, five of these operations are
    completed later:

    - `give_back`, `drain` and `set_unreachable` when the contact is back;
    - `cancel` and `unregister` RETURN_S after that, so that callers and workers can return first.

    While etcd refuses writes (`watch_refusal`), `register` and `enqueue` raise FabricError
    UNAVAILABLE immediately, and every other operation waits.
    """

    @property
    @abstractmethod
    def has_kept_queue(self) -> bool:
        """True if the store still has the tickets from before the start of this scheduler.

        The value is valid as soon as the store has published a registration.
        """

    @property
    @abstractmethod
    def ticket_key(self) -> bytes:
        """The secret with which the schedulers of this store prove that they issued a ticket.

        It is empty until the facts from before the start of this scheduler are published.
        """

    @abstractmethod
    def may_be_former(self, order: int) -> bool:
        """True if an earlier store, whose queue is lost, may have issued this order lately."""

    @abstractmethod
    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` with the present facts, as changes, then with every change, in order.

        The listener is called on the event loop and must not call the store. A change may be
        delivered before or after the return of the operation that made it.
        """

    @abstractmethod
    async def until_read(self) -> None:
        """Wait until the facts from before the start of this scheduler are published."""

    @abstractmethod
    async def until_whole(self) -> None:
        """Wait while only a part of a large change has been published.

        In this time, the state of a listener mixes facts from before and after the change.
        """

    @abstractmethod
    def watch_contact(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` with True when the contact to the store is lost, False when it is back.

        The contact counts as lost when the other schedulers may have ended the registrations and
        tickets of this scheduler. It is back when this scheduler has the facts of the store again.
        """

    @abstractmethod
    def watch_refusal(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the reason when the store begins to refuse changes.

        Call it with an empty text when the store accepts changes again.
        """

    @abstractmethod
    def share_keys(self, keys: Sequence[registry_pb2.VerificationKey]) -> None:
        """Set the public keys of this scheduler, in place of the keys set before.

        `run` publishes the keys. Keys that are set before `run` are published before any grant.
        """

    @abstractmethod
    def watch_keys(
        self, listener: Callable[[Sequence[registry_pb2.VerificationKey]], None]
    ) -> None:
        """Call `listener` with the published keys of all schedulers, now and at every change.

        These include keys of schedulers that ended lately, and keys that were replaced lately.
        """

    @abstractmethod
    async def run(self) -> None:
        """Do the store's own work, such as expiry, until cancelled."""

    @abstractmethod
    async def leave(self) -> None:
        """End the registrations and tickets of this scheduler immediately, because it stops."""

    @abstractmethod
    async def register(self, register: registry_pb2.Register) -> Worker | None:
        """Add a worker under a new epoch, higher than every fencing number the worker has seen.

        An earlier registration of the same process is replaced, and its grants end. Returns None if
        a later registration, or another process, has this worker id.
        """

    @abstractmethod
    async def report(self, worker: Worker) -> bool:
        """Replace slots, `is_draining`, `is_silent` and `is_leaving` of a registration.

        Fencing numbers of later grants are higher than every reported number. Returns False if the
        registration has ended.
        """

    @abstractmethod
    async def drain(self, worker_id: str, request: DrainRequest = DrainRequest.DRAIN) -> bool:
        """Set `drain_request`. Returns False if the worker is not registered.

        A request to stop stays, because it cannot be taken back.
        """

    @abstractmethod
    async def set_unreachable(self, worker_id: str, epoch: int, *, is_unreachable: bool) -> bool:
        """Set `is_unreachable`. Returns False if the registration `epoch` has ended."""

    @abstractmethod
    async def unregister(self, worker_id: str, epoch: int) -> bool:
        """End a registration and its grants. Returns False if the registration has ended before."""

    @abstractmethod
    async def enqueue(
        self,
        request: lease_pb2.AcquireLeaseRequest,
        owner: str,
        order: int | None = None,
        offer: Offer | None = None,
        holder: bytes = b"",
    ) -> Ticket | Grant:
        """Add a ticket: at `order` if the store issued that order before, else at the end.

        Whoever calls this has checked that `holder` may use `order` and the `request_id`.

        - If a ticket already waits at this order or for this `request_id`, `owner` becomes the
          owner of this ticket.
        - If a grant was already made for this `request_id`, this grant is returned unchanged.
        - A new request without `order` gets the slot `offer` in the same step if no ticket waits in
          the request's pool and the slot is free. The order of the grant's ticket is then the
          fencing number of the grant.
        """

    @abstractmethod
    async def cancel(self, order: int, owner: str | None = None) -> bool:
        """Remove a ticket. Returns False if it does not wait, or if it has another `owner`."""

    @abstractmethod
    async def try_grant(self, ticket: Ticket, offer: Offer) -> Grant | None:
        """Replace `ticket` by a grant of `offer` with a new fencing number, in one step.

        Changes nothing and returns None if the ticket is gone or has another owner, the worker's
        registration has ended, or the slot is granted already. A grant that is not claimed ends as
        EXPIRED after `claim_timeout_s` at the earliest.
        """

    @abstractmethod
    async def claim(self, grant: Grant) -> bool:
        """Record that the worker accepted the lease. The grant then does not expire.

        Returns False if the grant has ended.
        """

    @abstractmethod
    async def give_back(self, grant: Grant, *, is_end: bool = False) -> bool:
        """Give a grant back, as its caller asks. Returns False if the grant has ended.

        An unclaimed grant ends immediately as RETURNED. A claimed grant is marked `is_revoked`, and
        `is_ended` if an operator ends its session; it remains until its worker releases it.
        """

    @abstractmethod
    async def release(self, grant: Grant) -> bool:
        """Record that the lease no longer holds its slot. Returns False if the grant has ended."""

    @abstractmethod
    async def adopt(self, grant: Grant) -> bool:
        """Record a claimed lease that a worker reports but that has no grant in this store.

        Returns False if the worker's registration has ended or the slot is granted.
        """

    @abstractmethod
    async def save_time(self, time: TenantTime) -> bool:
        """Save the time of a tenant for the other schedulers and for later ones.

        Returns False if the store keeps no times, or has a higher time or that of a later day.
        """
