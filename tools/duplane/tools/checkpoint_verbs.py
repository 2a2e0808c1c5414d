"""The verbs of `duplane checkpoint`: make and check checkpoint directories.

Imports that are slow or need an extra stay inside the verbs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duplane.tools.flags import Context, DeviceMemory, Dtype, DtypeOption, fail

if TYPE_CHECKING:
    from duplane.tools.checkpoints.inspection import MemoryQuestion

checkpoint = typer.Typer(no_args_is_help=True, help="Make and check checkpoint directories.")


@checkpoint.command("tiny")
def checkpoint_tiny(
    directory: Annotated[Path, typer.Argument(file_okay=False, help="Created if missing.")],
    seed: Annotated[int, typer.Option(envvar="DUPLANE_SEED", help="Same seed, same bytes.")] = 0,
) -> None:
    """Build a tiny random checkpoint in the public format, in seconds.

    It listens and speaks, and means nothing by it: its weights are random.
    """
    from duplane.tools.tiny import build_tiny

    try:
        build_tiny(directory, seed=seed)
    except OSError as error:
        fail(f"{directory}: {error.strerror}")
    typer.echo(f"tiny checkpoint (seed {seed}) in {directory}; its answers mean nothing")


@checkpoint.command("random")
def checkpoint_random(
    directory: Annotated[Path, typer.Argument(file_okay=False, help="Created if missing.")],
    like: Annotated[
        str, typer.Option(metavar="minicpm-o-4.5", help="The model whose dimensions to take.")
    ] = "minicpm-o-4.5",
    scale: Annotated[
        float, typer.Option(help="Widths and numbers of layers times this; 1 is full size.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(envvar="DUPLANE_SEED", help="Same seed, same bytes.")] = 0,
    dry: Annotated[bool, typer.Option("--dry", help="Write nothing, only describe.")] = False,
    context: Context = 8192,
    dtype: DtypeOption = Dtype.BFLOAT16,
    device_memory: DeviceMemory = None,
) -> None:
    """Write a random checkpoint of any size in the public format, to measure with.

    Needs memory for one shard. Full size takes 20 GB of disk and some minutes.
    """
    from duplane.tools.checkpoints.inspection import describe
    from duplane.tools.checkpoints.random_weights import write_random

    try:
        if dry:
            describe(like, scale, _memory_question(context, dtype, device_memory))
            return
        write_random(directory, like, factor=scale, seed=seed)
    except ValueError as error:
        fail(str(error))
    typer.echo(f"random checkpoint like {like} (scale {scale:g}, seed {seed}) in {directory}")


@checkpoint.command("inspect")
def checkpoint_inspect(
    directory: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="A checkpoint directory.")
    ],
    context: Context = 8192,
    dtype: DtypeOption = Dtype.BFLOAT16,
    device_memory: DeviceMemory = None,
) -> None:
    """Say what a checkpoint directory holds, what it lacks, and the memory it takes.

    Reads no weights. Exit code 1 means that tensors are missing or misshapen.
    """
    from duplane.tools.checkpoints.inspection import inspect
    from duplane.worker.model.checkpoint import CheckpointError

    question = _memory_question(context, dtype, device_memory)
    try:
        is_whole = inspect(directory, question)
    except CheckpointError as error:
        fail(str(error))
    raise typer.Exit(0 if is_whole else 1)


def _memory_question(context: int, dtype: Dtype, device_memory: str | None) -> MemoryQuestion:
    from duplane.tools.checkpoints.inspection import MemoryQuestion, byte_count
    from duplane.worker.model.parts import torch_dtype

    try:
        size = None if device_memory is None else byte_count(device_memory)
        return MemoryQuestion(context, torch_dtype(dtype), size)
    except ValueError as error:
        fail(str(error))


@checkpoint.command("replay")
def checkpoint_replay(
    directory: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="A directory of recorded traces.")
    ],
) -> None:
    """Replay recorded traces of the reference and compare.

    Prints a line per check with the largest error, the tolerance and ok or FAIL. Exit code 1
    means that something failed.
    """
    from duplane.tools.replay.run import replay

    raise typer.Exit(replay(directory))
