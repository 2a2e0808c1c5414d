"""`duplane bench rebuild`: the time to rebuild a conversation from its past units."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from duplane.tools.bench.model import PROMPT_ROWS, UNIT_ROWS, model_directory, run_units
from duplane.tools.bench.options import RebuildBench
from duplane.tools.bench.peaks import synchronize
from duplane.tools.bench.rebuild_window import bench_rebuild_window
from duplane.tools.bench.report import show
from duplane.worker.models.minicpm_o.dtype import choose_dtype
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.torch_device import open_device
from duplane.worker.models.types import ConversationOptions, PastUnit, Rebuilt, Unit

TURN_UNITS = 10
"""Number of units in each stretch of listening, and in each stretch of speaking. The command sets
these lengths, because random weights rarely end a turn."""
STAGES = ("audio", "prefill", "talker", "vocoder")


@dataclass(frozen=True)
class _Figures:
    """The times of one rebuild: of the whole rebuild, of its longest share, and of each stage.

    A rebuild runs as several shares, one after the other; `share_count` is their number.
    """

    total_s: float
    longest_s: float
    share_count: int
    stage_s: dict[str, float]


def bench_rebuild(bench: RebuildBench) -> None:
    """Run a conversation, rebuild it after each number of units, and print a table.

    Raises `CheckpointError`, ValueError, and `StartError` for a device that cannot be used.
    """
    if bench.window != "off":
        bench_rebuild_window(bench)
        return
    torch.set_num_threads(bench.threads)
    device, most = open_device(bench.device), max(bench.units)
    with model_directory(bench) as directory:
        model = DuplexModel.load(
            directory,
            slot_count=2,
            context_capacity=PROMPT_ROWS + most * UNIT_ROWS,
            device=bench.device,
            dtype=choose_dtype(bench.dtype, directory, device),
        )
    options = ConversationOptions(seed=0, force_listen_count=0)
    past, lived_s = _live(model, options, most, device)
    _rebuild(model, options, past[:TURN_UNITS], device)  # warms up
    rows: list[tuple[str, ...]] = []
    for count in bench.units:
        found = _rebuild(model, options, past[:count], device)
        rows.append(
            (
                str(count),
                f"{past[count - 1].context_length:,}",
                *(f"{seconds * 1e3:,.0f}" for seconds in (lived_s[count - 1], found.total_s)),
                f"{found.total_s / count * 1e3:.2f}",
                *(f"{found.stage_s.get(stage, 0.0) * 1e3:,.0f}" for stage in STAGES),
                str(found.share_count),
                f"{found.longest_s * 1e3:.1f}",
            )
        )
    show(
        f"rebuild of a conversation of {model.name}, ms",
        ("units", "rows", "lived", "rebuilt", "per unit", *STAGES, "shares", "longest"),
        rows,
    )


def _live(
    model: DuplexModel, options: ConversationOptions, count: int, device: torch.device
) -> tuple[list[PastUnit], list[float]]:
    """Run `count` units in slot 0; return them, and the seconds until the end of each."""
    random = np.random.default_rng(0)
    model.open(0, options)
    past: list[PastUnit] = []
    spent_s: list[float] = []
    total_s = 0.0
    for number in range(count):
        sound = random.normal(0, 0.1, 16_000).astype(np.float32)
        must_listen = number % TURN_UNITS < TURN_UNITS // 2
        begin_s = time.perf_counter()
        unit = Unit(0, sound, must_listen, sequence=number)
        (output,) = run_units(model, [unit])
        synchronize(device)
        total_s += time.perf_counter() - begin_s
        spent_s.append(total_s)
        unit = replace(unit, slot=1)
        past.append(PastUnit(unit, output.token_ids, output.state, output.context_length))
    return past, spent_s


def _rebuild(
    model: DuplexModel,
    options: ConversationOptions,
    past: Sequence[PastUnit],
    device: torch.device,
) -> _Figures:
    """Rebuild a conversation in slot 1 from all of `past`; return the times."""
    model.close(1)
    model.open(1, options)
    synchronize(device)
    stage_s = defaultdict[str, float](float)
    shares_s: list[float] = []
    is_complete = False
    while not is_complete:
        begin_s = time.perf_counter()
        result = model.rebuild(1, past)
        synchronize(device)
        shares_s.append(time.perf_counter() - begin_s)
        if not isinstance(result, Rebuilt):
            raise RuntimeError(f"the rebuild failed: {result.message}")
        for stage, seconds in result.stage_s.items():
            stage_s[stage] += seconds
        past, is_complete = past[result.unit_count :], result.is_complete
    return _Figures(sum(shares_s), max(shares_s), len(shares_s), stage_s)
