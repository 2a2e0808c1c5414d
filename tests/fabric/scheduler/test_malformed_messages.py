"""RegistryService over sockets: messages of workers that are malformed or out of order."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduler.scheduler_harness import (
    AUDIO,
    CHAT,
    FREE,
    OCCUPIED,
    FakeWorker,
    SchedulerHarness,
    register_message,
    slot_reports,
)

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import registry_pb2

UNKNOWN = registry_pb2.SLOT_STATE_UNSPECIFIED
pytestmark = pytest.mark.usefixtures("every_store")


async def refusal(harness: SchedulerHarness, message: registry_pb2.AttachRequest) -> FabricError:
    """Return the error of a stream whose first message is `message`."""
    worker = FakeWorker(await harness.channel(), register_message())
    with pytest.raises(FabricError) as failed:
        await worker.open_with(message)
    await worker.vanish()
    return failed.value


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"worker_id": ""}, "register.worker_id"),
        ({"incarnation": ""}, "register.incarnation"),
        ({"address": "nowhere"}, "register.address"),
        ({"address": "host:99999"}, "register.address"),
        ({"kinds": []}, "register.kinds"),
        ({"kinds": [AUDIO, 77]}, "register.kinds[1]"),
        ({"slots": []}, "register.slots"),
        ({"slots": slot_reports(*[FREE] * 1025)}, "register.slots"),
        ({"slots": slot_reports(FREE, UNKNOWN)}, "register.slots[1].state"),
        ({"slots": slot_reports(OCCUPIED)}, "register.slots[0].lease_id"),
        ({"slots": slot_reports(FREE, FREE)[1:]}, "register.slots[0].slot"),
        (
            {"slots": [registry_pb2.SlotReport(state=FREE, fencing_number=-1)]},
            "register.slots[0].fencing_number",
        ),
        (
            {"slots": [registry_pb2.SlotReport(state=FREE, tenant_id="t" * 257)]},
            "register.slots[0].tenant_id",
        ),
    ],
)
async def test_malformed_register_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    async with SchedulerHarness.running() as harness:
        message = registry_pb2.AttachRequest(register=register_message(**fields))
        refused = await refusal(harness, message)
        assert (refused.reason, refused.field) == (Reason.INVALID_FIELD, field)


async def test_stream_that_does_not_begin_with_register_is_refused() -> None:
    async with SchedulerHarness.running(register_timeout_s=0.05) as harness:
        report = registry_pb2.AttachRequest(report=registry_pb2.Report())
        for first in (report, registry_pb2.AttachRequest(), None):
            worker = FakeWorker(await harness.channel(), register_message())
            with pytest.raises(FabricError) as refused:
                await worker.open_with(first)
            assert (refused.value.reason, refused.value.field) == (Reason.OUT_OF_ORDER, "register")
            await worker.vanish()


async def test_second_register_ends_the_stream() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker()
        await worker.send(registry_pb2.AttachRequest(register=worker.register))
        assert (await worker.ended()).reason is Reason.OUT_OF_ORDER


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"slots": slot_reports(FREE)}, "report.slots"),
        ({"slots": slot_reports(FREE, UNKNOWN)}, "report.slots[1].state"),
        ({"slots": slot_reports(FREE, FREE), "unit_count": -1}, "report.unit_count"),
    ],
)
async def test_malformed_report_ends_the_stream_and_nothing_else(
    fields: dict[str, Any], field: str
) -> None:
    async with SchedulerHarness.running() as harness:
        operator = await harness.operator()
        worker = await harness.worker(slot_count=2)
        other = await harness.worker("other", kinds=[CHAT])
        await worker.report(**fields)
        ended = await worker.ended()
        assert (ended.reason, ended.field) == (Reason.INVALID_FIELD, field)
        await operator.until(lambda seen: list(seen.workers) == ["other"])
        await other.claim(await (await harness.caller(CHAT)).granted())
