"""Compares, bit by bit, one conversation alone and the same one in a batch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.loader import load_parts
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.probe import Probe
from duplane.worker.models.types import ConversationOptions, Unit, UnitOutput
from measure import Options, Report, Table, checkpoint_directory, read_options

CONTEXT = 1024
UNITS = 12
OWN = ConversationOptions(seed=1, force_listen_count=0, max_new_speak_tokens_per_chunk=8)


@dataclass
class Course:
    """One conversation: its outputs, and the logits after the input of each unit."""

    logits: list[Tensor] = field(default_factory=list[Tensor])
    outputs: list[UnitOutput] = field(default_factory=list[UnitOutput])


class LogitsProbe(Probe):
    """Keeps the logits of one slot."""

    def __init__(self) -> None:
        self.slot = 0
        self.seen: list[Tensor] = []

    def prefilled(self, slot: int, logits: Tensor, length: int) -> None:
        """Store a copy of the slot's logits."""
        del length
        if slot == self.slot:
            self.seen.append(logits.clone())


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare in the dtype of the flags and in float32; return 0 if all cases ran, else 1."""
    options = read_options(arguments)
    report = Report("bitwise", options)
    table = report.table(
        "units equal to those of the same conversation alone in slot 0",
        ("dtype, graphs, others, slot", "of", "logits", "ids", "audio", "first difference"),
    )
    slots = 4 if options.small else 64
    with checkpoint_directory(options) as directory:
        for dtype in dict.fromkeys((options.dtype, "float32")):
            for cuda_graphs in (True, False) if options.device.type == "cuda" else (False,):
                name = f"{dtype}, {'on' if cuda_graphs else 'off'}"
                if not report.has_time(name):
                    break
                with report.case(name):
                    model, probe = load(options, directory, slots, dtype, cuda_graphs=cuda_graphs)
                    compare(options, table, name, model, probe)
                    del model
    return report.exit_code


def load(
    options: Options, directory: Path, slots: int, dtype: str, *, cuda_graphs: bool
) -> tuple[DuplexModel, LogitsProbe]:
    """Load the checkpoint in this dtype, with a probe for one slot."""
    gc.collect()  # memory of the previous model
    probe = LogitsProbe()
    parts = load_parts(
        directory,
        slot_count=slots,
        context_capacity=CONTEXT,
        device=options.device_name,
        dtype=dtype,
    )
    model = DuplexModel(parts, probe=probe)
    if cuda_graphs:
        model.capture()
    return model, probe


def compare(
    options: Options, table: Table, name: str, model: DuplexModel, probe: LogitsProbe
) -> None:
    """Run the conversation alone, alone again, in another slot, and with more and more others."""
    last = model.slot_count - 1
    alone = run(options, model, probe, 0, 0)
    cases = ((0, 0), (last, 0), (0, 1), (last // 2, last // 8), (last // 2, last))
    for slot, others in cases[1::2] if options.small else cases:
        course = run(options, model, probe, slot, others)
        table.add(f"{name}, {others}, {slot}", *differences(alone, course))


def run(options: Options, model: DuplexModel, probe: LogitsProbe, slot: int, others: int) -> Course:
    """Run the conversation with `others` conversations of noise, half of which only listen."""
    probe.slot, probe.seen = slot, []
    free = [number for number in range(model.slot_count) if number != slot]
    company = sorted(np.random.default_rng(others).permutation(free)[:others].tolist())
    numbers = np.random.default_rng(7)
    own = np.random.default_rng(8)
    course = Course()
    try:
        model.open(slot, OWN)
        for other in company:
            model.open(other, replace(OWN, seed=100 + other))
        for number in range(2 if options.small else UNITS):
            units = [Unit(slot, _noise(own), force_listen=number % 4 == 0)]
            units += [Unit(o, _noise(numbers), force_listen=o % 2 == 0) for o in company]
            for output in model.step(units):
                if not isinstance(output, UnitOutput):
                    raise TypeError(f"a unit failed: {output}")
                if output.slot == slot:
                    course.outputs.append(output)
            model.settle([unit.slot for unit in units])
    finally:
        for used in (slot, *company):
            model.close(used)
    course.logits = [logits.cpu() for logits in probe.seen]
    return course


def _noise(numbers: np.random.Generator) -> np.ndarray:
    return numbers.normal(0, 0.1, 16_000).astype(np.float32)


def differences(one: Course, other: Course) -> tuple[int | str, ...]:
    """Count all units, and those with equal logits, ids and audio.

    Also return the largest error of the first logits that differ.
    """
    pairs = list(zip(one.logits, other.logits, strict=True))
    both = list(zip(one.outputs, other.outputs, strict=True))
    off = next(((a - b).abs().max().item() for a, b in pairs if not torch.equal(a, b)), 0.0)
    return (
        len(both),
        sum(torch.equal(a, b) for a, b in pairs),
        sum(a.token_ids == b.token_ids for a, b in both),
        sum(np.array_equal(a.audio, b.audio) for a, b in both),
        f"{off:.2e}",
    )


if __name__ == "__main__":
    sys.exit(main())
