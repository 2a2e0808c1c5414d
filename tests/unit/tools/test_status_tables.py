"""The tables of `duplane status` count slots by the rule of the metric `duplane_slots`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from duplane.fabric.v1 import admin_pb2, lease_pb2, registry_pb2
from duplane.scheduler.metrics import SchedulerMetrics
from duplane.scheduler.slot_counts import SLOT_STATES
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import Grant, GrantPut, Worker, WorkerPut
from duplane.scheduler.watch import Watch
from duplane.tools.operators.snapshots import SchedulerView
from duplane.tools.operators.tables import fabric_tables

REPORTED = (
    registry_pb2.SLOT_STATE_FREE,
    registry_pb2.SLOT_STATE_OCCUPIED,
    registry_pb2.SLOT_STATE_CLEANING,
    registry_pb2.SLOT_STATE_BROKEN,
)


async def snapshot(watch: Watch) -> admin_pb2.Snapshot:
    whole = admin_pb2.Snapshot()
    async for part in watch.snapshot():
        whole.MergeFrom(part)
    return whole


def test_release_of_each_worker_is_shown() -> None:
    state = SchedulerState(lambda: 0.0)
    watch = Watch(state, 1)
    for number, release in enumerate(("", "1.2.3"), 1):
        register = registry_pb2.Register(worker_id=f"w{number}", release=release)
        state.apply(WorkerPut(number, Worker.of(number, register)))
    table = fabric_tables([SchedulerView("s", asyncio.run(snapshot(watch)))], 9)
    rows = [line.split() for line in table.splitlines()]
    column = next(row for row in rows if row[:2] == ["worker", "state"]).index("release")
    assert {row[0]: row[column] for row in rows if row[:1] in (["w1"], ["w2"])} == {
        "w1": "-",
        "w2": "1.2.3",
    }


@pytest.mark.parametrize("is_withheld", [False, True], ids=["offered", "withheld"])
@pytest.mark.parametrize("is_silent", [False, True], ids=["ready", "silent"])
@pytest.mark.parametrize("reported", REPORTED)
@pytest.mark.parametrize("is_claimed", [None, False, True], ids=["no lease", "granted", "claimed"])
def test_a_slot_is_in_the_column_that_the_metric_names(
    reported: registry_pb2.SlotState, is_claimed: bool | None, is_silent: bool, is_withheld: bool
) -> None:
    state = SchedulerState(lambda: 0.0)
    metrics, watch = SchedulerMetrics(state), Watch(state, 1)
    slots = [registry_pb2.SlotReport(slot=0, state=reported, is_withheld=is_withheld)]
    worker = Worker.of(1, registry_pb2.Register(worker_id="w", slots=slots))
    state.apply(WorkerPut(1, replace(worker, is_silent=is_silent)))
    if is_claimed is not None:
        claims = lease_pb2.LeaseClaims(lease_id="lease", worker_id="w")
        state.apply(GrantPut(2, Grant(claims, is_claimed=is_claimed)))
    labels = {"role": "scheduler", "pool": ""}
    (name,) = [
        one
        for one in SLOT_STATES
        if metrics.registry.get_sample_value("duplane_slots", {**labels, "state": one})
    ]
    table = fabric_tables([SchedulerView("s", asyncio.run(snapshot(watch)))], 9)
    rows = [line.split() for line in table.splitlines()]
    header = next(row for row in rows if row[:2] == ["worker", "state"])
    counts = next(row for row in rows if row[:1] == ["w"])
    assert {one for one in SLOT_STATES if counts[header.index(one)] == "1"} == {name}
