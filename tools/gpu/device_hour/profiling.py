"""A profile of the units of one second: which operations take the time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch.profiler import ProfilerActivity, profile, record_function

from device_hour.session import Session
from duplane.tools.bench.peaks import synchronize
from duplane.tools.bench.report import show

TRACE = "profile.json.gz"
MOST_BYTES = 16 * 2**20
"""A larger trace is deleted."""
MOST_ROWS = 40


def profiled(session: Session) -> dict[str, Any]:
    """Profile a unit of each slot, of which half listen and half speak, all in one launch each.

    Writes a trace for Perfetto beside the results, and returns the operations with the most time.
    """
    driver = session.loaded().driver
    slots = range(driver.model.constants.slot_count)
    speaking = slots[len(slots) // 2 :] or slots
    listening = slots[: len(slots) // 2]
    for slot in slots:
        driver.open(slot, rows=session.sizes.contexts[0])
    driver.speak(speaking, 4)
    driver.listen(listening)
    activities = [ProfilerActivity.CPU]
    if session.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        with record_function("units that listen"):
            driver.listen(listening)
        with record_function("units that speak"):
            driver.speak(speaking)
        synchronize(session.device)
    driver.close()
    operations = _operations(found.key_averages())
    path = session.options.out / TRACE
    found.export_chrome_trace(str(path))
    trace_bytes = path.stat().st_size
    if trace_bytes > MOST_BYTES:
        path.unlink()
    operations.sort(key=lambda one: -max(one["device_ms"], one["host_ms"]))
    show(
        "operations of a second",
        ("operation", "calls", "device ms", "host ms"),
        [
            (o["name"][:60], str(o["calls"]), f"{o['device_ms']:.2f}", f"{o['host_ms']:.2f}")
            for o in operations[:MOST_ROWS]
        ],
    )
    return {
        "device_ms": sum(one["device_ms"] for one in operations),
        "host_ms": sum(one["host_ms"] for one in operations),
        "trace_bytes": trace_bytes,
        "operations": operations[:MOST_ROWS],
    }


def _operations(averages: Iterable[object]) -> list[dict[str, Any]]:
    """Return the time of each operation itself. torch declares no types for them."""
    return [
        {
            "name": one.key,
            "calls": one.count,
            "device_ms": one.self_device_time_total / 1e3,
            "host_ms": one.self_cpu_time_total / 1e3,
        }
        for one in cast("Iterable[Any]", averages)
    ]
