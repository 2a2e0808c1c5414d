"""No accepted message makes a later legal one unacceptable, whatever values it has."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.scheduler.scheduler_harness import (
    AUDIO,
    CHAT,
    CLEANING,
    FREE,
    OCCUPIED,
    OMNI,
    FakeWorker,
    SchedulerHarness,
    register_message,
    slot_reports,
)
from support.time_limits import WITHIN_S

from duplane.fabric import bounds
from duplane.fabric.durations import to_duration
from duplane.fabric.settings import MAX_LABEL_COUNT, MAX_LABEL_LENGTH
from duplane.fabric.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    lease_pb2,
    model_pb2,
    registry_pb2,
    trace_pb2,
)
from duplane.scheduler import revisions, validation

MAX_INT64 = 2**63 - 1
LONG = "\U0001f600" * validation.MAX_ID_LENGTH  # four bytes for each character


def longest_id(name: str) -> str:
    return name + LONG[len(name) :]


def highest_number() -> int:
    """Return the highest fencing number that is accepted, but for the time that the test takes."""
    return revisions.fencing_limit(0, time.time_ns() // 1_000_000)


def most_labels() -> dict[str, str]:
    count = MAX_LABEL_COUNT
    return {
        f"{index:02}" + "n" * (MAX_LABEL_LENGTH - 2): "v" * MAX_LABEL_LENGTH
        for index in range(count)
    }


def largest_model() -> model_pb2.Model:
    model = model_pb2.Model(
        name="m" * validation.MAX_ID_LENGTH,
        digest="d" * validation.MAX_ID_LENGTH,
        parameter_count=MAX_INT64,
        unit_duration=to_duration(bounds.UNIT_DURATION_S[0]),
        input_rate_hertz=bounds.SAMPLE_RATE_HERTZ[1],
        output_rate_hertz=bounds.SAMPLE_RATE_HERTZ[0],
    )
    assert model.ByteSize() <= validation.MAX_MODEL_BYTES
    return model


def hostile_register(worker_id: str, *, state: registry_pb2.SlotState) -> registry_pb2.Register:
    """Return a registration whose fields are as large as the bounds allow."""
    slots = slot_reports(*[state] * validation.MAX_SLOT_COUNT)
    for slot in slots:
        slot.fencing_number = highest_number()
        slot.lease_id = f"{worker_id}/{slot.slot}"
        slot.holder = b"h" * validation.MAX_KEY_BYTES
    register: registry_pb2.Register = register_message(
        worker_id,
        incarnation=LONG,
        address=longest_id("w:1")[:-2].replace("w:1", "w") + ":1",
        kinds=[AUDIO, OMNI, CHAT],
        labels=most_labels(),
        model=largest_model(),
        slots=slots,
        stream_number=MAX_INT64,
    )
    register.device.memory_bytes = MAX_INT64
    padding = validation.MAX_REGISTER_BYTES - register.ByteSize() - 16
    register.device.description = "d" * padding
    return register


def hostile_request(request_id: str, **fields: Any) -> lease_pb2.AcquireLeaseRequest:
    request = lease_pb2.AcquireLeaseRequest(
        request_id=longest_id(request_id),
        kind=AUDIO,
        session_id=LONG,
        client_id=LONG,
        needs=most_labels(),
        model="m" * MAX_LABEL_LENGTH,
        avoided_worker_ids=["w" * 64] * validation.MAX_AVOIDED_COUNT,
        avoided_duration=to_duration(validation.MAX_AVOIDED_S),
        caller_key=b"k" * validation.MAX_KEY_BYTES,
        ticket_proof=b"p" * validation.MAX_KEY_BYTES,
        queue_token="t" * validation.MAX_QUEUE_TOKEN_LENGTH,
        wants_queue_token=True,
        **fields,
    )
    padding = validation.MAX_REQUEST_BYTES - request.ByteSize() - 16
    request.trace.CopyFrom(trace_pb2.TraceContext(tracestate="t" * padding))
    return request


class Hostile:
    """Sends accepted messages with extreme values. Each method is one step of a sequence."""

    def __init__(self, harness: SchedulerHarness) -> None:
        self._harness = harness
        self._names = iter(range(1000))

    async def _attach(self, register: registry_pb2.Register) -> FakeWorker:
        worker = FakeWorker(await self._harness.channel(), register)
        self._harness._open.push_async_callback(worker.vanish)
        await worker.attach()
        return worker

    async def registers_occupied(self) -> None:
        await self._attach(hostile_register(f"h{next(self._names)}", state=OCCUPIED))

    async def registers_free_and_leaves(self) -> None:
        worker = await self._attach(hostile_register(f"h{next(self._names)}", state=FREE))
        await worker.vanish()

    async def reports(self) -> None:
        worker = await self._attach(register_message(f"h{next(self._names)}", 2))
        for slot in worker.slots:
            slot.state, slot.fencing_number = CLEANING, highest_number()
        await worker.report(memory_used_bytes=MAX_INT64, unit_count=MAX_INT64)
        await worker.report(is_draining=True)

    async def waits(self) -> None:
        number = next(self._names)
        fields = {**_fields(number), "ticket_id": "q_0000000000000000"}  # or no worker serves it
        await (await self._harness.caller(pool=longest_id(f"p{number}"), **fields)).read()

    async def returns(self) -> None:
        for ticket_id in ("q_ffffffffffffffff", "q_0000000000000000", f"q_{highest_number():016x}"):
            number = next(self._names)
            fields = {**_fields(number), "ticket_id": ticket_id}
            await (await self._harness.caller(pool=f"p{number}", **fields)).read()

    async def administers(self) -> None:
        channel = await self._harness.channel()
        admin: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(channel)
        for base_s, smoothing in ((validation.MAX_HOLD_S, 1.0), (1e-9, 5e-324)):
            bases = [
                admin_pb2.BaseHold(kind=kind, base_duration=to_duration(base_s))
                for kind in (AUDIO, OMNI, CHAT)
            ]
            await admin.UpdateEstimates(
                admin_pb2.UpdateEstimatesRequest(bases=bases, smoothing=smoothing)
            )
        token = "t" * 2 * validation.MAX_ID_LENGTH
        await admin.ListWorkers(admin_pb2.ListWorkersRequest(page_size=2**31 - 1, page_token=token))

    @property
    def steps(self) -> list[Callable[[], Awaitable[None]]]:
        return [
            self.registers_occupied,
            self.registers_free_and_leaves,
            self.reports,
            self.waits,
            self.returns,
            self.administers,
        ]


def _fields(number: int) -> dict[str, Any]:
    request = hostile_request(f"r{number}")
    names = [field.name for field, _ in request.ListFields()]
    return {name: getattr(request, name) for name in names if name != "kind"}


@pytest.mark.slow
@pytest.mark.usefixtures("every_store")
@pytest.mark.parametrize("seed", [1])
async def test_legal_worker_and_caller_are_served_after_any_accepted_messages(seed: int) -> None:
    async with SchedulerHarness.running() as harness, asyncio.timeout(WITHIN_S):
        early = await harness.worker("early")
        hostile = Hostile(harness)
        steps = hostile.steps
        random.Random(seed).shuffle(steps)
        for step in steps:
            await step()
        for worker in (early, await harness.worker("late")):
            name = worker.register.worker_id
            caller = await harness.caller(avoided_worker_ids={"early", "late"} - {name})
            granted = await caller.granted()
            claims = await worker.claim(granted)
            await worker.finish(claims.slot)
            await worker.vanish()
            await worker.attach_again()  # with the number of the grant
            assert worker.failure is None
            await worker.vanish()


def refused_by(check: Callable[[], None]) -> str:
    with pytest.raises(validation.FabricError) as refused:
        check()
    return refused.value.field


def test_every_bound_refuses_the_next_value_and_names_the_field() -> None:
    """The keys are the bounds of `validation`, so a new bound needs a row here and above."""

    def acquire(**fields: Any) -> Callable[[], None]:
        message = lease_pb2.AcquireLeaseRequest(**{"request_id": "r", "kind": AUDIO, **fields})
        return lambda: validation.check_acquire(message)

    def register(**fields: Any) -> Callable[[], None]:
        return lambda: validation.check_register(register_message(**fields), 0)

    many_slots = slot_reports(*[FREE] * (validation.MAX_SLOT_COUNT + 1))
    long_s = to_duration(validation.MAX_AVOIDED_S + 1)
    too_long = admin_pb2.BaseHold(kind=AUDIO, base_duration=to_duration(validation.MAX_HOLD_S + 1))
    estimates = admin_pb2.UpdateEstimatesRequest(bases=[too_long])
    trace = trace_pb2.TraceContext(tracestate="t" * validation.MAX_REQUEST_BYTES)
    device = registry_pb2.Device(description="d" * validation.MAX_REGISTER_BYTES)
    model = model_pb2.Model(name="m" * 100)
    model.MergeFromString(b"\xfa\x7f" + b"\x80\x20" + b"u" * 4096)  # an unknown field
    refused = {
        "MAX_ID_LENGTH": refused_by(acquire(pool=LONG + "x")),
        "MAX_SLOT_COUNT": refused_by(register(slots=many_slots)),
        "MAX_REQUEST_BYTES": refused_by(acquire(trace=trace)),
        "MAX_REGISTER_BYTES": refused_by(register(device=device)),
        "MAX_MODEL_BYTES": refused_by(register(model=model)),
        "MAX_QUEUE_TOKEN_LENGTH": refused_by(acquire(queue_token="t" * 513)),
        "MAX_AVOIDED_COUNT": refused_by(acquire(avoided_worker_ids=["w"] * 65)),
        "MAX_AVOIDED_S": refused_by(acquire(avoided_duration=long_s)),
        "MAX_HOLD_S": refused_by(lambda: validation.check_estimates(estimates)),
        "MAX_KEY_BYTES": refused_by(acquire(caller_key=b"k" * 65)),
        "MAX_FEATURE_COUNT": refused_by(register(features=["f"] * 65)),
        "MAX_FEATURE_LENGTH": refused_by(register(features=["f", "f" * 65])),
    }
    assert refused == {
        "MAX_ID_LENGTH": "pool",
        "MAX_SLOT_COUNT": "register.slots",
        "MAX_REQUEST_BYTES": "request",
        "MAX_REGISTER_BYTES": "register",
        "MAX_MODEL_BYTES": "register.model",
        "MAX_QUEUE_TOKEN_LENGTH": "queue_token",
        "MAX_AVOIDED_COUNT": "avoided_worker_ids",
        "MAX_AVOIDED_S": "avoided_duration",
        "MAX_HOLD_S": "bases[0].base_duration",
        "MAX_KEY_BYTES": "caller_key",
        "MAX_FEATURE_COUNT": "register.features",
        "MAX_FEATURE_LENGTH": "register.features[1]",
    }
    bounds_of_validation = {name for name in vars(validation) if name.startswith("MAX_")}
    assert refused.keys() == bounds_of_validation - {"MAX_LABEL_COUNT", "MAX_LABEL_LENGTH"}


@pytest.mark.parametrize("ahead_ms", [0, 86_400_000])
def test_fencing_number_of_another_store_is_accepted_up_to_a_day_ahead(ahead_ms: int) -> None:
    wall_ms = 1_800_000_000_000
    slots = slot_reports(FREE)
    limit = revisions.fencing_limit(revisions.at(wall_ms - 7 * 86_400_000), wall_ms)
    slots[0].fencing_number = revisions.at(wall_ms + ahead_ms)
    validation.check_register(register_message(slots=slots), limit)
    slots[0].fencing_number = revisions.at(wall_ms + 86_400_000) + 1
    register = register_message(slots=slots)
    assert refused_by(lambda: validation.check_register(register, limit)).endswith("fencing_number")


def test_number_of_this_store_is_accepted_although_its_clock_was_set_back() -> None:
    revision = revisions.at(1_800_000_000_000)
    assert revisions.fencing_limit(revision, 1_000_000_000_000) == revision


def test_reported_numbers_lift_the_limit_only_once() -> None:
    wall_ms = 1_800_000_000_000
    limit = revisions.fencing_limit(0, wall_ms)
    assert revisions.fencing_limit(limit, wall_ms) == limit
