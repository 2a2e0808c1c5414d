"""The model that a worker registers: it is checked, and every grant of the worker repeats it."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from support.scheduler.etcd_server import EtcdCluster
from support.scheduler.scheduler_harness import FakeWorker, SchedulerHarness, register_message

from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, model_pb2, registry_pb2

ECHO = model_pb2.Model(
    name="echo",
    parameter_count=7,
    context_token_limit=512,
    digest="0f" * 32,
    unit_duration=Duration(nanos=80_000_000),
    input_rate_hertz=24_000,
    output_rate_hertz=24_000,
    accepts_pictures=False,
)
AUDIO = lease_pb2.SESSION_KIND_AUDIO_DUPLEX


@pytest.mark.usefixtures("every_store")
async def test_grant_repeats_the_model_of_its_worker() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker(model=ECHO)
        first = await (await harness.caller()).granted()
        assert first.model == ECHO
        await worker.claim(first)
        waiting = await harness.caller()
        await waiting.stands(1)
        await worker.finish(0)
        assert (await waiting.granted()).model == ECHO


@pytest.mark.usefixtures("every_store")
async def test_grant_repeats_the_release_and_the_features_of_its_worker() -> None:
    features = ["end_session", "a feature of a later release"]
    async with SchedulerHarness.running() as harness:
        await harness.worker(release="1.2.3", features=features)
        granted = await (await harness.caller()).granted()
        assert (granted.release, list(granted.features)) == ("1.2.3", features)


@pytest.mark.usefixtures("every_store")
async def test_client_of_the_fabric_gets_the_model() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker(model=ECHO)
        async with FabricClient([harness.address]) as client:
            granted = await client.acquire(
                lease_pb2.AcquireLeaseRequest(request_id="r", kind=AUDIO)
            )
            assert granted.model == ECHO


@pytest.mark.usefixtures("every_store")
async def test_grant_of_a_worker_that_describes_no_model_has_none() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker()
        assert not (await (await harness.caller()).granted()).HasField("model")


@pytest.mark.usefixtures("every_store")
async def test_grant_keeps_fields_of_a_later_release() -> None:
    later = model_pb2.Model.FromString(ECHO.SerializeToString() + b"\xf8\x07\x01")  # field 127
    async with SchedulerHarness.running() as harness:
        await harness.worker(model=later)
        granted = await (await harness.caller()).granted()
        assert granted.model.SerializeToString() == later.SerializeToString()


@pytest.mark.usefixtures("every_store")
async def test_repeated_call_after_a_restart_gets_the_model() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker(model=ECHO, slot_count=2)
        assert (await (await harness.caller(request_id="r")).granted()).model == ECHO
        await harness.stop()
        await worker.ended()
        await harness.start()
        await worker.attach_again()
        assert (await (await harness.caller(request_id="r")).granted()).model == ECHO


async def test_other_scheduler_repeats_a_grant_with_the_model(
    etcd: EtcdCluster, prefix: str
) -> None:
    url = etcd.url(prefix)
    async with (
        SchedulerHarness.running(store=url) as first,
        SchedulerHarness.running(store=url) as second,
    ):
        await first.worker(model=ECHO)
        operator = await second.operator()
        await operator.until(lambda seen: "w" in seen.workers)
        granted = await (await first.caller(request_id="r")).granted()
        again = await (await second.caller(request_id="r")).granted()
        assert (again.lease_id, again.model) == (granted.lease_id, ECHO)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "x" * 257}, "name"),
        ({"digest": "x" * 257}, "digest"),
        ({"parameter_count": -1}, "parameter_count"),
        ({"context_token_limit": -1}, "context_token_limit"),
        ({"unit_duration": Duration()}, "unit_duration"),
        ({"unit_duration": Duration(nanos=9_000_000)}, "unit_duration"),
        ({"unit_duration": Duration(seconds=-1)}, "unit_duration"),
        ({"unit_duration": Duration(seconds=11)}, "unit_duration"),
        ({"input_rate_hertz": 3_999}, "input_rate_hertz"),
        ({"input_rate_hertz": 192_001}, "input_rate_hertz"),
        ({"output_rate_hertz": -1}, "output_rate_hertz"),
    ],
)
async def test_model_out_of_bounds_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    async with SchedulerHarness.running() as harness:
        refused = await refusal(harness, model_pb2.Model(**fields))
        assert (refused.reason, refused.field) == (Reason.INVALID_FIELD, f"register.model.{field}")


async def test_large_model_is_refused() -> None:
    unknown = model_pb2.Model.FromString(b"\xfa\x07\x88\x27" + bytes(5000))  # field 127
    async with SchedulerHarness.running() as harness:
        refused = await refusal(harness, unknown)
        assert (refused.reason, refused.field) == (Reason.INVALID_FIELD, "register.model")


async def refusal(harness: SchedulerHarness, model: model_pb2.Model) -> FabricError:
    """Return the error with which the scheduler refuses a worker with this model."""
    worker = FakeWorker(await harness.channel(), register_message())
    with pytest.raises(FabricError) as failed:
        await worker.open_with(registry_pb2.AttachRequest(register=register_message(model=model)))
    await worker.vanish()
    return failed.value
