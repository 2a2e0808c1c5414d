"""The spans of a session belong to the trace of its client, if the client sends one."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import DEFAULT_OFF
from support.edge.live_edge import end, receive, send
from support.fabric.traced_fabric import append, begin_session, traced_fabric
from support.scheduler.scheduler_harness import SchedulerHarness
from support.worker.worker_harness import running_worker, unit

from duplane.fabric.channel import open_channel
from duplane.fabric.monitoring import spans
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import lease_pb2, lease_pb2_grpc, session_pb2, session_pb2_grpc

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.mark.parametrize("place", ["header", "query"])
async def test_websocket_session_continues_the_clients_trace(place: str) -> None:
    headers = {"traceparent": TRACEPARENT} if place == "header" else {}
    query = f"&traceparent={TRACEPARENT}" if place == "query" else ""
    # A session with a sampled parent is sampled, although no other session is.
    async with traced_fabric(sampler=DEFAULT_OFF) as fabric:
        async with fabric.connect(f"mode=audio{query}", additional_headers=headers) as client:
            await begin_session(client)
            await send(client, append(0.5))
            await receive(client)
            await end(client)
        found = await fabric.ended(1)
    by_name = {span.name: span for span in found}
    session = by_name[spans.EDGE_SESSION]
    assert session.trace_id.hex() == TRACE_ID
    assert session.parent_span_id.hex() == SPAN_ID
    for name in (spans.SCHEDULER_QUEUE, spans.WORKER_SESSION, spans.EDGE_OPEN, spans.EDGE_CLAIM):
        assert by_name[name].trace_id.hex() == TRACE_ID
        assert by_name[name].parent_span_id == session.span_id
    of_unit = by_name[spans.EDGE_UNIT]
    assert of_unit.trace_id.hex() != TRACE_ID, "a unit is a trace of its own"
    assert of_unit.links[0].span_id == session.span_id
    assert by_name[spans.WORKER_UNIT].trace_id == of_unit.trace_id


@pytest.mark.parametrize("traceparent", ["", "x", f"00-{'0' * 32}-{SPAN_ID}-01", TRACEPARENT[:-4]])
async def test_invalid_traceparent_begins_a_new_trace(traceparent: str) -> None:
    async with traced_fabric() as fabric:
        headers = {"traceparent": traceparent}
        async with fabric.connect(additional_headers=headers) as client:
            await begin_session(client)
            await end(client)
        found = await fabric.ended(1)
    (session,) = [span for span in found if span.name == spans.EDGE_SESSION]
    assert not session.parent_span_id
    assert session.trace_id.hex() != TRACE_ID


async def test_grpc_client_names_its_trace_in_the_metadata() -> None:
    metadata = (("traceparent", TRACEPARENT), ("binary-bin", b"\x00"))
    async with running_worker() as rig:
        async with open_channel(rig.address) as channel:
            stub: session_pb2_grpc.SessionServiceAsyncStub
            stub = session_pb2_grpc.SessionServiceStub(channel)
            call = stub.Converse(metadata=metadata)
            claim = session_pb2.Claim(lease=rig.grant().lease)
            await call.write(session_pb2.ConverseRequest(claim=claim))
            await call.read()
            await call.write(session_pb2.ConverseRequest(open=session_pb2.Open()))
            await call.read()
            await call.write(session_pb2.ConverseRequest(unit=unit(0, 0.5)))
            await call.read()
            call.cancel()
        await rig.all_free()
        by_name = {span.name: span for span in rig.spans.get_finished_spans()}
    session, of_unit = by_name[spans.WORKER_SESSION], by_name[spans.WORKER_UNIT]
    assert session.parent
    assert f"{session.parent.span_id:016x}" == SPAN_ID
    assert of_unit.context
    assert f"{of_unit.context.trace_id:032x}" != TRACE_ID
    assert f"{of_unit.links[0].context.trace_id:032x}" == TRACE_ID


@pytest.mark.parametrize("place", ["metadata", "message"])
async def test_grpc_client_that_waits_for_a_slot_names_its_trace(place: str) -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("scheduler", SimpleSpanProcessor(exporter))
    request = lease_pb2.AcquireLeaseRequest(
        request_id="r", kind=lease_pb2.SESSION_KIND_AUDIO_DUPLEX
    )
    if place == "message":
        request.trace.traceparent = TRACEPARENT
    metadata = (("traceparent", TRACEPARENT),) if place == "metadata" else None
    async with SchedulerHarness.running(telemetry) as harness:
        await harness.worker()
        stub: lease_pb2_grpc.LeaseServiceAsyncStub
        stub = lease_pb2_grpc.LeaseServiceStub(await harness.channel())
        async for response in stub.AcquireLease(request, metadata=metadata):
            if response.HasField("granted"):
                break
    (wait,) = [one for one in exporter.get_finished_spans() if one.name == spans.SCHEDULER_QUEUE]
    assert wait.parent
    assert f"{wait.parent.span_id:016x}" == SPAN_ID
