"""What the stream of events costs an edge with a hundred sessions."""

from __future__ import annotations

import time

from duplane.edge.access import Caller, CallerKind
from duplane.edge.watching.fabric_view import FabricView
from duplane.edge.watching.reader import Reader
from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2

SECONDS = 60
SLOT_COUNT = 100
REPORT_INTERVAL_S = 2
READER_COUNT = 5
MAX_SHARE = 0.005  # of a core; the limit of a whole edge is 0.02, with what gRPC and sockets cost


def worker(unit_count: int) -> admin_pb2.WorkerStatus:
    slots = [
        registry_pb2.SlotReport(
            slot=slot,
            state=registry_pb2.SLOT_STATE_OCCUPIED,
            lease_id=f"lease-{slot}",
            session_id=f"sess_{slot:012d}",
            kind=lease_pb2.SESSION_KIND_AUDIO_DUPLEX,
        )
        for slot in range(SLOT_COUNT)
    ]
    return admin_pb2.WorkerStatus(
        worker=registry_pb2.Register(worker_id="w", slots=slots),
        report=registry_pb2.Report(unit_count=unit_count),
    )


def lease(number: int) -> admin_pb2.LeaseStatus:
    claims = lease_pb2.LeaseClaims(lease_id=f"lease-{number}", worker_id="w", slot=number % 100)
    return admin_pb2.LeaseStatus(claims=claims)


async def test_a_minute_of_a_hundred_sessions_and_five_pages_takes_little_time() -> None:
    """Each worker reports every two seconds, and a session begins and ends in each second."""
    view = FabricView()
    part = admin_pb2.Snapshot(workers=[worker(0)], leases=[lease(one) for one in range(SLOT_COUNT)])
    list(view.note(admin_pb2.WatchResponse(snapshot=part), 0.0))
    operator = Caller(CallerKind.OPERATOR)
    readers = [Reader(operator, view.snapshot) for _ in range(READER_COUNT)]
    for reader in readers:
        await reader.read()
    messages: list[list[admin_pb2.WatchResponse]] = []
    for second in range(SECONDS):
        messages.append(
            [
                admin_pb2.WatchResponse(lease=lease(second + SLOT_COUNT)),
                admin_pb2.WatchResponse(removed_lease_id=f"lease-{second}"),
            ]
        )
        if second % REPORT_INTERVAL_S == 0:
            messages[-1].append(admin_pb2.WatchResponse(worker=worker(second)))
    began_s = time.thread_time()
    written = 0
    for second, news in enumerate(messages):
        for message in news:
            list(view.note(message, float(second)))
        changes = view.changes()
        for reader in readers:
            reader.push(changes)
            written += len(await reader.read())
    share = (time.thread_time() - began_s) / SECONDS
    assert written > READER_COUNT * SECONDS * 100
    assert share < MAX_SHARE
