"""Admission: accepts or refuses the lease of a call, and keeps the state of each slot. Pure.

The worker decides alone, from the lease and the fencing numbers that it has seen. So no fault of a
scheduler can put two sessions on one slot. Times are seconds of the worker's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from duplane.fabric.bounds import MAX_CLAIM_TIMEOUT_S
from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.lease_signing import CLAIM_SLACK_S, LeaseVerifier
from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.worker.lease_ages import LeaseAges
from duplane.worker.session_capacity import SessionCapacity


class SlotState(Enum):
    """State of a slot. The values are the names in the contract."""

    FREE = "SLOT_STATE_FREE"
    OCCUPIED = "SLOT_STATE_OCCUPIED"
    CLEANING = "SLOT_STATE_CLEANING"
    BROKEN = "SLOT_STATE_BROKEN"


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot, and the highest fencing number of its leases so far.

    All other fields but `is_withheld` are unset while no session holds the slot.
    """

    index: int
    state: SlotState = SlotState.FREE
    fencing_number: int = 0
    is_withheld: bool = False  # free, but schedulers are asked not to grant it now
    lease_id: str = ""
    session_id: str = ""
    tenant_id: str = ""
    kind: lease_pb2.SessionKind = lease_pb2.SESSION_KIND_UNSPECIFIED
    is_paused: bool = False
    cannot_move: bool = False  # to another worker, as the session's client says
    holder: bytes = b""  # the caller for which the lease was granted


