"""Slot admission: no order of claims, revokes and cleanups puts two sessions on one slot."""

from __future__ import annotations

import math

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duplane.fabric.durations import to_duration
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.lease_signing import CLAIM_SLACK_S, LEASE_LIFE_S, LeaseSigner
from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.worker.admission import Admission, SlotState

WORKER_ID = "w"
KIND = lease_pb2.SESSION_KIND_AUDIO_DUPLEX
SLOTS = 3
TIMEOUT_S = 5.0
NOW = 1000.0
LATENCY_LIMIT_S = 0.5
SIGNER = LeaseSigner()

slots = st.integers(0, SLOTS - 1)
numbers = st.integers(1, 12)


def lease(signer: LeaseSigner = SIGNER, **claims: object) -> lease_pb2.Lease:
    granted = lease_pb2.LeaseClaims(
        **{
            "lease_id": "lease",
            "worker_id": WORKER_ID,
            "worker_epoch": 1,
            "slot": 0,
            "fencing_number": 1,
            "kind": KIND,
            "claim_timeout": to_duration(TIMEOUT_S),
            **claims,
        }
    )
    return signer.sign(granted)


def new_admission(latency_limit_s: float = math.inf) -> Admission:
    admission = Admission(WORKER_ID, SLOTS, [KIND], latency_limit_s=latency_limit_s)
    admission.register(1, [SIGNER.verification_key], NOW)
    return admission


def refusal(admission: Admission, refused: lease_pb2.Lease, now: float = NOW) -> FabricError:
    before = admission.slots
    with pytest.raises(FabricError) as caught:
        admission.claim(refused, now)
    assert admission.slots == before
    return caught.value


