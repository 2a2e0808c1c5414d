"""`duplane bench model`: the time of every stage of the model, by batch size."""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from duplane.tools.bench.host_waits import SyncCount
from duplane.tools.bench.options import ModelBench, Weights
from duplane.tools.bench.peaks import Peaks, measure_peaks, synchronize
from duplane.tools.bench.report import percentile, show
from duplane.tools.bench.stages import Stage, StageWatch, moved_bytes
from duplane.tools.checkpoint.random_weights import write_random
from duplane.worker.models.minicpm_o.dtype import choose_dtype, torch_dtype
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.torch_device import open_device
from duplane.worker.models.types import ConversationOptions, Unit, UnitOutput

WARM_UNITS = 2
UNIT_ROWS, FRAME_ROWS = 32, 80
"""Upper bounds of the context rows of one unit and of one frame."""
FRAME_SIDE = 448
PROMPT_ROWS = 512
TEXT_TOKENS = 6
"""The most text tokens of a speaking unit: about one second of speech. Random weights rarely end
a unit earlier."""
LISTENING, SPEAKING, SEEING = "listening", "speaking", "seeing"
KINDS = (SEEING, SPEAKING, LISTENING)
HEADS = {LISTENING: "listen", SEEING: "see", SPEAKING: "speak"}
FLOAT32_STAGES = (Stage.MEL, Stage.FLOW, Stage.HIFT)


