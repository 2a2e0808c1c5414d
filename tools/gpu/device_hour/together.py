"""Units that all arrive at the same moment: the worst case of each number of conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from device_hour.driver import Driver, counts
from device_hour.session import Session
from duplane.tools.bench.report import percentile, show

WARM_UNITS = 2


def together(session: Session) -> dict[str, Any]:
    """Run conversations in step, first in all slots, then in fewer; all listen, then half speak.

    Returns milliseconds from the launch to the answers.
    """
    driver = session.loaded().driver
    found: dict[str, Any] = {"columns": ("conversations", *_COLUMNS), "rows": []}
    for count in reversed(counts(driver.model.constants.slot_count)):
        if not session.has_time():
            break
        found["rows"].append([count, *_measure(driver, range(count), session.sizes.repeats)])
        session.keep(found)
        driver.close()
    rows = [[str(row[0]), *(f"{cell:.1f}" for cell in row[1:])] for row in found["rows"]]
    show("units in step, ms", found["columns"], rows)
    return found


_COLUMNS = ("all listen p50", "max", "half listen p50", "max", "half speak p50", "max")


def _measure(driver: Driver, slots: Sequence[int], repeats: int) -> list[float]:
    for slot in slots:
        driver.open(slot)
    alone = [driver.listen(slots).seconds for _ in range(WARM_UNITS + repeats)][WARM_UNITS:]
    speaking = slots[len(slots) // 2 :]
    listening: list[float] = []
    spoken: list[float] = []
    driver.speak(speaking, 1 + WARM_UNITS + repeats)
    for number in range(WARM_UNITS + repeats):
        units = [driver.noise(slot, force_listen=slot not in speaking) for slot in slots]
        batch = driver.units(units)
        if number < WARM_UNITS:
            continue
        for output, seconds in zip(batch.outputs, batch.seconds, strict=True):
            (listening if output.is_listen else spoken).append(seconds)
    kinds = ([second for seconds in alone for second in seconds], listening, spoken)
    figures = [(percentile(kind, 0.5), max(kind, default=float("nan"))) for kind in kinds]
    return [1e3 * figure for both in figures for figure in both]
