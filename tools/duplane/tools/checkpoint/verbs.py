"""The verbs of `duplane checkpoint`: make and check checkpoint directories."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.types import ExistingDirectory

from duplane.fabric.process import StartError
from duplane.tools.checkpoint.options import MemoryOptions
from duplane.tools.command import UsageError, app
from duplane.worker.settings import Dtype

checkpoint = App(name="checkpoint", help="Make and check checkpoint directories.")
app.command(checkpoint)


@checkpoint.command
def random(
    directory: Path,
    /,
    *,
    like: str = "minicpm-o-4.5",
    scale: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
    dry: Annotated[bool, Parameter(negative=())] = False,
    options: MemoryOptions = MemoryOptions(),
) -> None:
    """Write a random checkpoint of any size in the public format, to measure with.

    Holds one shard in memory at a time. Full size takes 20 GB of disk and some minutes.

    Parameters
    ----------
    directory
        Directory to write to; it is created if it is missing.
    like
        Model whose dimensions to use.
    scale
        Factor of all widths and numbers of layers; 1 is full size.
    seed
        The same seed gives the same bytes on the same kind of device.
    device
        Device that draws the weights: cpu or cuda:N. A GPU draws them in seconds.
    dry
        Write nothing; print the parameters and the memory that the model would take.
    """
    from duplane.tools.checkpoint.inspection import describe
    from duplane.tools.checkpoint.random_weights import write_random
    from duplane.worker.models.torch_device import open_device

    try:
        if dry:
            describe(like, scale, options)
            return
        write_random(directory, like, factor=scale, seed=seed, device=open_device(device))
    except (ValueError, StartError) as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror}") from None
    sys.stdout.write(
        f"random checkpoint like {like} (scale {scale:g}, seed {seed}) in {directory}\n"
    )


@checkpoint.command
def inspect(directory: ExistingDirectory, /, *, options: MemoryOptions = MemoryOptions()) -> int:
    """Print the content of a checkpoint directory, its missing parts, and the model's memory.

    Reads no weights. Exit code 1 means that tensors are missing or have the wrong shape.

    Parameters
    ----------
    directory
        Checkpoint directory in the public format.
    """
    from duplane.tools.checkpoint.inspection import inspect_checkpoint
    from duplane.worker.models.minicpm_o.checkpoint import CheckpointError

    try:
        is_whole = inspect_checkpoint(directory, options)
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    return 0 if is_whole else 1


@checkpoint.command
def replay(
    directory: ExistingDirectory,
    /,
    *,
    device: str = "cpu",
    dtype: Dtype = "float32",
    cuda_graphs: bool = True,
) -> int:
    """Replay recorded traces of the reference implementation through the model and compare.

    Prints one row per check with the largest error, the tolerance and the verdict. Exit code 1
    means that a check failed. The printed tolerances are those of float32. In another dtype the
    model is forced to the recorded ids, and its values may have a relative error of 0.0125
    (float16: 0.002); the chats are not forced, print their errors and fail only if they cannot run.

    Parameters
    ----------
    directory
        Directory of recorded traces.
    device
        Device of the model: cpu or cuda:N.
    dtype
        Type of the model's numbers.
    cuda_graphs
        Capture decoders, audio encoder and vocoder as CUDA graphs. Has an effect on cuda:N only.
    """
    from duplane.tools.golden_replay.run import PARTS, replay_traces
    from duplane.tools.golden_replay.target import ReplayTarget
    from duplane.worker.models.torch_device import open_device

    try:
        open_device(device)
    except StartError as error:
        raise UsageError(str(error)) from None
    return replay_traces(directory, PARTS, ReplayTarget(device, dtype, cuda_graphs))