@dataclass
class Figures:
    """Measurements of one batch size: seconds, operations, bytes moved, and waits of the host."""

    units: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stages: defaultdict[tuple[str, Stage], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    flops: dict[Stage, float] = field(default_factory=dict[Stage, float])
    syncs: dict[Stage, float] = field(default_factory=dict[Stage, float])
    unit_syncs: dict[str, int] = field(default_factory=dict[str, int])
    moved: dict[Stage, int] = field(default_factory=dict[Stage, int])


def bench_model(bench: ModelBench) -> None:
    """Load a model, measure its stages and print the tables.

    Raises `CheckpointError`, ValueError, and `StartError` for a device that cannot be used.
    """
    torch.set_num_threads(bench.threads)
    device = open_device(bench.device)
    with model_directory(bench) as directory:
        dtype_name = choose_dtype(bench.dtype, directory, device)
        dtype = torch_dtype(dtype_name)
        peaks = measure_peaks(device, {dtype, torch.float32})
        empty, rows = held_bytes(device), UNIT_ROWS + bench.frames * FRAME_ROWS
        model = DuplexModel.load(
            directory,
            slot_count=max(bench.slots),
            context_capacity=max((PROMPT_ROWS, *bench.contexts))
            + len(KINDS) * (WARM_UNITS + bench.units + 1) * rows,
            device=bench.device,
            dtype=dtype_name,
            cuda_graphs=bench.cuda_graphs,
        )
    before = held_bytes(device)
    _say(bench, model, peaks, dtype)
    watch = StageWatch(model, device)
    during = 0
    for slots, context in product(bench.slots, bench.contexts or (None,)):
        figures = _measure(model, watch, slots, context, bench, device)
        during = max(during, held_bytes(device))
        for slot in range(slots):
            model.close(slot)
        title = f"{slots} conversations at once"
        _show(figures, title if context is None else f"{title}, context {context}", peaks, dtype)
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
    """Return the memory of the tensors on the device; for a CPU, the memory of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    resident = Path("/proc/self/statm").read_text().split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def model_directory(bench: Weights) -> Generator[Path, None, None]:
    """Yield the checkpoint to measure; random weights are removed at the end."""
    if bench.checkpoint is not None:
        yield bench.checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="duplane-bench-") as name:
        write_random(Path(name), bench.like, factor=bench.scale)
        yield Path(name)


def _say(bench: ModelBench, model: DuplexModel, peaks: Peaks, dtype: torch.dtype) -> None:
    what = bench.checkpoint or f"random, like {bench.like} at scale {bench.scale:g}"
    name = str(dtype).removeprefix("torch.")
    print(f"{model.name} ({what}), {model.parameter_count / 1e6:,.1f} M parameters, {name}")
    print(
        f"{bench.device}: {peaks.bytes_per_s / 1e9:,.1f} GB/s copied,"
        f" {peaks.flops_per_s[dtype] / 1e12:,.2f} TFLOP/s in {name},"
        f" {peaks.flops_per_s[torch.float32] / 1e12:,.2f} in float32 (mel and vocoder)\n"
    )


def _measure(
    model: DuplexModel,
    watch: StageWatch,
    slots: int,
    context: int | None,
    bench: ModelBench,
    device: torch.device,
) -> Figures:
    """Run conversations in the first `slots` slots, with equally many units of each of `KINDS`.

    Each context has `context` rows before the first unit: the prompt, then rows of zeros.
    """
    figures = Figures()
    for slot in range(slots):
        options = ConversationOptions(
            seed=slot,
            force_listen_count=0,
            max_new_speak_tokens_per_chunk=TEXT_TOKENS + 1,
        )
        model.open(slot, options)
        cache = model.llm.cache
        if context is not None:
            cache.grow([(slot, max(0, context - cache.length(slot)))])
    inputs = Inputs(model, range(slots), bench.frames)
    # The costs of one call of a stage are measured with the last kind of unit that calls this
    # stage.
    for kind in KINDS if bench.frames and model.parts.vision else KINDS[1:]:
        for number in range(WARM_UNITS + bench.units):
            found = _unit(model, watch, inputs.next(kind), device)
            if number >= WARM_UNITS:
                _keep(figures, watch, kind, found)
        if kind == SPEAKING:
            figures.moved = moved_bytes(model, slots)
        _count(figures, model, watch, inputs.next(kind), kind)
    return figures


class Inputs:
    """Units of noise, and pictures of noise, for some slots."""

    def __init__(self, model: DuplexModel, slots: Sequence[int], frames: int) -> None:
        self._model, self._slots, self._frames = model, slots, frames
        self._random = np.random.default_rng(0)
        pixels = self._random.integers(0, 256, (FRAME_SIDE, FRAME_SIDE, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG")
        self._frame = file.getvalue()

    def next(self, kind: str) -> list[Unit]:
        """Return a unit for each slot. The host decodes the frames, as in the worker."""
        sounds = self._random.normal(0, 0.1, (len(self._slots), 16_000)).astype(np.float32)
        frames = (self._frame,) * self._frames if kind == SEEING else ()
        units = [
            self._model.preparer.unit(Unit(slot, sound, kind != SPEAKING, frames))
            for slot, sound in zip(self._slots, sounds, strict=True)
        ]
        return [unit for unit in units if isinstance(unit, Unit)]


def run_units(model: DuplexModel, units: Sequence[Unit]) -> list[UnitOutput]:
    """Run and settle these units together."""
    outputs = list(model.step(units))
    failures = model.settle([unit.slot for unit in units])
    found = [output for output in outputs if isinstance(output, UnitOutput)]
    if failures or len(found) < len(outputs):
        raise RuntimeError(f"units failed: {outputs}, {failures}")
    return found


def _unit(
    model: DuplexModel, watch: StageWatch, units: Sequence[Unit], device: torch.device
) -> tuple[float, list[UnitOutput]]:
    """Run one unit in each slot; return the seconds and the outputs."""
    watch.clear()
    synchronize(device)
    begin = time.perf_counter()
    outputs = run_units(model, units)
    synchronize(device)
    return time.perf_counter() - begin, outputs


def _keep(
    figures: Figures, watch: StageWatch, kind: str, found: tuple[float, list[UnitOutput]]
) -> None:
    """Keep the figures of a batch, unless one of its units did not listen or speak as intended."""
    seconds, outputs = found
    if any(output.is_listen == (kind == SPEAKING) for output in outputs):
        return
    figures.units[kind].append(seconds)
    for stage, spent in watch.seconds.items():
        figures.stages[kind, stage].append(spent)
    if steps := watch.calls[Stage.DECODE]:
        # The time measured by the pipeline includes sampling, not only the passes of the LLM.
        lap = max(output.stage_s["decode"] for output in outputs)
        figures.stages[kind, Stage.DECODE][-1] = lap / steps


def _count(
    figures: Figures,
    model: DuplexModel,
    watch: StageWatch,
    units: Sequence[Unit],
    kind: str,
) -> None:
    """Run a batch; count operations and waits per call of each stage, and waits per unit."""
    watch.clear()
    watch.is_counting = True
    with SyncCount() as syncs:
        run_units(model, units)
    watch.is_counting = False
    figures.unit_syncs[kind] = syncs.count
    for found, counted in ((figures.flops, watch.flops), (figures.syncs, watch.syncs)):
        per_call = {stage: count / max(1, watch.calls[stage]) for stage, count in counted.items()}
        found.update(per_call)
        counted.clear()


def _show(figures: Figures, title: str, peaks: Peaks, dtype: torch.dtype) -> None:
    kinds = [kind for kind in (LISTENING, SEEING, SPEAKING) if kind in figures.unit_syncs]
    waits = "/".join(str(figures.unit_syncs[kind]) for kind in kinds)
    times = [cell for kind in kinds for cell in _times(figures.units[kind])]
    rows = [("whole unit", *times, *("",) * 4, waits)]
    for stage in Stage:
        spent = {kind: figures.stages[kind, stage] for kind in kinds}
        if not any(spent.values()):
            continue
        times = [cell for kind in kinds for cell in _times(spent[kind])]
        typical = percentile(next(spent[kind] for kind in reversed(kinds) if spent[kind]), 0.5)
        cost = _cost(figures, stage, typical, peaks, dtype)
        rows.append((stage.value, *times, *cost, f"{figures.syncs.get(stage, 0):.3g}"))
    counted = ", ".join(f"{len(figures.units[kind])} {kind}" for kind in kinds)
    heads = [cell for kind in kinds for cell in (f"{HEADS[kind]} p50", "p99")]
    show(
        f"{title}, ms ({counted} units)",
        ("stage", *heads, "MB", "of peak", "GFLOP", "of peak", "waits"),
        rows,
    )


def _times(seconds: Sequence[float]) -> tuple[str, str]:
    if not seconds:
        return "", ""
    return f"{percentile(seconds, 0.5) * 1e3:.1f}", f"{percentile(seconds, 0.99) * 1e3:.1f}"


def _cost(
    figures: Figures, stage: Stage, seconds: float, peaks: Peaks, dtype: torch.dtype
) -> tuple[str, str, str, str]:
    """Return the bytes and operations of one call, and their shares of the device's peak rates."""
    moved, flops = figures.moved.get(stage, 0), figures.flops.get(stage, 0.0)
    kind = torch.float32 if stage in FLOAT32_STAGES else dtype
    return (
        *_share(moved / 1e6, moved / seconds / peaks.bytes_per_s),
        *_share(flops / 1e9, flops / seconds / peaks.flops_per_s[kind]),
    )


def _share(amount: float, share: float) -> tuple[str, str]:
    return (f"{amount:,.1f}", f"{share:.1%}") if amount else ("", "")
