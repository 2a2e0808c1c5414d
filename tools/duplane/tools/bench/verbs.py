"""The verbs of `duplane bench`: measure the hot paths and print tables."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

import uvloop
from cyclopts import App

from duplane.fabric import process
from duplane.fabric.monitoring.logs import configure_logging
from duplane.tools.bench.options import (
    FabricBench,
    LaneBench,
    LaunchBench,
    LeaseBench,
    ModelBench,
    RebuildBench,
    ScheduleBench,
)
from duplane.tools.command import UsageError, app

bench = App(name="bench", help="Measure the hot paths and print tables.")
app.command(bench)


def _run(measuring: Coroutine[Any, Any, object]) -> int:
    """Run until the end, or until SIGTERM or Ctrl-C; return the exit code.

    A signal cancels the measurement, which then stops the processes that it has started.
    """

    async def run() -> None:
        task = asyncio.create_task(measuring)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await task

    try:
        # A loop of asyncio in Python 3.11 loses the exit code of a process that ends while it is
        # signalled, and warns of it.
        uvloop.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        return process.EXIT_INTERRUPTED
    return 0


@bench.command
def codec() -> None:
    """Measure the edge's cost of JSON and base64 for one unit, and of base64 alone.

    Also measure the cost of the messages between a worker and its engine process.
    """
    from duplane.tools.bench.codec import bench_codec

    bench_codec()


@bench.command
def fabric(options: FabricBench = FabricBench()) -> int:
    """Run sessions at real-time pace, and measure the time that the fabric adds to each unit.

    The time of a unit runs from the sending of its last sample to the arrival of its answer. The
    worker's own time is subtracted, except in dialect A, which does not report it. docs/load.md has
    more.
    """
    from duplane.tools.bench.load.run import bench_fabric
    from duplane.tools.bench.returns.run import bench_returns
    from duplane.tools.up.fabric import command_errors

    # Edges that end on purpose are errors of the one who starts them again.
    configure_logging("bench", "CRITICAL" if options.makes_returns else "WARNING")
    measure = bench_returns if options.makes_returns else bench_fabric
    try:
        with command_errors():
            return _run(measure(options))
    except process.StartError as error:
        raise UsageError(str(error)) from None


@bench.command
def leases(options: LeaseBench = LeaseBench()) -> int:
    """Measure grants of real schedulers over gRPC, and check that none is lost or made twice."""
    from duplane.tools.bench.leases.grants import bench_leases

    configure_logging("bench", "CRITICAL")
    return _run(bench_leases(options))


@bench.command
def model(options: ModelBench = ModelBench()) -> None:
    """Measure every stage of the model, by batch size, and compare it with the device's peak rates.

    The columns MB, GFLOP and waits are for one call of a stage: the bytes of weights and caches
    that the call reads, its floating point operations, and how often the host waits for the device.
    The row of the whole unit shows the waits of each kind of unit. The sound of the units is noise;
    a trained model may listen to it without an answer.
    """
    from duplane.tools.bench.model import bench_model
    from duplane.worker.models.minicpm_o.checkpoint import CheckpointError

    try:
        bench_model(options)
    except (CheckpointError, ValueError, process.StartError) as error:
        raise UsageError(str(error)) from None


@bench.command
def lanes(options: LaneBench = LaneBench()) -> int:
    """Measure how many units per second a model speaks, in one lane and in two, in turn.

    The engine's threads run the model. Each conversation sends its next unit when it is answered.
    """
    from duplane.tools.bench.lanes import bench_lanes
    from duplane.worker.models.interface import LoadError

    configure_logging("bench", "WARNING")
    try:
        return _run(bench_lanes(options))
    except (LoadError, ValueError) as error:
        raise UsageError(str(error)) from None


@bench.command
def launches(options: LaunchBench = LaunchBench()) -> None:
    """Count the kernels that each stage of the model launches, for some numbers of conversations.

    Runs on the CPU, and counts the operations that a GPU would run one by one.
    """
    from duplane.tools.bench.launches import bench_launches
    from duplane.worker.models.minicpm_o.checkpoint import CheckpointError

    try:
        bench_launches(options)
    except (CheckpointError, ValueError) as error:
        raise UsageError(str(error)) from None


@bench.command
def rebuild(options: RebuildBench = RebuildBench()) -> None:
    """Measure the time to rebuild a conversation from its past units, by stage."""
    from duplane.tools.bench.rebuild import bench_rebuild
    from duplane.worker.models.minicpm_o.checkpoint import CheckpointError

    try:
        bench_rebuild(options)
    except (CheckpointError, ValueError, process.StartError) as error:
        raise UsageError(str(error)) from None


@bench.command
def schedule(options: ScheduleBench = ScheduleBench()) -> int:
    """Simulate the engine's schedule on a GPU that is only described; no GPU and no model run.

    The code that chooses the launches of a worker runs in virtual time, with the times of launches
    of `--costs`. Prints the latencies of units, and exits with 1 if an ordinary unit takes longer
    than a second.
    """
    from duplane.tools.bench.schedule.costs import CostsError
    from duplane.tools.bench.schedule.run import bench_schedule

    try:
        return bench_schedule(options)
    except CostsError as error:
        raise UsageError(str(error)) from None
