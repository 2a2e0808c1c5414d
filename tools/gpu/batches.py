"""Units of 1 to 64 conversations at full size, all listening or half speaking."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from duplane.tools.bench.peaks import synchronize
from duplane.tools.bench.report import percentile
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import ConversationOptions, Unit, UnitOutput
from measure import Options, Report, Table, checkpoint_directory, load, read_options

TEXT_TOKENS = 7
"""The most text tokens of a speaking unit. Random weights rarely end a unit earlier."""
WARM_UNITS = 3
UNIT_ROWS = 30
"""The most rows that a unit adds to a context."""
COLUMNS = (
    *("conversations, graphs", "listening", "unit p50", "unit p99"),
    *("listen p50", "listen p99", "speak 1st", "speak p50", "speak p99", "settle"),
)


@dataclass(frozen=True)
class Sizes:
    """The numbers of conversations, their measured units, and the range of their context rows."""

    counts: tuple[int, ...]
    units: int
    shortest: int
    longest: int

    @property
    def context(self) -> int:
        """The capacity of a context, in rows."""
        return self.longest + UNIT_ROWS * (WARM_UNITS + self.units)


FULL = Sizes(counts=(1, 4, 16, 64), units=20, shortest=500, longest=3400)
SMALL = Sizes(counts=(1, 2), units=3, shortest=50, longest=200)


@dataclass
class Figures:
    """Measured seconds: of batches, from the start of a batch to each output, and of settling."""

    whole: list[float] = field(default_factory=list[float])
    listening: list[float] = field(default_factory=list[float])
    first_speaking: list[float] = field(default_factory=list[float])
    speaking: list[float] = field(default_factory=list[float])
    settle: list[float] = field(default_factory=list[float])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure with and without CUDA graphs; return the exit code."""
    options = read_options(arguments)
    report = Report("batches", options)
    sizes = SMALL if options.small else FULL
    title = f"units, ms; contexts of {sizes.shortest} to {sizes.longest} rows"
    table = report.table(title, COLUMNS)
    with checkpoint_directory(options) as directory:
        for cuda_graphs in (True, False):
            graphs = "on" if cuda_graphs else "off"
            with report.case(f"graphs {graphs}"):
                run(options, report, table, directory, sizes, cuda_graphs=cuda_graphs)
    return report.exit_code


def run(
    options: Options,
    report: Report,
    table: Table,
    directory: Path,
    sizes: Sizes,
    *,
    cuda_graphs: bool,
) -> None:
    """Measure all batch sizes with one loaded model, in randomly chosen slots."""
    model = load(options, directory, max(sizes.counts), sizes.context, cuda_graphs=cuda_graphs)
    graphs = "graphs" if cuda_graphs else "eager"
    for count in sizes.counts:
        slots = sorted(random.Random(count).sample(range(model.slot_count), count))
        for share in (1.0, 0.5):
            name = f"{count} {graphs}"
            if not report.has_time(f"{name}, {share:.0%} listening"):
                return
            with report.case(f"{name}, {share:.0%} listening"):
                figures = measure(model, slots, share, sizes, options.device)
                table.add(name, f"{int(count * share)}", *cells(figures))
    if options.device.type == "cuda":
        held = torch.cuda.max_memory_allocated(options.device) / 1e9
        report.table("memory", ("", "GB")).add(f"peak of allocated memory, {graphs}", held)


def cells(figures: Figures) -> list[float | str]:
    """Return the figures of one row, in milliseconds."""
    wanted = (
        *((figures.whole, share) for share in (0.5, 0.99)),
        *((figures.listening, share) for share in (0.5, 0.99)),
        (figures.first_speaking, 0.5),
        *((figures.speaking, share) for share in (0.5, 0.99)),
        (figures.settle, 0.5),
    )
    return [1e3 * percentile(values, share) if values else "" for values, share in wanted]


def measure(
    model: DuplexModel, slots: Sequence[int], share: float, sizes: Sizes, device: torch.device
) -> Figures:
    """Run units in conversations of unequal lengths. The first `share` of them listen."""
    listening = set(slots[: int(len(slots) * share)])
    figures = Figures()
    try:
        begin(model, slots, sizes)
        numbers = np.random.default_rng(0)
        for number in range(WARM_UNITS + sizes.units):
            sounds = numbers.normal(0, 0.1, (len(slots), 16_000)).astype(np.float32)
            units = [
                Unit(slot, sound, force_listen=slot in listening)
                for slot, sound in zip(slots, sounds, strict=True)
            ]
            found = figures if number >= WARM_UNITS else Figures()
            unit(model, units, device, found)
    finally:
        for slot in slots:
            model.close(slot)
    return figures


def begin(model: DuplexModel, slots: Sequence[int], sizes: Sizes) -> None:
    """Open conversations and fill their contexts to unequal lengths with random rows."""
    drawn = random.Random(0)
    for slot in slots:
        model.open(
            slot,
            ConversationOptions(
                seed=slot, force_listen_count=0, max_new_speak_tokens_per_chunk=TEXT_TOKENS + 1
            ),
        )
        fill(model, slot, drawn.randint(sizes.shortest, sizes.longest))


@torch.inference_mode()
def fill(model: DuplexModel, slot: int, length: int) -> None:
    """Fill the slot's context to at least `length` rows."""
    count = length - model.context_length(slot)
    if count > 0:
        ids = np.random.default_rng(slot).integers(0, len(model.tokens), count).tolist()
        model.llm.append_long(slot, model.llm.embed(ids))


def unit(model: DuplexModel, units: Sequence[Unit], device: torch.device, figures: Figures) -> None:
    """Run and settle one unit of each conversation. Raises an error if a unit fails."""
    synchronize(device)
    start = time.perf_counter()
    listening: list[float] = []
    speaking: list[float] = []
    for output in model.step(units):
        if not isinstance(output, UnitOutput):
            raise TypeError(f"a unit failed: {output}")
        (listening if output.is_listen else speaking).append(time.perf_counter() - start)
    stepped = time.perf_counter()
    failures = model.settle([one.slot for one in units])
    if failures:
        raise RuntimeError(f"settling failed: {failures}")
    synchronize(device)
    end = time.perf_counter()
    figures.whole.append(end - start)
    figures.settle.append(end - stepped)
    figures.listening += listening
    figures.speaking += speaking
    figures.first_speaking += speaking[:1]


if __name__ == "__main__":
    sys.exit(main())
