"""What callers may send. Each check raises INVALID_FIELD with the path of the field at fault."""

from __future__ import annotations

import re
from collections.abc import Sequence

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2

MAX_ID_LENGTH = 256
MAX_SLOT_COUNT = 1024
MAX_HOLD_S = 86_400.0
MAX_FENCING_NUMBER = 2**62  # about twice what numbers from the wall clock are today

_TICKET_ID = re.compile(r"q_([0-9a-f]{16})")
_ADDRESS = re.compile(r"\S+:([0-9]{1,5})")
_KINDS = frozenset(lease_pb2.SessionKind.values()) - {lease_pb2.SESSION_KIND_UNSPECIFIED}
_STATES = frozenset(registry_pb2.SlotState.values()) - {registry_pb2.SLOT_STATE_UNSPECIFIED}


def _require(is_met: bool, field: str, rule: str) -> None:
    if not is_met:
        raise FabricError(Reason.INVALID_FIELD, f"{field} {rule}", field=field)


def _require_id(value: str, field: str) -> None:
    _require(bool(value), field, "is required")
    _require_short(value, field)


def _require_short(value: str, field: str) -> None:
    _require(len(value) <= MAX_ID_LENGTH, field, f"is longer than {MAX_ID_LENGTH} characters")


def check_acquire(request: lease_pb2.AcquireLeaseRequest) -> None:
    """Check a request for a slot."""
    _require_id(request.request_id, "request_id")
    _require(request.kind in _KINDS, "kind", "is no kind of session")
    _require_short(request.pool, "pool")
    _require_short(request.session_id, "session_id")
    _require_short(request.client_id, "client_id")


def check_estimates(request: admin_pb2.UpdateEstimatesRequest) -> None:
    """Check a change of what waits are estimated from."""
    for index, base in enumerate(request.bases):
        field = f"bases[{index}]"
        _require(base.kind in _KINDS, f"{field}.kind", "is no kind of session")
        base_s = base.base_duration.seconds + base.base_duration.nanos / 1e9
        rule = f"must be above 0 and at most {MAX_HOLD_S:.0f} s"
        _require(0 < base_s <= MAX_HOLD_S, f"{field}.base_duration", rule)
    if request.HasField("smoothing"):
        _require(0 < request.smoothing <= 1, "smoothing", "must be above 0 and at most 1")


def parse_ticket_id(ticket_id: str) -> int:
    """Return the order that a ticket id carries."""
    match = _TICKET_ID.fullmatch(ticket_id)
    if match is None:
        raise FabricError(
            Reason.INVALID_FIELD, "ticket_id was not told by a scheduler", field="ticket_id"
        )
    return int(match[1], 16)


def check_register(register: registry_pb2.Register) -> None:
    """Check the first message of a worker."""
    _require_id(register.worker_id, "register.worker_id")
    _require_id(register.incarnation, "register.incarnation")
    address = _ADDRESS.fullmatch(register.address)
    is_address = address is not None and 0 < int(address[1]) < 65536
    _require(is_address, "register.address", "is not host:port")
    _require_short(register.address, "register.address")
    _require_short(register.pool, "register.pool")
    _require(bool(register.kinds), "register.kinds", "is empty")
    for index, kind in enumerate(register.kinds):
        _require(kind in _KINDS, f"register.kinds[{index}]", "is no kind of session")
    is_counted = 0 < len(register.slots) <= MAX_SLOT_COUNT
    _require(is_counted, "register.slots", f"does not have 1 to {MAX_SLOT_COUNT} slots")
    _check_slots(register.slots, "register.slots")


def check_report(report: registry_pb2.Report, slot_count: int) -> None:
    """Check a later message of a worker that registered with `slot_count` slots."""
    is_whole = len(report.slots) == slot_count
    _require(is_whole, "report.slots", f"has {len(report.slots)} slots, {slot_count} registered")
    _check_slots(report.slots, "report.slots")
    _require(report.memory_used_bytes >= 0, "report.memory_used_bytes", "is negative")
    _require(report.unit_count >= 0, "report.unit_count", "is negative")


def _check_slots(slots: Sequence[registry_pb2.SlotReport], path: str) -> None:
    for index, slot in enumerate(slots):
        field = f"{path}[{index}]"
        _require(slot.slot == index, f"{field}.slot", f"is {slot.slot}, not {index}")
        _require(slot.state in _STATES, f"{field}.state", "is no state")
        is_sane = 0 <= slot.fencing_number < MAX_FENCING_NUMBER
        _require(is_sane, f"{field}.fencing_number", "is out of range")
        is_held = slot.state == registry_pb2.SLOT_STATE_OCCUPIED
        _require(bool(slot.lease_id) or not is_held, f"{field}.lease_id", "is required")
        _require_short(slot.lease_id, f"{field}.lease_id")
        _require_short(slot.session_id, f"{field}.session_id")
