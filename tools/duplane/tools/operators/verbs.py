"""The verbs of operators: status and drain."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import orjson
from cyclopts import Parameter

from duplane.fabric.addresses import parse_address
from duplane.fabric.settings import Names, PositiveFloat, PositiveInt
from duplane.fabric.tls.settings import FabricTlsSettings
from duplane.tools.command import CommandError, UsageError, app

if TYPE_CHECKING:
    from duplane.fabric.tls.credentials import FabricCredentials

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
    fabric: FabricTlsSettings = FabricTlsSettings(),
) -> None:
    """Show schedulers, workers with their slots, leases and the queue.

    State of a worker: `ready` gets sessions; `draining` gets no more; `silent` has not reported for
    three intervals; `unreachable` answers no edge; `lost` is no longer attached although nobody has
    stopped it, and stays listed for ten minutes.

    Its slots: `free` can be granted now; `granted` are not yet claimed; `occupied` have a session;
    `cleaning` are being freed after one; `broken` could not be freed; `unavailable` are the free
    slots of a worker that is not `ready`.

    A lease is `granted` until its session has begun at the worker, then `claimed`, or `cannot move`
    if its session would end with its worker. `held s` and `waited s` are the seconds so far;
    `left s` is the estimate of the seconds to come, `-` if no worker serves the session.

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
    _check(schedulers, fabric)
    try:
        shown = _show(schedulers, as_json, interval_s if watch else None, rows, fabric)
        asyncio.run(shown)
    except KeyboardInterrupt:
        sys.stdout.write("\n")


@app.command
def drain(
    worker_id: str,
    /,
    *,
    schedulers: Schedulers = _DEFAULT_SCHEDULERS,
    wait: Annotated[bool, Parameter(negative=())] = False,
    stop: Annotated[bool, Parameter(negative=())] = False,
    undo: Annotated[bool, Parameter(negative=())] = False,
    fabric: FabricTlsSettings = FabricTlsSettings(),
) -> int:
    """Ask a worker to accept no more sessions.

    Its duplex sessions move to other workers with the same model as soon as these have free slots.
    Until then they continue, as its chats do.

    Exit code: 0 if done, with --wait if the worker has no session; 1 if not; 130 after Ctrl-C,
    which ends the wait but does not take the drain back.

    Parameters
    ----------
    worker_id
        Name of the worker, as `duplane status` shows it.
    schedulers
        Addresses of the schedulers, as HOST:PORT, separated by commas.
    wait
        Wait until the worker has no session; with --stop, until it has ended.
    stop
        Also end the worker's process, as SIGTERM does: as soon as it has no session, at the latest
        after its --drain-timeout-s. This cannot be taken back.
    undo
        Take a drain back: the worker accepts sessions again. Sessions that have moved stay where
        they are.
    """
    from duplane.fabric.process import EXIT_INTERRUPTED
    from duplane.tools.operators import draining

    _check(schedulers, fabric)
    if undo and (wait or stop):
        raise UsageError("--undo goes with neither --wait nor --stop")
    credentials = _credentials(fabric)
    if undo:
        work = draining.undrain(schedulers, worker_id, show=_show_line, credentials=credentials)
    else:
        work = draining.drain(
            schedulers,
            worker_id,
            is_stop=stop,
            is_waiting=wait,
            show=_show_line,
            credentials=credentials,
        )
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return EXIT_INTERRUPTED
    return 0


def _show_line(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _check(schedulers: Names, fabric: FabricTlsSettings) -> None:
    """Check where the command calls to. Raises CommandError."""
    from duplane.fabric.exposure import check_fabric_exposure
    from duplane.fabric.process import StartError

    try:
        if not schedulers:
            raise ValueError("scheduler: at least one address is needed")
        for address in schedulers:
            parse_address(address, "scheduler")
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        asyncio.run(check_fabric_exposure(None, schedulers, fabric))
    except StartError as error:
        raise CommandError(str(error)) from None


def _credentials(fabric: FabricTlsSettings) -> FabricCredentials | None:
    """Return the operator's credentials; None without TLS. Raises UsageError."""
    from duplane.fabric.process import StartError
    from duplane.fabric.tls.credentials import open_credentials
    from duplane.fabric.tls.identity import Role

    try:
        return open_credentials(fabric, Role.OPERATOR)
    except StartError as error:
        raise UsageError(str(error)) from None


async def _show(
    schedulers: Names,
    as_json: bool,
    interval_s: float | None,
    rows: int,
    fabric: FabricTlsSettings,
) -> None:
    from duplane.tools.operators.snapshots import read_fabric
    from duplane.tools.operators.tables import fabric_json, fabric_tables

    credentials = _credentials(fabric)
    while True:
        views = await read_fabric(schedulers, credentials)
        if as_json:
            sys.stdout.write(orjson.dumps(fabric_json(views)).decode() + "\n")
        else:
            is_redrawn = interval_s is not None and sys.stdout.isatty()
            sys.stdout.write((_CLEAR if is_redrawn else "") + fabric_tables(views, rows))
        sys.stdout.flush()
        if interval_s is None:
            return
        await asyncio.sleep(interval_s)