class Admission:
    """The slots of one worker. The states of a slot are FREE -> OCCUPIED -> CLEANING -> FREE.

    If the cleanup of a slot fails, the slot is BROKEN until a later cleanup succeeds.

    Free slots are withheld as far as speaking units would be answered later than `latency_limit_s`
    with more sessions. A lease of a withheld slot, which was granted before, is nevertheless
    accepted.

    `on_change` is called after every change of a slot and of `is_draining`.
    """

    def __init__(
        self,
        worker_id: str,
        slot_count: int,
        kinds: Sequence[lease_pb2.SessionKind],
        on_change: Callable[[], None] = lambda: None,
        *,
        latency_limit_s: float = math.inf,
    ) -> None:
        self._latency_limit_s = latency_limit_s
        self.capacity = SessionCapacity(latency_limit_s)
        self.worker_id = worker_id
        self.kinds = tuple(kinds)
        self.on_change = on_change
        self._slots = [Slot(index) for index in range(slot_count)]
        self._verifier = LeaseVerifier()
        self._ages = LeaseAges()
        self._is_drained = False
        self._is_ending = False
        self._is_stuck = False

    @property
    def slots(self) -> Sequence[Slot]:
        """Every slot, in order."""
        return tuple(self._slots)

    @property
    def is_draining(self) -> bool:
        """True if the worker refuses new sessions."""
        return self._is_drained or self._is_ending or self._is_stuck

    @property
    def is_ending(self) -> bool:
        """True if the process ends, which `undrain` does not change."""
        return self._is_ending

    @property
    def is_stuck(self) -> bool:
        """True as long as the device does not answer."""
        return self._is_stuck

    @property
    def is_idle(self) -> bool:
        """True if no slot is held by a session or being cleaned."""
        held = (SlotState.OCCUPIED, SlotState.CLEANING)
        return not any(slot.state in held for slot in self._slots)

    def drain(self) -> None:
        """Refuse every claim until `undrain` is called."""
        self._is_drained = True
        self.on_change()

    def undrain(self) -> None:
        """Accept claims again, unless the process ends or the device is stuck."""
        self._is_drained = False
        self.on_change()

    def end(self) -> None:
        """Refuse every claim from now on, because the process ends."""
        self._is_ending = True
        self.on_change()

    def set_stuck(self, is_stuck: bool) -> None:
        """Refuse claims as long as the device does not answer (`is_stuck`)."""
        self._is_stuck = is_stuck
        self.on_change()

    def register(
        self, worker_epoch: int, keys: Sequence[registry_pb2.VerificationKey], now: float
    ) -> None:
        """Record a registration at a scheduler, or new keys for the present registration.

        Leases that were granted under earlier registrations of this process stay valid. So grants
        that are on their way are not lost when the worker attaches again. If two leases name the
        same slot, the higher fencing number wins. The epoch only excludes leases that were granted
        to an earlier process with the same worker id. Raises ValueError for malformed keys.
        """
        self._verifier.trust(keys, now)
        self._ages.register(worker_epoch, now)

    def note_progress(self, fencing_number: int, now: float) -> None:
        """Record that the fencing numbers of the fabric have risen to `fencing_number`."""
        self._ages.progress(fencing_number, now)

    def detach(self, now: float) -> None:
        """Record that the worker is no longer registered."""
        self._ages.detach(now)

    def claim(
        self,
        lease: lease_pb2.Lease,
        now: float,
        *,
        is_chat: bool = False,
        caller: bytes | None = None,
    ) -> lease_pb2.LeaseClaims:
        """Occupy the slot that `lease` names, or raise FabricError and change nothing.

        `caller` is the holder that the certificate of the client names; None without TLS.
        """
        claims = self.check(lease, now, is_chat=is_chat, caller=caller)
        self._set(
            replace(
                self._slots[claims.slot],
                state=SlotState.OCCUPIED,
                is_withheld=False,
                fencing_number=claims.fencing_number,
                lease_id=claims.lease_id,
                session_id=claims.session_id,
                tenant_id=claims.tenant_id,
                kind=claims.kind,
                holder=claims.holder,
            )
        )
        return claims

    def check(
        self,
        lease: lease_pb2.Lease,
        now: float,
        *,
        is_chat: bool = False,
        caller: bytes | None = None,
    ) -> lease_pb2.LeaseClaims:
        """Return the claims of a lease that can be claimed now, or raise FabricError."""
        claims = self._verifier.verify(lease, now)
        if caller is not None and claims.holder != caller:
            raise FabricError(Reason.NOT_ALLOWED, "the lease was granted to another caller")
        self._check_addressee(claims)
        self._check_age(claims, now)
        if is_chat != (claims.kind == lease_pb2.SESSION_KIND_CHAT):
            raise FabricError(Reason.KIND_NOT_SERVED, "the lease is for another kind of session")
        if self.is_draining:
            raise FabricError(Reason.DRAINING, "this worker takes no more sessions")
        slot = self._slots[claims.slot]
        if claims.fencing_number <= slot.fencing_number:
            raise FabricError(
                Reason.LEASE_STALE,
                f"slot {slot.index} has seen fencing number {slot.fencing_number}, the lease has"
                f" {claims.fencing_number}",
            )
        if slot.state is not SlotState.FREE:
            raise FabricError(
                Reason.SLOT_OCCUPIED, f"slot {slot.index} is {slot.state.name.lower()}"
            )
        return claims

    def _check_addressee(self, claims: lease_pb2.LeaseClaims) -> None:
        if claims.worker_id != self.worker_id:
            raise FabricError(Reason.WRONG_WORKER, "the lease is for another worker")
        if not 0 <= claims.slot < len(self._slots):
            raise FabricError(
                Reason.INVALID_FIELD,
                f"there is no slot {claims.slot}, only {len(self._slots)}",
                field="claim.lease.claims.slot",
            )
        if claims.kind not in self.kinds:
            raise FabricError(Reason.KIND_NOT_SERVED, "this worker does not serve that kind")

    def _check_age(self, claims: lease_pb2.LeaseClaims, now: float) -> None:
        age_s = self._ages.age_s(claims.worker_epoch, claims.fencing_number, now)
        if age_s is None:
            raise FabricError(
                Reason.WRONG_EPOCH, "the lease was granted to an earlier process of this worker"
            )
        timeout_s = MAX_CLAIM_TIMEOUT_S
        if claims.HasField("claim_timeout"):
            timeout_s = min(to_seconds(claims.claim_timeout), MAX_CLAIM_TIMEOUT_S)
        if age_s > timeout_s + CLAIM_SLACK_S:
            raise FabricError(
                Reason.LEASE_EXPIRED,
                f"the lease was granted {age_s:.0f} s ago or more, for {timeout_s:.0f} s",
            )

    def revoke(self, index: int, fencing_number: int, lease_id: str) -> bool:
        """Refuse leases of the slot with this fencing number or a lower one.

        Return True if the lease `lease_id` holds the slot.
        """
        if not 0 <= index < len(self._slots):
            return False
        slot = self._slots[index]
        if fencing_number > slot.fencing_number:
            slot = replace(slot, fencing_number=fencing_number)
            self._set(slot)
        return slot.state is SlotState.OCCUPIED and slot.lease_id == lease_id

    def set_paused(self, index: int, lease_id: str, is_paused: bool) -> None:
        """Record whether the session is paused. Do nothing if the session has ended."""
        slot = self._slots[index]
        is_held = slot.state is SlotState.OCCUPIED and slot.lease_id == lease_id
        if is_held and slot.is_paused != is_paused:
            self._set(replace(slot, is_paused=is_paused))

    def set_cannot_move(self, index: int, lease_id: str) -> bool:
        """Record that the session cannot move. Return False if this is known, or it has ended."""
        slot = self._slots[index]
        is_held = slot.state is SlotState.OCCUPIED and slot.lease_id == lease_id
        is_new = is_held and not slot.cannot_move
        if is_new:
            self._set(replace(slot, cannot_move=True))
        return is_new

    def note_speech(self, latency_s: float, now: float) -> None:
        """Record in which time a speaking unit was answered."""
        self.capacity.note(latency_s, self._occupied_count, now)
        if self._withhold():
            self.on_change()

    def begin_cleanup(self, index: int) -> None:
        """Mark a slot as being cleaned, after its session has ended."""
        slot = self._expect(index, SlotState.OCCUPIED)
        self._set(replace(slot, state=SlotState.CLEANING, is_paused=False, cannot_move=False))

    def finish_cleanup(self, index: int, *, is_clean: bool) -> None:
        """Free the slot if its cleanup has succeeded, else mark the slot as broken."""
        slot = self._expect(index, SlotState.CLEANING)
        state = SlotState.FREE if is_clean else SlotState.BROKEN
        self._set(Slot(index, state, slot.fencing_number))

    def repair(self, index: int) -> None:
        """Free a broken slot after a later cleanup has succeeded."""
        slot = self._expect(index, SlotState.BROKEN)
        self._set(Slot(index, SlotState.FREE, slot.fencing_number))

    def _expect(self, index: int, state: SlotState) -> Slot:
        slot = self._slots[index]
        if slot.state is not state:
            raise ValueError(f"slot {index} is {slot.state.name}, not {state.name}")
        return slot

    def _set(self, slot: Slot) -> None:
        self._slots[slot.index] = slot
        if not self._occupied_count:  # what was measured may be over: the next sessions show it
            self.capacity = SessionCapacity(self._latency_limit_s)
        self._withhold()
        self.on_change()

    @property
    def _occupied_count(self) -> int:
        return sum(slot.state is SlotState.OCCUPIED for slot in self._slots)

    def _withhold(self) -> bool:
        """Withhold the free slots that exceed the capacity. Return True if a slot changed."""
        left = self.capacity.count - self._occupied_count
        has_changed = False
        for slot in self._slots:
            is_free = slot.state is SlotState.FREE
            if slot.is_withheld != (is_free and left < 1):
                self._slots[slot.index] = replace(slot, is_withheld=not slot.is_withheld)
                has_changed = True
            left -= is_free
        return has_changed


def slot_reports(admission: Admission) -> list[registry_pb2.SlotReport]:
    """Return the state of every slot, in order."""
    return [
        registry_pb2.SlotReport(
            slot=slot.index,
            state=slot.state.value,
            is_withheld=slot.is_withheld,
            fencing_number=slot.fencing_number,
            lease_id=slot.lease_id,
            session_id=slot.session_id,
            tenant_id=slot.tenant_id,
            kind=slot.kind,
            is_paused=slot.is_paused,
            cannot_move=slot.cannot_move,
            holder=slot.holder,
        )
        for slot in admission.slots
    ]
