"""Measures whom and what a checkpoint hears, when it stops, and when it is quiet."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duplane.tools.command import UsageError
from duplane.worker.models.minicpm_o.audio.mel import UNIT_SAMPLES
from duplane.worker.models.minicpm_o.checkpoint import read_config
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.vision.preprocessing import Pictures
from training.corpus.espeak import SynthesisError
from training.evaluation.fabric_runner import FabricRunner, fabric_runner
from training.evaluation.inputs import Runner
from training.evaluation.material import Material, MissingError
from training.evaluation.model_runner import CONTEXT_ROWS, ModelRunner
from training.evaluation.outcomes import answer_of, spoken_units, stopped
from training.evaluation.rows import SEED
from training.evaluation.scores import Answered
from training.evaluation.seen import picture_rows
from training.evaluation.tries import FORCED_UNITS, Row, Try, draw_tries, rows
from training.sources.recordings import CREDIT

SLOTS = 20
REAL_TIME_S = 1.0
MOST_EXAMPLES = 60


@dataclass(frozen=True)
class HearingPlan:
    """The size and the material of a measurement. `is_paced` means real time through a fabric.

    Only rows with `part` in their name are measured. Raises UsageError if there is none.
    """

    cache: Path
    recordings: Path | None = None
    tries: int = 60
    seed: int = SEED
    is_paced: bool = True
    part: str = ""

    def __post_init__(self) -> None:
        if not self.rows():
            raise UsageError(f"rows is {self.part!r}: no row has this in its name")

    def rows(self) -> list[Row]:
        """Return the rows to measure."""
        return [row for row in (*rows(), *picture_rows()) if self.part in row.name]


async def measure_hearing(directory: Path, plan: HearingPlan) -> dict[str, Any]:
    """Measure a checkpoint; return the table as plain values."""
    material = Material(plan.cache, plan.recordings)
    drawn: list[tuple[Row, list[Try]]] = []
    skipped: dict[str, str] = {}
    can_see = sees(directory)
    unseen = {row.name for row in picture_rows()}
    for row in plan.rows():
        if row.name in unseen and not can_see:
            skipped[row.name] = "the checkpoint has no vision tower"
            continue
        _report(f"drawing: {row.name}")
        try:
            drawn.append((row, draw_tries(row, material, plan.tries, plan.seed)))
        except (MissingError, SynthesisError) as error:
            skipped[row.name] = str(error)
    begun = time.monotonic()
    async with _runner(directory, plan) as runner:
        found = await measured_rows(runner, drawn)
        late = runner.late_units if isinstance(runner, FabricRunner) else 0
    return {
        "checkpoint": directory.name,
        "seed": plan.seed,
        "real time": plan.is_paced,
        "seconds": round(time.monotonic() - begun),
        "units": sum(_unit_count(one) for _, tries in drawn for one in tries),
        "late units": late,
        "rows": found,
        "skipped": skipped,
        "credits": [CREDIT] if plan.recordings else [],
    }


def sees(directory: Path) -> bool:
    """Return whether a checkpoint has a vision tower. Raises CheckpointError."""
    return Pictures.load(directory, read_config(directory)) is not None


@contextlib.asynccontextmanager
async def _runner(directory: Path, plan: HearingPlan) -> AsyncGenerator[Runner]:
    if not plan.is_paced:
        model = DuplexModel.load(directory, slot_count=SLOTS, context_capacity=CONTEXT_ROWS)
        yield ModelRunner(model)
        return
    _report("starting a fabric")
    async with fabric_runner(directory, SLOTS, REAL_TIME_S) as runner:
        yield runner


async def measured_rows(
    runner: Runner, drawn: Sequence[tuple[Row, Sequence[Try]]]
) -> dict[str, Any]:
    """Run the tries of all rows side by side; return the values of each row."""

    async def measure(row: Row, tries: Sequence[Try]) -> dict[str, Any]:
        if chats := [one.chat for one in tries if one.chat is not None]:
            texts = await runner.chats(chats)
            _report(f"done: {row.name}")
            return row_values(row, tries, [[Answered(True, text, True)] for text in texts])
        alone = [one.alone for one in tries if one.alone is not None]
        outputs = await runner.sessions([*(one.given for one in tries), *alone])
        _report(f"done: {row.name}")
        return row_values(row, tries, outputs)

    async with asyncio.TaskGroup() as tasks:
        running = {row.name: tasks.create_task(measure(row, tries)) for row, tries in drawn}
    return {name: task.result() for name, task in running.items()}


def row_values(
    row: Row, tries: Sequence[Try], outputs: Sequence[Sequence[Answered]]
) -> dict[str, Any]:
    """Judge the tries of a row. After their outputs follow those without interruptions."""
    total, parts = Counter[str](), dict[str, Counter[str]]()
    examples: list[dict[str, Any]] = []
    alone = iter(outputs[len(tries) :])
    for one, units in zip(tries, outputs[: len(tries)], strict=True):
        example: dict[str, Any] = {"label": one.label}
        if row.judged == "quiet":
            spoken = spoken_units(units)
            counted = Counter(units=len(units) - FORCED_UNITS, spoken=spoken, tries=1)
            counted["quiet"] = int(not spoken)
        elif row.judged == "interruptions":
            without = next(alone)
            result = stopped(units, without, one.first_unit, one.noticed_unit)
            counted = Counter({result: 1, "tries": 1})
            example |= {"result": result, "said": _text(units), "alone": _text(without)}
        else:
            answer = answer_of(units, one.wanted, one.first_unit)
            counted = Counter({answer.outcome: 1, "tries": 1, "extra turns": answer.extra_turns})
            example |= {"result": answer.outcome, "said": answer.said, "wanted": one.wanted}
        total.update(counted)
        parts.setdefault(one.label, Counter()).update(counted)
        if example.get("result") not in (None, "right", "cut"):
            examples.append(example)
    return {
        "judged": row.judged,
        "total": dict(total),
        "parts": {name: dict(part) for name, part in sorted(parts.items())},
        "examples": examples[:MOST_EXAMPLES],
    }


def _text(units: Sequence[Answered]) -> str:
    return " | ".join(unit.text for unit in units if unit.speaks)


def _unit_count(one: Try) -> int:
    return len(one.given.samples) // UNIT_SAMPLES * (1 if one.alone is None else 2)


def _report(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {text}\n")


_COLUMNS = {
    "answers": ("right", "one of two", "wrong", "sorry", "silent", "extra turns"),
    "interruptions": ("cut", "spoken on", "ended by itself"),
    "quiet": ("quiet", "spoken", "units"),
}
_HEADINGS = {
    "answers": ("right", "one of two", "wrong", "sorry", "silent", "extra turns"),
    "interruptions": ("cut", "spoken on", "ended by itself"),
    "quiet": ("quiet tries", "units spoken in", "of units"),
}


def as_text(found: dict[str, Any]) -> str:
    """Return the table as text: one block for each way to judge, one row per line."""
    lines: list[str] = []
    for judged, columns in _COLUMNS.items():
        if all(row["judged"] != judged for row in found["rows"].values()):
            continue
        titles = ("tries", *_HEADINGS[judged])
        lines.append(f"{'':40}" + "".join(f"{title:>17}" for title in titles))
        for name, row in found["rows"].items():
            if row["judged"] == judged:
                cells = [row["total"].get(column, 0) for column in ("tries", *columns)]
                lines.append(f"{name:40}" + "".join(f"{cell:>17}" for cell in cells))
        lines.append("")
    pace = "at real-time pace through a fabric" if found["real time"] else "in this process"
    lines.append(f"{found['units']} units {pace} in {found['seconds']} s")
    if found["real time"]:
        lines.append(f"{found['late units']} units were late")
    lines += [f"skipped: {name}: {reason}" for name, reason in found["skipped"].items()]
    return "\n".join([*lines, *found["credits"]]) + "\n"
