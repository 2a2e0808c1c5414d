"""Flags that several verbs of the `duplane` command share, and how a verb gives up."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NoReturn

import typer


class Dtype(StrEnum):
    """What the model's numbers may be."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Level(StrEnum):
    """How much to log."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


Listen = Annotated[
    str,
    typer.Option(
        envvar="DUPLANE_LISTEN", metavar="HOST:PORT", help="Where to serve; port 0 picks one."
    ),
]
Schedulers = Annotated[
    str,
    typer.Option(
        "--scheduler",
        envvar="DUPLANE_SCHEDULER",
        metavar="HOST:PORT[,HOST:PORT]",
        help="The schedulers of the fabric.",
    ),
]
Slots = Annotated[
    int, typer.Option(envvar="DUPLANE_SLOTS", min=1, help="Conversations per worker at once.")
]
Device = Annotated[
    str, typer.Option(envvar="DUPLANE_DEVICE", metavar="cpu|cuda:N", help="Where the model runs.")
]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", envvar="DUPLANE_DTYPE", help="The model's numbers.")
]
CudaGraphs = Annotated[
    bool,
    typer.Option(
        envvar="DUPLANE_CUDA_GRAPHS", help="Capture short steps as CUDA graphs; only on cuda:N."
    ),
]
Context = Annotated[int, typer.Option(min=1, help="Rows of each conversation's context.")]
DeviceMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Say how many slots fit a device of this memory: 141GB."),
]
LogLevel = Annotated[
    Level, typer.Option("--log-level", envvar="DUPLANE_LOG_LEVEL", help="What to log.")
]


def fail(message: str) -> NoReturn:
    """End with a message for people and exit code 2, as for a wrong flag."""
    typer.echo(f"duplane: {message}", err=True)
    raise typer.Exit(2)
