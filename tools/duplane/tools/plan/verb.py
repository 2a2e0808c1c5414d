"""The verb `duplane plan`."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
from cyclopts import Parameter
from cyclopts.validators import Number

from duplane.fabric.settings import PositiveFloat, PositiveInt
from duplane.tools.command import EXIT_FAILED, UsageError, app

if TYPE_CHECKING:
    from duplane.tools.plan.device_file import DeviceFigures
    from duplane.tools.plan.sizing import Size

_UNMEASURED = ("h100", "h200")


@app.command
def plan(
    *,
    sessions: PositiveInt,
    speaking: Annotated[float, Parameter(validator=Number(gte=0, lte=1))],
    device: str,
    session_minutes: PositiveFloat = 10.0,
    as_json: Annotated[bool, Parameter("--json", negative=())] = False,
) -> int:
    """Size a fabric: GPUs, slots, edges, schedulers and etcd, and where each number comes from.

    Exit code: 0 if everything is sized; 1 if the GPUs are not, because nothing was measured there.

    Parameters
    ----------
    sessions
        Largest number of sessions at the same time.
    speaking
        Share of these sessions in which the model speaks at a time, from 0 to 1.
    device
        Type of the GPUs: h100, h200, or a TOML file with what was measured on yours. No figures of
        h100 and h200 exist yet.
    session_minutes
        Mean duration of a session in minutes.
    as_json
        Print the plan as one JSON object in a line.
    """
    from duplane.tools.plan.sizing import Load, device_sizes, fabric_sizes

    load = Load(sessions, speaking, session_minutes)
    refusal = _refusal(device)
    try:
        sizes = [] if refusal else list(device_sizes(load, _read(device)))
        sizes += fabric_sizes(load)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    if as_json:
        told = {"sizes": [asdict(size) for size in sizes], "refused": refusal}
        sys.stdout.write(orjson.dumps(told).decode() + "\n")
    else:
        _show(load.sessions, sizes)
    if refusal:
        sys.stdout.flush()
        sys.stderr.write(f"duplane: {refusal}\n")
    return EXIT_FAILED if refusal else 0


def _refusal(device: str) -> str:
    """Return why the GPUs cannot be sized; empty if they can."""
    if device not in _UNMEASURED:
        return ""
    return (
        f"--device {device}: the GPUs are not sized, because nothing was measured on {device} yet;"
        " measure the slots of yours and name them in a file (docs/planning.md)"
    )


def _read(device: str) -> DeviceFigures:
    from duplane.tools.plan.device_file import read_device

    try:
        return read_device(Path(device))
    except OSError as error:
        names = ", ".join(_UNMEASURED)
        raise UsageError(
            f"--device {device}: must be one of {names}, or a file: {error.strerror}"
        ) from None
    except (ValueError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--device {device}: {error}") from None


def _show(sessions: int, sizes: Sequence[Size]) -> None:
    width = max(len(size.what) for size in sizes)
    sys.stdout.write(f"{sessions} sessions at the same time\n\n")
    for size in sizes:
        number = f"{size.value:g} {size.unit}".strip()
        sys.stdout.write(f"{size.what.ljust(width)}  {number.rjust(12)}  {size.source}\n")
