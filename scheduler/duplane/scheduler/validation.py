"""Checks of requests. A failed check raises INVALID_FIELD with the path of the invalid field."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from duplane.fabric import bounds
from duplane.fabric.addresses import is_this_machine, parse_address, parse_ip
from duplane.fabric.bounds import MAX_QUEUE_TOKEN_LENGTH
from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.kinds import KIND_NAMES
from duplane.fabric.releases import MAX_FEATURE_COUNT, MAX_FEATURE_LENGTH
from duplane.fabric.settings import MAX_LABEL_COUNT, MAX_LABEL_LENGTH
from duplane.fabric.v1 import admin_pb2, lease_pb2, model_pb2, registry_pb2
from duplane.scheduler.holders import is_free_of_scope

MAX_ID_LENGTH = 256
MAX_SLOT_COUNT = 1024
MAX_REQUEST_BYTES = 128 * 1024  # enough for the longest fields; etcd accepts 1.5 MB
MAX_REGISTER_BYTES = 512 * 1024  # of a registration or report: enough for 1024 slots with long ids
MAX_MODEL_BYTES = 4096  # every grant repeats the model
MAX_AVOIDED_COUNT = 64
MAX_AVOIDED_S = 60.0
MAX_HOLD_S = 86_400.0
MAX_KEY_BYTES = 64  # of a caller's key, a holder, and a ticket's proof

_TICKET_ID = re.compile(r"q_([0-9a-f]{16})")
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
    is_small = request.ByteSize() <= MAX_REQUEST_BYTES  # includes unknown fields and the trace
    _require(is_small, "request", f"is larger than {MAX_REQUEST_BYTES} bytes")
    _require_id(request.request_id, "request_id")
    check_request_id(request.request_id)
    check_caller_key(request.caller_key)
    is_short = len(request.ticket_proof) <= MAX_KEY_BYTES
    _require(is_short, "ticket_proof", f"is longer than {MAX_KEY_BYTES} bytes")
    is_short = len(request.queue_token) <= MAX_QUEUE_TOKEN_LENGTH
    _require(is_short, "queue_token", f"is longer than {MAX_QUEUE_TOKEN_LENGTH} characters")
    _require(request.kind in KIND_NAMES, "kind", "is not a session kind")
    _require_short(request.pool, "pool")
    _require_short(request.session_id, "session_id")
    _require_short(request.client_id, "client_id")
    _require_short(request.tenant_id, "tenant_id")
    _check_limits(request.tenant_limits)
    _check_labels(request.needs, "needs")
    is_short = len(request.model) <= MAX_LABEL_LENGTH
    _require(is_short, "model", f"is longer than {MAX_LABEL_LENGTH} characters")
    for field, values in (
        ("avoided_worker_ids", request.avoided_worker_ids),
        ("avoided_worker_incarnations", request.avoided_worker_incarnations),
    ):
        is_bounded = len(values) <= MAX_AVOIDED_COUNT
        _require(is_bounded, field, f"names more than {MAX_AVOIDED_COUNT} workers")
        for index, value in enumerate(values):
            _require_short(value, f"{field}[{index}]")
    is_short = 0 <= to_seconds(request.avoided_duration) <= MAX_AVOIDED_S
    _require(is_short, "avoided_duration", f"must be at least 0 and at most {MAX_AVOIDED_S:.0f} s")


def _check_limits(limits: lease_pb2.TenantLimits) -> None:
    for field, value in (
        ("session_count", limits.session_count),
        ("waiting_count", limits.waiting_count),
        ("daily_minutes", limits.daily_minutes),
    ):
        _require(value >= 0, f"tenant_limits.{field}", "must be at least 0")


def check_release(request: lease_pb2.ReleaseLeaseRequest) -> None:
    """Check a request to give a lease back. Ids that nobody knows are valid."""
    check_request_id(request.request_id)
    check_caller_key(request.caller_key)


def check_request_id(request_id: str) -> None:
    """Refuse an id that could name a request of another caller."""
    _require(is_free_of_scope(request_id), "request_id", "contains a NUL character")


def check_caller_key(caller_key: bytes) -> None:
    """Check the secret of a caller, which may be absent."""
    is_short = len(caller_key) <= MAX_KEY_BYTES
    _require(is_short, "caller_key", f"is longer than {MAX_KEY_BYTES} bytes")


def _check_labels(labels: Mapping[str, str], field: str) -> None:
    is_bounded = len(labels) <= MAX_LABEL_COUNT
    _require(is_bounded, field, f"has more than {MAX_LABEL_COUNT} labels")
    for text in itertools.chain(labels, labels.values()):
        _require(bool(text), field, "has an empty name or value")
        is_short = len(text) <= MAX_LABEL_LENGTH
        _require(is_short, field, f"has a label longer than {MAX_LABEL_LENGTH} characters")


def check_estimates(request: admin_pb2.UpdateEstimatesRequest) -> None:
    """Check new base values for the estimates of waits."""
    for index, base in enumerate(request.bases):
        field = f"bases[{index}]"
        _require(base.kind in KIND_NAMES, f"{field}.kind", "is not a session kind")
        base_s = to_seconds(base.base_duration)
        rule = f"must be above 0 and at most {MAX_HOLD_S:.0f} s"
        _require(0 < base_s <= MAX_HOLD_S, f"{field}.base_duration", rule)
    if request.HasField("smoothing"):
        _require(0 < request.smoothing <= 1, "smoothing", "must be above 0 and at most 1")


def check_end(request: admin_pb2.EndSessionRequest) -> None:
    """Check which sessions an operator ends. A request without an id would name unnamed ones."""
    is_one = bool(request.session_id) != bool(request.lease_id)
    _require(is_one, "session_id", "or lease_id must be set, and not both")
    _require_short(request.session_id, "session_id")
    _require_short(request.lease_id, "lease_id")


def check_session(session_id: str) -> None:
    """Check the session whose leases are listed."""
    _require_short(session_id, "session_id")


def check_page(page_size: int, page_token: str) -> None:
    """Check the size and the token of the page that a request asks for."""
    _require(page_size >= 0, "page_size", "is negative")
    is_short = len(page_token) <= 2 * MAX_ID_LENGTH
    _require(is_short, "page_token", "was not issued by a scheduler")


def parse_ticket_id(ticket_id: str) -> int:
    """Return the order number that a ticket id contains."""
    match = _TICKET_ID.fullmatch(ticket_id)
    if match is None:
        raise FabricError(
            Reason.INVALID_FIELD, "ticket_id was not issued by a scheduler", field="ticket_id"
        )
    return int(match[1], 16)


def check_register(register: registry_pb2.Register, fencing_limit: int) -> None:
    """Check the first message of a worker. No slot may have a number above `fencing_limit`."""
    is_small = register.ByteSize() <= MAX_REGISTER_BYTES  # includes unknown fields
    _require(is_small, "register", f"is larger than {MAX_REGISTER_BYTES} bytes")
    _require_id(register.worker_id, "register.worker_id")
    _require_id(register.incarnation, "register.incarnation")
    _require(_is_address(register.address), "register.address", "is not host:port")
    _require_short(register.address, "register.address")
    _require_short(register.pool, "register.pool")
    _check_labels(register.labels, "register.labels")
    _check_model(register.model, "register.model")
    _require(bool(register.kinds), "register.kinds", "is empty")
    is_counted = len(register.kinds) <= len(KIND_NAMES)
    _require(is_counted, "register.kinds", f"names more than {len(KIND_NAMES)} kinds")
    for index, kind in enumerate(register.kinds):
        _require(kind in KIND_NAMES, f"register.kinds[{index}]", "is not a session kind")
    is_counted = 0 < len(register.slots) <= MAX_SLOT_COUNT
    _require(is_counted, "register.slots", f"does not have 1 to {MAX_SLOT_COUNT} slots")
    _check_slots(register.slots, "register.slots", fencing_limit)
    _require_short(register.release, "register.release")
    _check_features(register.features, "register.features")


def _check_features(features: Sequence[str], field: str) -> None:
    """Check names, of which this scheduler may know none. Every grant repeats them."""
    is_counted = len(features) <= MAX_FEATURE_COUNT
    _require(is_counted, field, f"has more than {MAX_FEATURE_COUNT} names")
    for index, name in enumerate(features):
        is_short = 0 < len(name) <= MAX_FEATURE_LENGTH
        rule = f"does not have 1 to {MAX_FEATURE_LENGTH} characters"
        _require(is_short, f"{field}[{index}]", rule)


def _check_model(model: model_pb2.Model, path: str) -> None:
    """Check a model's description. Absent fields are valid."""
    is_small = model.ByteSize() <= MAX_MODEL_BYTES  # includes unknown fields
    _require(is_small, path, f"is larger than {MAX_MODEL_BYTES} bytes")
    _require_short(model.name, f"{path}.name")
    _require_short(model.digest, f"{path}.digest")
    _require(model.parameter_count >= 0, f"{path}.parameter_count", "is negative")
    _require(model.context_token_limit >= 0, f"{path}.context_token_limit", "is negative")
    if model.HasField("unit_duration"):
        unit_s = to_seconds(model.unit_duration)
        _require_within(unit_s, bounds.UNIT_DURATION_S, f"{path}.unit_duration", " s")
    rates = (
        ("input_rate_hertz", model.input_rate_hertz),
        ("output_rate_hertz", model.output_rate_hertz),
    )
    for name, rate in rates:
        if rate:
            _require_within(rate, bounds.SAMPLE_RATE_HERTZ, f"{path}.{name}", "")


