"""The verbs of operators: status and drain."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import orjson
from cyclopts import Parameter

from duplane.fabric.addresses import parse_address
from duplane.fabric.settings import Names, PositiveFloat, PositiveInt
from duplane.tools.command import UsageError, app

Schedulers = Annotated[Names, Parameter("--scheduler")]
_DEFAULT_SCHEDULERS = ("127.0.0.1:8010",)
_CLEAR = "\x1b[H\x1b[2J"  # clears the terminal before each new table


@app.command
def status(
    *,
    schedulers: Schedulers = _DEFAULT_SCHEDULERS,
    as_json: Annotated[bool, Parameter("--json", negative=())] = False,
    watch: Annotated[bool, Parameter(negative=())] = False,
    interval_s: PositiveFloat = 1.0,
    rows: PositiveInt = 20,
) -> None:
    """Show schedulers, workers with their slots, leases and the queue.

    Parameters
    ----------
    schedulers
        Addresses of the schedulers, as HOST:PORT, separated by commas.
    as_json
        Print the whole state as one JSON object in a line.
    watch
        Show the state again at an interval, until Ctrl-C.
    interval_s
        Seconds between two tables with --watch.
    rows
        Maximum number of rows of each table. The JSON has all rows.
    """
    _check(schedulers)
    try:
        asyncio.run(_show(schedulers, as_json, interval_s if watch else None, rows))
    except KeyboardInterrupt:
        sys.stdout.write("\n")


@app.command
def drain(worker_id: str, /, *, schedulers: Schedulers = _DEFAULT_SCHEDULERS) -> None:
    """Ask a worker to accept no more sessions. Running ones continue.

    Parameters
    ----------
    worker_id
        Name of the worker, as `duplane status` shows it.
    schedulers
        Addresses of the schedulers, as HOST:PORT, separated by commas.
    """
    from duplane.tools.operators.snapshots import drain_worker

    _check(schedulers)
    asyncio.run(drain_worker(schedulers, worker_id))
    sys.stdout.write(f"worker {worker_id} accepts no more sessions\n")


def _check(schedulers: Names) -> None:
    try:
        if not schedulers:
            raise ValueError("scheduler: at least one address is needed")
        for address in schedulers:
            parse_address(address, "scheduler")
    except ValueError as error:
        raise UsageError(str(error)) from None


async def _show(schedulers: Names, as_json: bool, interval_s: float | None, rows: int) -> None:
    from duplane.tools.operators.snapshots import read_fabric
    from duplane.tools.operators.tables import fabric_json, fabric_tables

    while True:
        views = await read_fabric(schedulers)
        if as_json:
            sys.stdout.write(orjson.dumps(fabric_json(views)).decode() + "\n")
        else:
            is_redrawn = interval_s is not None and sys.stdout.isatty()
            sys.stdout.write((_CLEAR if is_redrawn else "") + fabric_tables(views, rows))
        sys.stdout.flush()
        if interval_s is None:
            return
        await asyncio.sleep(interval_s)
