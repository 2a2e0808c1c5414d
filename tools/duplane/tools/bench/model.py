"""`duplane bench model`: what every stage of the model takes, by batch size."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from duplane.tools.bench.peaks import Peaks, measure_peaks, synchronize
from duplane.tools.bench.stages import Stage, StageWatch, moved_bytes
from duplane.tools.bench.table import percentile, show
from duplane.tools.checkpoints.random_weights import write_random
from duplane.worker.model.model import DuplexModel
from duplane.worker.model.parts import torch_dtype
from duplane.worker.model.types import ConversationOptions, FloatArray, UnitInput, UnitOutput

WARM_UNITS = 2
UNIT_ROWS = 32
"""Rows that a unit may take, with room to spare."""
PROMPT_ROWS = 512
TEXT_TOKENS = 6
"""Text of a speaking unit, at most: a second's worth, where random weights rarely stop."""
FLOAT32_STAGES = (Stage.MEL, Stage.FLOW, Stage.HIFT)


@dataclass(frozen=True)
class ModelBench:
    """What is measured: a directory, or a random checkpoint like a model at a scale."""

    checkpoint: Path | None
    like: str
    scale: float
    device: str
    dtype: str
    slots: tuple[int, ...]
    units: int
    threads: int


@dataclass
class Figures:
    """Measurements of one batch size: seconds by kind of unit and stage, and what they cost."""

    units: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stages: defaultdict[tuple[str, Stage], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    flops: dict[Stage, float] = field(default_factory=dict[Stage, float])
    moved: dict[Stage, int] = field(default_factory=dict[Stage, int])


LISTENING, SPEAKING = "listening", "speaking"


def bench_model(bench: ModelBench) -> None:
    """Load, measure and print. Raises `CheckpointError` or ValueError for what cannot be."""
    torch.set_num_threads(bench.threads)
    device, dtype = torch.device(bench.device), torch_dtype(bench.dtype)
    peaks = measure_peaks(device, {dtype, torch.float32})
    with _directory(bench) as directory:
        empty = held_bytes(device)
        model = DuplexModel.load(
            directory,
            slot_count=max(bench.slots),
            context_capacity=PROMPT_ROWS + 2 * (WARM_UNITS + bench.units + 1) * UNIT_ROWS,
            device=bench.device,
            dtype=bench.dtype,
        )
    before = held_bytes(device)
    _say(bench, model, peaks, dtype)
    watch = StageWatch(model, device)
    during = 0
    for slots in bench.slots:
        figures = _measure(model, watch, slots, bench, device)
        during = max(during, held_bytes(device))
        for slot in range(slots):
            model.close(slot)
        _show(figures, slots, peaks, dtype)
    show(
        "memory, MB",
        ("", "held"),
        [
            ("the model's own tensors", f"{model.memory_bytes / 1e6:,.1f}"),
            ("before the model was loaded", f"{empty / 1e6:,.1f}"),
            ("before the first conversation", f"{before / 1e6:,.1f}"),
            ("during, at most", f"{during / 1e6:,.1f}"),
            ("after the last was closed", f"{held_bytes(device) / 1e6:,.1f}"),
        ],
    )


def held_bytes(device: torch.device) -> int:
    """Memory in tensors on the device, or of the process where the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    resident = Path("/proc/self/statm").read_text().split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _directory(bench: ModelBench) -> Generator[Path, None, None]:
    if bench.checkpoint is not None:
        yield bench.checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="duplane-bench-") as name:
        write_random(Path(name), bench.like, factor=bench.scale)
        yield Path(name)


def _say(bench: ModelBench, model: DuplexModel, peaks: Peaks, dtype: torch.dtype) -> None:
    what = bench.checkpoint or f"random, like {bench.like} at scale {bench.scale:g}"
    print(f"{model.name} ({what}), {model.parameter_count / 1e6:,.1f} M parameters, {bench.dtype}")
    print(
        f"{bench.device}: {peaks.bytes_per_s / 1e9:,.1f} GB/s copied,"
        f" {peaks.flops_per_s[dtype] / 1e12:,.2f} TFLOP/s in {bench.dtype},"
        f" {peaks.flops_per_s[torch.float32] / 1e12:,.2f} in float32 (mel and vocoder)\n"
    )


def _measure(
    model: DuplexModel, watch: StageWatch, slots: int, bench: ModelBench, device: torch.device
) -> Figures:
    """Run conversations in the first `slots` slots: speaking units, then as many listening."""
    figures = Figures()
    for slot in range(slots):
        options = ConversationOptions(
            seed=slot,
            force_listen_count=0,
            max_new_speak_tokens_per_chunk=TEXT_TOKENS + 1,
        )
        model.open(slot, options)
    random = np.random.default_rng(0)
    for listens in (False, True):
        for number in range(WARM_UNITS + bench.units):
            sound = random.normal(0, 0.1, (slots, 16_000)).astype(np.float32)
            kind = _unit(model, watch, sound, listens, device, figures, number >= WARM_UNITS)
            if number == WARM_UNITS + bench.units - 1 and kind == SPEAKING:
                figures.moved = moved_bytes(model, slots)
        watch.counts_flops = True
        watch.clear()
        sound = random.normal(0, 0.1, (slots, 16_000)).astype(np.float32)
        _run(model, sound, listens)
        watch.counts_flops = False
        figures.flops |= {stage: watch.flops[stage] / watch.calls[stage] for stage in watch.flops}
        watch.flops.clear()
    return figures


def _run(model: DuplexModel, sound: FloatArray, listens: bool) -> list[UnitOutput]:
    """One unit in each of the first slots, settled."""
    inputs = [UnitInput(slot, row, force_listen=listens) for slot, row in enumerate(sound)]
    outputs = list(model.step(inputs))
    model.settle(range(len(sound)))
    found = [output for output in outputs if isinstance(output, UnitOutput)]
    if len(found) < len(outputs):
        raise RuntimeError(f"units failed: {outputs}")
    return found


def _unit(
    model: DuplexModel,
    watch: StageWatch,
    sound: FloatArray,
    listens: bool,
    device: torch.device,
    figures: Figures,
    counts: bool,
) -> str:
    """Run one unit and keep its figures, if it counts and all slots did the same."""
    watch.clear()
    synchronize(device)
    begin = time.perf_counter()
    outputs = _run(model, sound, listens)
    synchronize(device)
    seconds = time.perf_counter() - begin
    kinds = {LISTENING if output.is_listen else SPEAKING for output in outputs}
    kind = kinds.pop() if len(kinds) == 1 else "mixed"
    if counts:
        figures.units[kind].append(seconds)
        for stage, spent in watch.seconds.items():
            figures.stages[kind, stage].append(spent)
        if steps := watch.calls[Stage.DECODE]:
            # The lap has the choices in it, beside the model's own passes.
            lap = max(output.stage_s["decode"] for output in outputs)
            figures.stages[kind, Stage.DECODE][-1] = lap / steps
    return kind


def _show(figures: Figures, slots: int, peaks: Peaks, dtype: torch.dtype) -> None:
    units = figures.units
    rows = [
        (
            "whole unit",
            *_times(units[LISTENING]),
            *_times(units[SPEAKING]),
            *("",) * 4,
        )
    ]
    for stage in Stage:
        listening = figures.stages[LISTENING, stage]
        speaking = figures.stages[SPEAKING, stage]
        if not listening and not speaking:
            continue
        typical = percentile(speaking or listening, 0.5)
        cost = _cost(figures, stage, typical, peaks, dtype)
        rows.append((stage.value, *_times(listening), *_times(speaking), *cost))
    counted = f"{len(units[LISTENING])} listening, {len(units[SPEAKING])} speaking units"
    show(
        f"{slots} conversations at once, ms ({counted})",
        ("stage", "listen p50", "p99", "speak p50", "p99", "MB", "of peak", "GFLOP", "of peak"),
        rows,
    )


def _times(seconds: Sequence[float]) -> tuple[str, str]:
    if not seconds:
        return "", ""
    return f"{percentile(seconds, 0.5) * 1e3:.1f}", f"{percentile(seconds, 0.99) * 1e3:.1f}"


def _cost(
    figures: Figures, stage: Stage, seconds: float, peaks: Peaks, dtype: torch.dtype
) -> tuple[str, str, str, str]:
    """Bytes and operations of one call, and the share of the device's best that they are."""
    moved, flops = figures.moved.get(stage, 0), figures.flops.get(stage, 0.0)
    kind = torch.float32 if stage in FLOAT32_STAGES else dtype
    return (
        *_share(moved / 1e6, moved / seconds / peaks.bytes_per_s),
        *_share(flops / 1e9, flops / seconds / peaks.flops_per_s[kind]),
    )


def _share(amount: float, share: float) -> tuple[str, str]:
    return (f"{amount:,.1f}", f"{share:.1%}") if amount else ("", "")
