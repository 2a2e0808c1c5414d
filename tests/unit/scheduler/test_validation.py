"""Checks of requests, for cases that no request over a socket can cause."""

from __future__ import annotations

import pytest

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, trace_pb2
from duplane.scheduler.validation import check_acquire, check_reachable

ELSEWHERE = "ipv4:203.0.113.7:4711"  # reserved for documentation, so no interface has this address


@pytest.mark.parametrize("address", ["127.0.0.1:8020", "localhost:8020", "[::1]:8020", "0.0.0.0:1"])
@pytest.mark.parametrize("peer", [ELSEWHERE, "ipv6:%5B2001:db8::7%5D:4711"])
def test_loopback_address_of_a_worker_on_another_machine_is_refused(
    address: str, peer: str
) -> None:
    with pytest.raises(FabricError, match="--advertise") as refused:
        check_reachable(address, peer)
    assert (refused.value.reason, refused.value.field) == (
        Reason.INVALID_FIELD,
        "register.address",
    )


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("203.0.113.7:8020", ELSEWHERE),
        ("worker.example:8020", ELSEWHERE),
        ("127.0.0.1:8020", "ipv4:127.0.0.1:4711"),
        ("127.0.0.1:8020", "ipv6:%5B::1%5D:4711"),
        ("127.0.0.1:8020", "unix:/run/socket"),
    ],
)
def test_other_addresses_are_accepted(address: str, peer: str) -> None:
    check_reachable(address, peer)


def test_request_that_etcd_could_not_hold_is_refused() -> None:
    trace = trace_pb2.TraceContext(tracestate="x" * 140_000)
    request = lease_pb2.AcquireLeaseRequest(
        request_id="r", kind=lease_pb2.SESSION_KIND_CHAT, trace=trace
    )
    with pytest.raises(FabricError, match="larger than"):
        check_acquire(request)


@pytest.mark.parametrize("field", ["avoided_worker_ids", "avoided_worker_incarnations"])
@pytest.mark.parametrize(
    ("values", "named"), [(["w"] * 65, "{}"), (["w"] * 2 + ["w" * 257], "{}[2]")]
)
def test_request_avoids_a_limited_number_of_workers(
    field: str, values: list[str], named: str
) -> None:
    request = lease_pb2.AcquireLeaseRequest(request_id="r", kind=lease_pb2.SESSION_KIND_CHAT)
    getattr(request, field).extend(values)
    with pytest.raises(FabricError) as refused:
        check_acquire(request)
    assert refused.value.field == named.format(field)


@pytest.mark.parametrize("avoided_s", [-1, 61])
def test_request_must_avoid_workers_for_a_limited_time(avoided_s: int) -> None:
    request = lease_pb2.AcquireLeaseRequest(request_id="r", kind=lease_pb2.SESSION_KIND_CHAT)
    request.avoided_duration.seconds = avoided_s
    with pytest.raises(FabricError, match="at most 60 s") as refused:
        check_acquire(request)
    assert refused.value.field == "avoided_duration"