class AdmissionMachine(RuleBasedStateMachine):
    """Compares the admission with a simple model, for claims, revokes and cleanups in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0
        self.now = NOW
        self.admission = new_admission(latency_limit_s=LATENCY_LIMIT_S)
        self.admission.on_change = self._count
        self.running: dict[int, str] = {}
        self.cleaning: set[int] = set()
        self.broken: set[int] = set()
        self.seen = dict.fromkeys(range(SLOTS), 0)

    def _count(self) -> None:
        self.changes += 1

    @rule(slot=slots, number=numbers)
    def claim(self, slot: int, number: int) -> None:
        lease_id = f"{slot}/{number}"
        granted = lease(slot=slot, fencing_number=number, lease_id=lease_id)
        is_free = slot not in {*self.running, *self.cleaning, *self.broken}
        if is_free and number > self.seen[slot] and not self.admission.is_draining:
            self.admission.claim(granted, NOW)
            self.running[slot] = lease_id
            self.seen[slot] = number
            return
        changes = self.changes
        assert refusal(self.admission, granted).reason in {
            Reason.LEASE_STALE,
            Reason.SLOT_OCCUPIED,
            Reason.DRAINING,
        }
        assert self.changes == changes

    @rule(slot=slots, number=numbers)
    def revoke(self, slot: int, number: int) -> None:
        lease_id = f"{slot}/{number}"
        must_end = self.admission.revoke(slot, number, lease_id)
        assert must_end == (self.running.get(slot) == lease_id)
        self.seen[slot] = max(self.seen[slot], number)

    @precondition(lambda self: self.running)
    @rule(choice=st.randoms(use_true_random=False))
    def end_session(self, choice) -> None:
        slot = choice.choice(sorted(self.running))
        del self.running[slot]
        self.cleaning.add(slot)
        self.admission.begin_cleanup(slot)

    @precondition(lambda self: self.cleaning)
    @rule(is_clean=st.booleans(), choice=st.randoms(use_true_random=False))
    def finish_cleanup(self, is_clean: bool, choice) -> None:
        slot = choice.choice(sorted(self.cleaning))
        self.cleaning.remove(slot)
        if not is_clean:
            self.broken.add(slot)
        self.admission.finish_cleanup(slot, is_clean=is_clean)

    @rule(slot=slots)
    def cleanup_out_of_turn_is_our_own_fault(self, slot: int) -> None:
        before = self.admission.slots
        if slot not in self.running:
            with pytest.raises(ValueError, match="not OCCUPIED"):
                self.admission.begin_cleanup(slot)
        if slot not in self.cleaning:
            with pytest.raises(ValueError, match="not CLEANING"):
                self.admission.finish_cleanup(slot, is_clean=True)
        assert self.admission.slots == before

    @precondition(lambda self: self.running)
    @rule(latency_s=st.sampled_from([0.1, 1.0, 10.0]))
    def speak(self, latency_s: float) -> None:
        self.now += 1
        self.admission.note_speech(latency_s, self.now)

    @rule(is_stuck=st.booleans())
    def stick(self, is_stuck: bool) -> None:
        self.admission.set_stuck(is_stuck)

    @invariant()
    def slots_are_as_the_model_says(self) -> None:
        for slot in self.admission.slots:
            assert slot.fencing_number == self.seen[slot.index]
            match slot.state:
                case SlotState.OCCUPIED:
                    assert slot.lease_id == self.running[slot.index]
                case SlotState.CLEANING:
                    assert slot.index in self.cleaning
                case SlotState.BROKEN:
                    assert slot.index in self.broken
                case SlotState.FREE:
                    assert slot.index not in {*self.running, *self.cleaning, *self.broken}
                    assert slot.lease_id == ""
        assert self.admission.is_idle == (not self.running and not self.cleaning)

    @invariant()
    def offered_slots_are_within_the_capacity(self) -> None:
        slots = self.admission.slots
        free = [slot for slot in slots if slot.state is SlotState.FREE]
        offered = len(free) - sum(slot.is_withheld for slot in slots)
        left = max(0, self.admission.capacity.count - len(self.running))
        assert offered == min(len(free), left // 1)
        assert all(slot.state is SlotState.FREE for slot in slots if slot.is_withheld)
        if not self.running:
            assert offered == len(free)


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"worker_id": "v"}, Reason.WRONG_WORKER),
        ({"worker_epoch": 2}, Reason.WRONG_EPOCH),
        ({"slot": SLOTS}, Reason.INVALID_FIELD),
        ({"slot": -1}, Reason.INVALID_FIELD),
        ({"kind": lease_pb2.SESSION_KIND_CHAT}, Reason.KIND_NOT_SERVED),
        ({"kind": lease_pb2.SESSION_KIND_UNSPECIFIED}, Reason.KIND_NOT_SERVED),
        ({"fencing_number": 0}, Reason.LEASE_STALE),
    ],
)
def test_a_lease_for_something_else_is_refused(claims: dict, reason: Reason) -> None:
    assert refusal(new_admission(), lease(**claims)).reason is reason


def test_lease_is_of_use_only_to_the_process_in_whose_certificate_it_was_granted() -> None:
    admission = new_admission()
    for holder, caller in ((b"owner", b"thief"), (b"", b"thief"), (b"owner", b"")):
        with pytest.raises(FabricError) as refused:
            admission.claim(lease(holder=holder), NOW, caller=caller)
        assert refused.value.reason is Reason.NOT_ALLOWED
        assert admission.slots[0].state is SlotState.FREE
    admission.claim(lease(holder=b"owner"), NOW, caller=b"owner")
    admission.claim(lease(slot=1, holder=b"owner"), NOW)  # without TLS nobody is known


def test_lease_is_claimed_within_its_time_and_the_slack() -> None:
    admission = new_admission()
    late = NOW + TIMEOUT_S + CLAIM_SLACK_S + 0.001
    assert refusal(admission, lease(), late).reason is Reason.LEASE_EXPIRED
    admission.claim(lease(), NOW + TIMEOUT_S + CLAIM_SLACK_S)


def test_lease_of_an_older_scheduler_has_the_longest_time() -> None:
    admission = new_admission()
    lasting = lease(claim_timeout=None)
    assert refusal(admission, lasting, NOW + LEASE_LIFE_S + 1).reason is Reason.LEASE_EXPIRED
    admission.claim(lasting, NOW + LEASE_LIFE_S)


def test_no_lease_lasts_longer_than_the_key_that_signed_it() -> None:
    lasting = lease(claim_timeout=to_duration(3600))
    late = NOW + LEASE_LIFE_S + 1
    assert refusal(new_admission(), lasting, late).reason is Reason.LEASE_EXPIRED


def test_wall_clock_of_the_scheduler_does_not_count() -> None:
    admission = new_admission()
    for slot, expire_time in enumerate((None, Timestamp(seconds=1), Timestamp(seconds=2**40))):
        admission.claim(lease(slot=slot, expire_time=expire_time), NOW)


def test_new_lease_is_good_however_long_the_worker_is_attached() -> None:
    admission = new_admission()
    admission.note_progress(10, NOW + 3600)
    assert refusal(admission, lease(fencing_number=1), NOW + 3600).reason is Reason.LEASE_EXPIRED
    admission.claim(lease(fencing_number=11), NOW + 7200)


def test_before_any_registration_every_lease_is_forged() -> None:
    admission = Admission(WORKER_ID, SLOTS, [KIND])
    assert refusal(admission, lease()).reason is Reason.LEASE_FORGED


def test_keys_of_the_latest_message_are_trusted() -> None:
    admission = new_admission()
    other, newer = LeaseSigner(), LeaseSigner()
    admission.register(7, [other.verification_key], NOW)
    admission.register(7, [other.verification_key, newer.verification_key], NOW)
    admission.claim(lease(other, slot=0, worker_epoch=7), NOW)
    admission.claim(lease(newer, slot=1, worker_epoch=7), NOW)
    later = NOW + LEASE_LIFE_S + 1
    refused = lease(slot=2, worker_epoch=7, fencing_number=8)
    assert refusal(admission, refused, later).reason is Reason.LEASE_FORGED
    admission.claim(lease(other, slot=2, worker_epoch=7, fencing_number=8), later)


def test_a_lease_of_a_former_registration_is_good_for_a_while() -> None:
    admission = new_admission()
    admission.register(2, [SIGNER.verification_key], NOW + 100)
    admission.claim(lease(worker_epoch=1, slot=0, fencing_number=5), NOW + 100)
    admission.claim(lease(worker_epoch=2, slot=1, fencing_number=5), NOW + 200)
    late = lease(worker_epoch=1, slot=2, fencing_number=5)
    assert refusal(admission, late, NOW + 200).reason is Reason.LEASE_EXPIRED


def test_worker_without_a_scheduler_refuses_leases_that_must_be_old() -> None:
    admission = new_admission()
    admission.detach(NOW + 100)
    granted = lease(fencing_number=5)
    assert refusal(admission, granted, NOW + 200).reason is Reason.LEASE_EXPIRED
    admission.claim(granted, NOW + 120)


def test_bytes_that_are_no_key_change_nothing() -> None:
    admission = new_admission()
    bad = registry_pb2.VerificationKey(key_id="bad", public_key=b"short")
    with pytest.raises(ValueError, match="32"):
        admission.register(2, [bad], NOW)
    admission.claim(lease(), NOW)


def test_revoking_a_slot_that_does_not_exist_does_nothing() -> None:
    admission = new_admission()
    assert not admission.revoke(SLOTS, 5, "lease")
    assert not admission.revoke(-1, 5, "lease")
    assert all(slot.fencing_number == 0 for slot in admission.slots)


def test_a_drained_worker_stays_drained_when_the_device_answers_again() -> None:
    admission = new_admission()
    admission.set_stuck(True)
    admission.drain()
    admission.set_stuck(False)
    assert refusal(admission, lease()).reason is Reason.DRAINING
