"""The verbs of `duplane bench`: measure the hot paths and print tables.

Imports that are slow or need an extra stay inside the verbs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from duplane.fabric import process
from duplane.tools.flags import CudaGraphs, Device, Dtype, DtypeOption, Slots, fail

bench = typer.Typer(no_args_is_help=True, help="Measure the hot paths and print tables.")


@bench.command("codec")
def bench_codec() -> None:
    """Measure what one unit costs the edge in JSON and base64, beside the floor."""
    from duplane.tools.bench import codec

    codec.bench_codec()


@bench.command("fabric")
def bench_fabric(
    slots: Slots = 4,
    units: Annotated[int, typer.Option(min=1, help="Units per session.")] = 50,
) -> None:
    """Measure what the fabric adds to the model, through real processes and the tiny model."""
    import asyncio

    from duplane.tools.bench import fabric
    from duplane.tools.up import UpSettings

    process.configure_logging("bench", "WARNING")
    settings = UpSettings(port=0, slot_count=slots, log_level="WARNING")
    asyncio.run(fabric.bench_fabric(settings, units))


@bench.command("neighbours")
def bench_neighbours(
    kinds: Annotated[
        str, typer.Option("--only", metavar="KIND[,KIND]", help="These kinds. Default: all.")
    ] = "",
    slots: Annotated[int, typer.Option(min=3, help="Slots; two are for good sessions.")] = 6,
    connections: Annotated[
        int, typer.Option(min=1, help="Bad clients, of kinds that take no slots.")
    ] = 300,
    wait_s: Annotated[float, typer.Option(min=0.1, help="Every wait of the edge.")] = 3.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of each measurement.")] = 8.0,
) -> None:
    """Measure what clients that misbehave cost the edge, and the good sessions beside them.

    Linux only. Through real processes and the tiny model.
    """
    import asyncio

    from duplane.tools.bench import neighbours
    from duplane.tools.bench.bad_clients import KINDS
    from duplane.tools.up import UpSettings

    names = [name.strip() for name in kinds.split(",")] if kinds else list(KINDS)
    if unknown := set(names) - set(KINDS):
        fail(f"only: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    process.configure_logging("bench", "WARNING")
    settings = UpSettings(port=0, slot_count=slots, log_level="WARNING")
    asyncio.run(neighbours.bench_neighbours(settings, names, wait_s, seconds, connections))


@bench.command("model")
def bench_model(
    checkpoint_directory: Annotated[
        Path | None,
        typer.Option("--checkpoint", exists=True, file_okay=False, help="A checkpoint directory."),
    ] = None,
    like: Annotated[
        str, typer.Option(help="Without one: random weights in the dimensions of this model.")
    ] = "minicpm-o-4.5",
    scale: Annotated[
        float, typer.Option(help="Its widths and numbers of layers times this; 1 is full size.")
    ] = 0.1,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.FLOAT32,
    slots: Annotated[
        str, typer.Option(metavar="N[,N]", help="Conversations at once, one table for each.")
    ] = "1,2,4",
    units: Annotated[int, typer.Option(min=1, help="Units measured of each kind.")] = 10,
    frames: Annotated[
        int, typer.Option(min=0, max=8, help="Pictures in each unit that sees; 0 measures none.")
    ] = 1,
    cuda_graphs: CudaGraphs = True,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Measure every stage of the model, by batch size, beside what the device can do at best.

    MB and GFLOP are of one call: the weights and caches it must read, the products it adds.
    Waits are where the host waits for the device, per call; of a whole unit for every kind.
    """
    from duplane.tools.bench import model
    from duplane.worker.model.checkpoint import CheckpointError

    try:
        model.bench_model(
            model.ModelBench(
                checkpoint=checkpoint_directory,
                like=like,
                scale=scale,
                device=device,
                dtype=dtype.value,
                slots=_slot_counts(slots),
                units=units,
                frames=frames,
                cuda_graphs=cuda_graphs,
                threads=threads,
            )
        )
    except (CheckpointError, ValueError, process.StartError) as error:
        fail(str(error))


def _slot_counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(",") if part.strip().isdecimal())
    if not counts or min(counts) < 1 or len(counts) != text.count(",") + 1:
        fail(f"slots: {text!r} is not numbers like 1,2,4")
    return counts
