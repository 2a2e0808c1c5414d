"""`duplane bench rebuild --window`: rebuilds from what an edge keeps of a long conversation.

Each rebuild is compared with a rebuild from all units: the context, and the next units.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from duplane.fabric.past_units import PastUnits
from duplane.tools.bench.kept_units import given_back, kept_unit
from duplane.tools.bench.model import PROMPT_ROWS, model_directory, run_units
from duplane.tools.bench.options import RebuildBench
from duplane.tools.bench.peaks import synchronize
from duplane.tools.bench.report import show
from duplane.worker.models.minicpm_o.dtype import choose_dtype
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.torch_device import open_device
from duplane.worker.models.types import (
    ConversationOptions,
    PastUnit,
    Rebuilt,
    Unit,
    UnitOutput,
    WindowMode,
)

NEXT_UNITS = 8
"""Number of units after each rebuild that are compared."""
FORCED_EVERY = 9
"""In each unit with such a number the model must listen, which interrupts its turns."""
PICTURE_ROWS = 600
LIVE, FULL, KEPT = range(3)
"""The slots: of the conversation, of its rebuilds from all units, and of those from kept units."""
_UNIT_SAMPLES = 16_000


@dataclass(frozen=True)
class _Run:
    unit: Unit
    output: UnitOutput


class _Conversation:
    """A conversation with a context window, and what an edge keeps of it."""

    def __init__(self, bench: RebuildBench, model: DuplexModel, device: torch.device) -> None:
        self.kept = PastUnits()
        self.runs: list[_Run] = []
        self._model, self._device, self._windows = model, device, bench.windows
        # On a CPU, other processes do not change the time of this process.
        self._seconds = time.process_time if device.type == "cpu" else time.perf_counter
        self._random = np.random.default_rng(0)
        self._frames = (bench.picture.read_bytes(),) if bench.picture else ()
        self._options = ConversationOptions(
            seed=7,
            force_listen_count=1,
            temperature=1.2,
            top_p=0.95,
            sliding_window_mode=WindowMode(bench.window),
            basic_window_high_tokens=bench.window_rows,
            basic_window_low_tokens=bench.window_rows * 2 // 3,
            context_max_units=bench.window_units,
            context_previous_max_tokens=30,
        )
        model.open(LIVE, self._options)

    def live(self, count: int) -> None:
        """Run units until the conversation has `count` of them."""
        while (number := len(self.runs)) < count:
            noise = self._random.normal(0, 0.1, _UNIT_SAMPLES)
            sound = (np.round(noise * 32768) / 32768).astype(np.float32)
            is_forced = number % FORCED_EVERY == FORCED_EVERY - 1
            unit = Unit(LIVE, sound, is_forced, self._frames, sequence=number)
            (output,) = run_units(self._model, [unit])
            self.runs.append(_Run(unit, output))
            self.kept.append(kept_unit(unit, output))
            self.kept.drop_before(next(self.kept.begins(self._windows)))

    def past(self, slot: int) -> list[PastUnit]:
        """Return what is kept of all units so far; for `FULL`, all of them whole."""
        if slot == KEPT:
            pairs = zip(self.kept.units, self.runs, strict=True)
            return [given_back(slot, past, run.unit) for past, run in pairs]
        return [given_back(slot, kept_unit(run.unit, run.output), run.unit) for run in self.runs]

    def rebuild(self, slot: int, past: Sequence[PastUnit]) -> float:
        """Rebuild the conversation; return the seconds that this takes."""
        self._model.close(slot)
        self._model.open(slot, self._options)
        synchronize(self._device)
        begin_s, is_complete = self._seconds(), False
        while not is_complete:
            result = self._model.rebuild(slot, past)
            if not isinstance(result, Rebuilt) or (result.is_complete and result.lack):
                raise RuntimeError(f"the rebuild failed: {result}")
            past, is_complete = past[result.unit_count :], result.is_complete
        synchronize(self._device)
        return self._seconds() - begin_s

    def run_again(self, numbers: range) -> list[UnitOutput]:
        """Run units of the conversation in the slot that was rebuilt from kept units."""
        found: list[UnitOutput] = []
        for number in numbers:
            first = self.runs[number].unit
            unit = Unit(KEPT, first.audio, first.force_listen, first.frames, sequence=number)
            found += run_units(self._model, [unit])
        return found


def bench_rebuild_window(bench: RebuildBench) -> None:
    """Run a conversation, rebuild it after each number of units in two ways, and print a table.

    Raises `CheckpointError`, ValueError, and `StartError` for a device that cannot be used.
    """
    torch.set_num_threads(bench.threads)
    device = open_device(bench.device)
    with model_directory(bench) as directory:
        model = DuplexModel.load(
            directory,
            slot_count=3,
            context_capacity=PROMPT_ROWS + max(bench.window_rows, PICTURE_ROWS) * 2,
            device=bench.device,
            dtype=choose_dtype(bench.dtype, directory, device),
        )
    conversation = _Conversation(bench, model, device)
    drawn = np.random.default_rng(1).integers(1, max(bench.units), bench.cuts)
    rows: list[tuple[str, ...]] = []
    last = 0
    for cut in sorted({*bench.units, *map(int, drawn)}):
        last = max(cut, last)
        conversation.live(last)
        rows.append(_row(conversation, model, last))
        last += NEXT_UNITS
    show(
        f"rebuild of a conversation of {model.name} with the window {bench.window}",
        (
            *("units", "rows", "fed", "heard", "MB kept", "ms", "ms of all", "difference"),
            *("ids", "speech", "samples"),
        ),
        rows,
    )


def _row(conversation: _Conversation, model: DuplexModel, cut: int) -> tuple[str, ...]:
    """Rebuild the conversation from what is kept after `cut` units, and compare the results."""
    kept = conversation.kept
    fed, heard, megabytes = kept.fed_from, kept.heard_from, kept.byte_count / 1e6
    full_s = conversation.rebuild(FULL, conversation.past(FULL))
    kept_s = conversation.rebuild(KEPT, conversation.past(KEPT))
    length, difference = model.llm.cache.length(KEPT), _difference(model)
    conversation.live(cut + NEXT_UNITS)
    numbers = range(cut, cut + NEXT_UNITS)
    pairs = [
        (again, conversation.runs[number].output)
        for number, again in zip(numbers, conversation.run_again(numbers), strict=True)
    ]
    return (
        str(cut),
        str(length),
        str(cut - fed),
        str(fed - heard),
        f"{megabytes:.2f}",
        f"{kept_s * 1e3:,.0f}",
        f"{full_s * 1e3:,.0f}",
        f"{difference:.1e}",
        str(sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)),
        str(sum(ours.change == theirs.change for ours, theirs in pairs)),
        str(sum(np.array_equal(ours.audio, theirs.audio) for ours, theirs in pairs)),
    )


def _difference(model: DuplexModel) -> float:
    """Return the largest difference of the rebuilt contexts, relative to the largest number."""
    cache = model.llm.cache
    if cache.length(KEPT) != cache.length(FULL):
        raise RuntimeError("the rebuilt contexts have different lengths")
    largest = 0.0
    for ours, theirs in zip(cache.read(KEPT), cache.read(FULL), strict=True):
        largest = max(largest, float((ours - theirs).abs().max() / theirs.abs().max()))
    return largest
