"""The verbs of `duplane bench`: measure the hot paths and print tables.

Imports that are slow or need an extra stay inside the verbs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from duplane.fabric import process
from duplane.tools.flags import Slots

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
