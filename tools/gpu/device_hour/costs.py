"""The costs of the engine's parts by size and context: the file that schedules are planned with."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import orjson

from device_hour.driver import OPTIONS, Batch, Driver, counts
from device_hour.session import Session
from duplane.fabric.files import write_atomically
from duplane.tools.bench.report import show
from duplane.tools.bench.stages import Stage, StageCall, StageWatch
from duplane.worker.models.types import WindowMode

FILE = "costs.json"
SCHEMA = 1
WARM_CALLS = 2
"""Calls of each size that no point counts: the first call of a size may plan or allocate."""
OUTLIER = 5
"""A call is an outlier if it takes more than this many times the median of its size."""
MOST_OUTLIERS = 50
WINDOW_ROWS = 256
"""The most rows that the units of a measured conversation have in its context, after the prompt."""
SEEING = 8
"""The most conversations that get pictures."""
CHOOSE = "choose"
"""The method that is a part of its own; the parts of all other methods are their stages."""
BLOCKS = {
    Stage.AUDIO.value: "hear",
    Stage.VISION.value: "vision",
    Stage.PREFILL.value: "pass",
    Stage.DECODE.value: "step",
    CHOOSE: "choose",
    Stage.SETTLE.value: "settle",
    Stage.TALKER.value: "talk",
    Stage.FLOW.value: "voc",
    Stage.HIFT.value: "voc",
}
"""The blocks of the parts. The time of the stage `mel` is within that of the audio encoder."""
CONTEXTUAL = {"pass", "step", "settle"}
"""Blocks whose time depends on the length of the contexts."""


class Size(NamedTuple):
    """What a time is measured for: a part, the size of its call, and the rows of the contexts."""

    part: str
    size: int
    context: int


@dataclass
class Samples:
    """The seconds of the calls of each size, in the order of the calls."""

    seconds: defaultdict[Size, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, calls: Iterable[StageCall], context: int) -> None:
        """Add the calls of a unit in contexts of about `context` rows."""
        for call in calls:
            part = CHOOSE if call.method == CHOOSE else call.stage.value
            rows = context if BLOCKS.get(part) in CONTEXTUAL else 0
            if part in BLOCKS:
                self.seconds[Size(part, call.size, rows)].append(call.seconds)

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield the points of the costs file. A block's time is the sum over its parts."""
        parts: defaultdict[tuple[str, int, int], list[list[float]]] = defaultdict(list)
        for size, seconds in self.seconds.items():
            measured = seconds[WARM_CALLS:] or seconds[-1:]
            parts[BLOCKS[size.part], size.size, size.context].append(measured)
        for (block, bucket, context), found in sorted(parts.items()):
            milliseconds = sum(1e3 * statistics.median(seconds) for seconds in found)
            yield {
                "block": block,
                "bucket": bucket,
                "context": context,
                "ms": milliseconds,
                "calls": min(map(len, found)),
            }

    def outliers(self) -> list[dict[str, Any]]:
        """Return the calls that took long beside others of their size, the slowest first."""
        found: list[dict[str, Any]] = []
        for size, seconds in self.seconds.items():
            median = statistics.median(seconds)
            found += [
                {**size._asdict(), "call": number, "ms": 1e3 * value, "median_ms": 1e3 * median}
                for number, value in enumerate(seconds)
                if value > OUTLIER * median
            ]
        return sorted(found, key=lambda outlier: -outlier["ms"])[:MOST_OUTLIERS]


def costs(session: Session) -> dict[str, Any]:
    """Measure units of all numbers of conversations in contexts of several lengths.

    The watch waits for the device around each call, so a time includes the host's launches.
    """
    loaded = session.loaded()
    watch, samples = StageWatch(loaded.model, session.device), Samples()
    try:
        for context in session.sizes.contexts:
            if session.has_time():
                _measure(session, loaded.driver, watch, samples, context)
                loaded.driver.close()
    finally:
        watch.remove()
        loaded.driver.close()
    found = _found(samples)
    _show("costs", ("block", "bucket", "context", "ms"), found["points"])
    _show(
        f"calls above {OUTLIER} times their median",
        ("part", "size", "context", "call", "ms", "median_ms"),
        found["outliers"],
    )
    return found


def _measure(
    session: Session, driver: Driver, watch: StageWatch, samples: Samples, context: int
) -> None:
    """Measure numbers of conversations with this context, as long as there is time.

    Only a few numbers are measured with other contexts than the first.
    """
    slots = range(driver.model.constants.slot_count)
    options = replace(
        OPTIONS,
        sliding_window_mode=WindowMode.BASIC,
        basic_window_high_tokens=context + WINDOW_ROWS,
        basic_window_low_tokens=context + WINDOW_ROWS // 2,
    )
    for slot in slots:
        driver.open(slot, options, rows=context)
    is_first = context == session.sizes.contexts[0]
    chosen = counts(len(slots)) if is_first else sorted({1, min(SEEING, len(slots)), len(slots)})
    for count in reversed(chosen):
        for run in _kinds(session, driver, slots[:count]):
            if not session.has_time():
                return
            watch.clear()
            run()
            samples.add(watch.timed, context)
        session.keep(_found(samples))
        write_costs(session)


def _kinds(session: Session, driver: Driver, slots: Sequence[int]) -> Iterator[Callable[[], Batch]]:
    """Yield calls that run one unit of each slot: listening, speaking, then seeing."""
    repeats = WARM_CALLS + session.sizes.repeats
    for _ in range(repeats):
        yield partial(driver.listen, slots)
    for number in range(repeats):
        yield partial(driver.speak, slots, 0 if number else repeats)
    if driver.model.constants.accepts_pictures and len(slots) <= SEEING:
        for _ in range(repeats):
            yield partial(driver.see, slots)


def _found(samples: Samples) -> dict[str, Any]:
    return {"points": list(samples.points()), "outliers": samples.outliers()}


def _show(title: str, columns: Sequence[str], found: list[dict[str, Any]]) -> None:
    rows = [[one[name] for name in columns] for one in found]
    texts = [[f"{c:.2f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    show(title, columns, texts)


def write_costs(session: Session) -> None:
    """Write the costs file from what is measured so far; `README.md` describes it."""
    measured: dict[str, Any] = {}
    for stage in ("environment", "costs", "host", "contention"):
        for result in session.results.every(stage):
            measured |= result
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "device": measured.get("name", session.options.device_name),
        "dtype": session.options.dtype,
        "host_ms": measured.get("launch_ms"),
        "busy_host_ms": measured.get("busy_launch_ms"),
        "contention": measured.get("contention"),
        "points": measured.get("points", []),
    }
    path = session.options.out / FILE
    write_atomically(path, orjson.dumps(content, option=orjson.OPT_INDENT_2))