def _require_within(value: float, limits: tuple[float, float], field: str, unit: str) -> None:
    low, high = limits
    rule = f"must be at least {low:g}{unit} and at most {high:g}{unit}"
    _require(low <= value <= high, field, rule)


def check_reachable(address: str, peer: str) -> None:
    """Refuse a loopback address of a worker on another machine, because edges cannot reach it.

    `peer` is the other end of the worker's connection, as gRPC writes it: `ipv4:10.0.0.7:4711`.
    """
    host = unquote(peer.partition(":")[2].rpartition(":")[0])
    ip = parse_ip(host)
    is_elsewhere = ip is not None and not is_this_machine(ip)
    is_local = parse_address(address).is_loopback or parse_address(address).is_any
    rule = (
        f"is {address}, which cannot be reached from other machines; set the worker's --advertise"
    )
    _require(not (is_local and is_elsewhere), "register.address", rule)


def _is_address(text: str) -> bool:
    try:
        parse_address(text)
    except ValueError:
        return False
    return True


def check_report(report: registry_pb2.Report, slot_count: int, fencing_limit: int) -> None:
    """Check a report of a worker that registered with `slot_count` slots, as `check_register`."""
    is_small = report.ByteSize() <= MAX_REGISTER_BYTES  # includes unknown fields
    _require(is_small, "report", f"is larger than {MAX_REGISTER_BYTES} bytes")
    is_whole = len(report.slots) == slot_count
    _require(is_whole, "report.slots", f"has {len(report.slots)} slots, {slot_count} registered")
    _check_slots(report.slots, "report.slots", fencing_limit)
    _require(report.memory_used_bytes >= 0, "report.memory_used_bytes", "is negative")
    _require(report.unit_count >= 0, "report.unit_count", "is negative")


def _check_slots(slots: Sequence[registry_pb2.SlotReport], path: str, fencing_limit: int) -> None:
    for index, slot in enumerate(slots):
        field = f"{path}[{index}]"
        _require(slot.slot == index, f"{field}.slot", f"is {slot.slot}, not {index}")
        _require(slot.state in _STATES, f"{field}.state", "is not a state")
        _require(slot.fencing_number >= 0, f"{field}.fencing_number", "is negative")
        rule = "is more than a day ahead of this fabric; a restart of the worker resets it"
        _require(slot.fencing_number <= fencing_limit, f"{field}.fencing_number", rule)
        is_held = slot.state == registry_pb2.SLOT_STATE_OCCUPIED
        _require(bool(slot.lease_id) or not is_held, f"{field}.lease_id", "is required")
        _require_short(slot.lease_id, f"{field}.lease_id")
        _require_short(slot.session_id, f"{field}.session_id")
        _require_short(slot.tenant_id, f"{field}.tenant_id")
        is_short = len(slot.holder) <= MAX_KEY_BYTES
        _require(is_short, f"{field}.holder", f"is longer than {MAX_KEY_BYTES} bytes")
