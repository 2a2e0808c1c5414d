"""The tables and waterfalls of `duplane trace`, as text. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from duplane.fabric.monitoring import spans
from duplane.tools.bench.report import percentile, table
from duplane.tools.trace.units import NETWORK, Collected, Unit, UnitStage
from duplane.tools.trace.verdict import Usual, usual_times, verdict

_BAR_WIDTH = 40
_ORDER = (
    *(("edge", name) for name in (spans.READ, spans.PARSE, spans.QUEUE, spans.SEND, spans.MOVE)),
    (NETWORK, "there"),
    *(("worker", name) for name in spans.WORKER_STAGES),
    (NETWORK, "back"),
    *(("edge", name) for name in (spans.RENDER, spans.WRITE)),
)


@dataclass(frozen=True)
class Choice:
    """The choice of units to show: by session, by number, and how many of the slowest."""

    session: str = ""
    unit: int | None = None
    slowest: int = 10


def report(collected: Collected, choice: Choice) -> str:
    """Return the tables, and the waterfalls of the chosen units."""
    units = collected.chosen(choice.session, choice.unit)
    if not units:
        return "no unit was received\n" if not collected.units else "no such unit was received\n"
    usual = usual_times(collected.units.values())
    slowest = sorted(units, key=lambda unit: -unit.lasted_ms)[: choice.slowest]
    parts: list[str] = []
    if choice.unit is None:
        if choice.session:
            parts.append(session_steps(collected, choice.session))
        parts += [stage_table(units), slowest_table(slowest, usual)]
        slowest = slowest[:1]
    parts += [waterfall(unit, usual) for unit in slowest]
    if collected.dropped_unit_count:
        parts.append(f"{collected.dropped_unit_count} older units are no longer kept\n")
    return "".join(parts)


def stage_table(units: Sequence[Unit]) -> str:
    """Return a table of the time of each stage."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for unit in units:
        for stage in unit.stages():
            times[stage.place, stage.name].append(stage.lasted_ms)
    keys = sorted(times, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER))
    rows = [_times_row(f"{place} {name}", times[place, name]) for place, name in keys]
    rows.append(_times_row("whole unit", [unit.lasted_ms for unit in units]))
    late = sum(unit.is_late for unit in units)
    title = f"{len(units)} units, {late} late; ms of each stage"
    return table(title, ("", "units", "p50", "p95", "max"), rows)


def _times_row(name: str, times: Sequence[float]) -> tuple[str, ...]:
    shown = (percentile(times, 0.5), percentile(times, 0.95), max(times))
    return (name, str(len(times)), *(f"{value:.2f}" for value in shown))


def slowest_table(units: Sequence[Unit], usual: Usual) -> str:
    """Return a line for each unit: its name, its duration, and its verdict."""
    lines = ["the slowest units\n\n"]
    for unit in units:
        name = f"{unit.session_id or 'unnamed'} unit {_number(unit)}"
        lines.append(f"{unit.lasted_ms:9.1f} ms  {name}: {verdict(unit, usual)}\n")
    return "".join((*lines, "\n"))


def waterfall(unit: Unit, usual: Usual) -> str:
    """Return the stages of a unit as a chart of bars, one per line."""
    facts = [
        f"unit {_number(unit)} of {unit.session_id or 'an unnamed session'}",
        f"{unit.outcome}, {unit.lasted_ms:.1f} ms",
        *filter(None, (unit.decision,)),
    ]
    if unit.batch_size:
        facts.append(f"in a batch of {unit.batch_size}")
    if unit.edge is None or unit.worker is None:
        facts.append(f"without its span in the {'worker' if unit.edge else 'edge'}")
    lines = [", ".join(facts), f"trace {unit.trace_id}", ""]
    whole_ms = max(unit.lasted_ms, 1e-6)
    for stage in unit.stages():
        begin_ms = (stage.begin_ns - unit.begin_ns) / 1e6
        bar = _bar(begin_ms / whole_ms, stage.lasted_ms / whole_ms)
        name = f"{stage.place} {stage.name}"
        times = f"{begin_ms:9.2f} {stage.lasted_ms:9.2f} ms"
        lines.append(f"{name:<16} {times}  |{bar}|{_counts(unit, stage)}")
    lines += ["", verdict(unit, usual)]
    return "\n".join((*lines, "", ""))


def _number(unit: Unit) -> str:
    """Return the number of a unit in its session; "-" if the edge dropped it."""
    return str(unit.sequence) if unit.sequence >= 0 else "-"


def _bar(begin: float, length: float) -> str:
    """Return a bar; `begin` and `length` are shares of the whole width."""
    first = min(_BAR_WIDTH - 1, max(0, round(begin * _BAR_WIDTH)))
    width = min(_BAR_WIDTH - first, max(1, round(length * _BAR_WIDTH)))
    return (" " * first + "#" * width).ljust(_BAR_WIDTH)


def _counts(unit: Unit, stage: UnitStage) -> str:
    if unit.worker is None or stage.place != "worker":
        return ""
    counts = unit.worker.counts.get(stage.name, {}).values()
    return "".join(f"  {count} tokens" for count in counts if count)


def session_steps(collected: Collected, session_id: str) -> str:
    """Return the spans of a session as a chart of bars, one per line."""
    steps = collected.steps_of(session_id)
    if not steps:
        return ""
    begin_ns = steps[0].begin_ns
    whole_ms = max(max(step.end_ns for step in steps) - begin_ns, 1) / 1e6
    lines = [f"session {session_id}, {whole_ms / 1e3:.1f} s", ""]
    for step in steps:
        since_ms = (step.begin_ns - begin_ns) / 1e6
        lasted_ms = (step.end_ns - step.begin_ns) / 1e6
        bar = _bar(since_ms / whole_ms, lasted_ms / whole_ms)
        lines.append(
            f"{step.name:<16} {since_ms:9.2f} {lasted_ms:9.2f} ms  |{bar}|  {step.note}".rstrip()
        )
    return "\n".join((*lines, "", ""))
