"""Which claim gets a slot, and what each slot is doing: the worker is the last word on both.

Decides offline, from the lease, the clock and what was seen before. Knows no socket and no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.lease import LeaseVerifier
from duplane.fabric.v1 import lease_pb2, registry_pb2

CLOCK_SKEW = timedelta(seconds=30)  # as LeaseClaims.expire_time allows
_EPOCHS_KEPT = 64  # registrations remembered, over all schedulers; leases expire long before


class SlotState(Enum):
    """What a slot is doing, named as in the contract."""

    FREE = "SLOT_STATE_FREE"
    OCCUPIED = "SLOT_STATE_OCCUPIED"
    CLEANING = "SLOT_STATE_CLEANING"
    BROKEN = "SLOT_STATE_BROKEN"


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot. `fencing_number` is the highest it has seen; kind and ids are unset when unheld."""

    index: int
    state: SlotState = SlotState.FREE
    fencing_number: int = 0
    lease_id: str = ""
    session_id: str = ""
    kind: lease_pb2.SessionKind = lease_pb2.SESSION_KIND_UNSPECIFIED


class Admission:
    """The slots of one worker: FREE -> OCCUPIED -> CLEANING -> FREE, or BROKEN for ever.

    `on_change` is called after every change of a slot and of `is_draining`.
    """

    def __init__(
        self,
        worker_id: str,
        slot_count: int,
        kinds: Sequence[lease_pb2.SessionKind],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.worker_id = worker_id
        self.kinds = tuple(kinds)
        self.on_change = on_change
        self._slots = [Slot(index) for index in range(slot_count)]
        self._verifier = LeaseVerifier()
        self._keys: dict[str, Sequence[registry_pb2.VerificationKey]] = {}
        self._epochs: deque[int] = deque(maxlen=_EPOCHS_KEPT)
        self._is_drained = False
        self._is_stuck = False

    @property
    def slots(self) -> Sequence[Slot]:
        """Every slot, in order."""
        return tuple(self._slots)

    @property
    def is_draining(self) -> bool:
        """True once no more sessions are taken."""
        return self._is_drained or self._is_stuck

    @property
    def is_idle(self) -> bool:
        """True while no slot is held or being cleaned."""
        held = (SlotState.OCCUPIED, SlotState.CLEANING)
        return not any(slot.state in held for slot in self._slots)

    def drain(self) -> None:
        """Refuse every claim from now on."""
        self._is_drained = True
        self.on_change()

    def set_stuck(self, is_stuck: bool) -> None:
        """Refuse claims while the device does not answer."""
        self._is_stuck = is_stuck
        self.on_change()

    def register(
        self, scheduler: str, worker_epoch: int, keys: Sequence[registry_pb2.VerificationKey]
    ) -> None:
        """Take over what a scheduler told: its keys replace its own former ones.

        Leases of former registrations of this process stay good. The epoch keeps grants to an
        earlier process of this name away, and that one never had ours; within one process the
        fencing number decides, so a registration renewed after a broken stream voids no grant
        that is on its way. Raises ValueError for bytes that are no key.
        """
        told = {**self._keys, scheduler: tuple(keys)}
        self._verifier.trust([key for keys in told.values() for key in keys])
        self._keys = told
        self._epochs.append(worker_epoch)

    def claim(self, lease: lease_pb2.Lease, now: datetime) -> lease_pb2.LeaseClaims:
        """Give the slot that `lease` names, or raise FabricError and change nothing."""
        claims = self._verifier.verify(lease)
        self._check_addressee(claims)
        expire_time = claims.expire_time.ToDatetime(tzinfo=UTC)
        if now > expire_time + CLOCK_SKEW:
            raise FabricError(Reason.LEASE_EXPIRED, f"the lease expired at {expire_time:%X} UTC")
        if self.is_draining:
            raise FabricError(Reason.DRAINING, "this worker takes no more sessions")
        slot = self._slots[claims.slot]
        if claims.fencing_number <= slot.fencing_number:
            raise FabricError(
                Reason.LEASE_STALE,
                f"slot {slot.index} has seen number {slot.fencing_number}, the lease says"
                f" {claims.fencing_number}",
            )
        if slot.state is not SlotState.FREE:
            raise FabricError(
                Reason.SLOT_OCCUPIED, f"slot {slot.index} is {slot.state.name.lower()}"
            )
        self._set(
            replace(
                slot,
                state=SlotState.OCCUPIED,
                fencing_number=claims.fencing_number,
                lease_id=claims.lease_id,
                session_id=claims.session_id,
                kind=claims.kind,
            )
        )
        return claims

    def _check_addressee(self, claims: lease_pb2.LeaseClaims) -> None:
        if claims.worker_id != self.worker_id:
            raise FabricError(Reason.WRONG_WORKER, "the lease is for another worker")
        if claims.worker_epoch not in self._epochs:
            raise FabricError(
                Reason.WRONG_EPOCH, "the lease was granted to an earlier process of this worker"
            )
        if not 0 <= claims.slot < len(self._slots):
            raise FabricError(
                Reason.INVALID_FIELD,
                f"there is no slot {claims.slot}, only {len(self._slots)}",
                field="claim.lease.claims.slot",
            )
        if claims.kind not in self.kinds:
            raise FabricError(Reason.KIND_NOT_SERVED, "this worker does not serve that kind")

    def revoke(self, index: int, fencing_number: int, lease_id: str) -> bool:
        """Refuse this number and all below; tell whether the lease's session runs and must end."""
        if not 0 <= index < len(self._slots):
            return False
        slot = self._slots[index]
        if fencing_number > slot.fencing_number:
            slot = replace(slot, fencing_number=fencing_number)
            self._set(slot)
        return slot.state is SlotState.OCCUPIED and slot.lease_id == lease_id

    def begin_cleanup(self, index: int) -> None:
        """The session of an occupied slot has ended."""
        slot = self._expect(index, SlotState.OCCUPIED)
        self._set(replace(slot, state=SlotState.CLEANING))

    def finish_cleanup(self, index: int, *, is_clean: bool) -> None:
        """Make the slot leasable again, or break it for good."""
        slot = self._expect(index, SlotState.CLEANING)
        state = SlotState.FREE if is_clean else SlotState.BROKEN
        self._set(Slot(index, state, slot.fencing_number))

    def _expect(self, index: int, state: SlotState) -> Slot:
        slot = self._slots[index]
        if slot.state is not state:
            raise ValueError(f"slot {index} is {slot.state.name}, not {state.name}")
        return slot

    def _set(self, slot: Slot) -> None:
        self._slots[slot.index] = slot
        self.on_change()
