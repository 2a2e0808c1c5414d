"""`duplane trace`: shows where the time of each unit goes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Annotated

from annotated_types import Ge
from cyclopts import Parameter
from cyclopts.types import ExistingFile

from duplane.fabric import process
from duplane.fabric.addresses import parse_address
from duplane.fabric.exposure import check_metrics_exposure
from duplane.fabric.monitoring.logs import configure_logging
from duplane.fabric.settings import PositiveFloat, PositiveInt
from duplane.fabric.tls.settings import FabricTlsSettings
from duplane.tools.command import UsageError, app

_CLEAR = "\x1b[H\x1b[2J"  # clears the terminal before each new report
DEFAULT_LISTEN = "127.0.0.1:4317"


@app.command
def trace(  # noqa: PLR0913 - each parameter is a flag
    file: ExistingFile | None = None,
    /,
    *,
    listen: str = DEFAULT_LISTEN,
    metrics_public: bool = False,
    out: Path | None = None,
    session: str = "",
    unit: Annotated[int | None, Parameter("--unit"), Ge(0)] = None,
    slowest: PositiveInt = 10,
    keep: PositiveInt = 10_000,
    interval_s: PositiveFloat = 1.0,
    fabric: FabricTlsSettings = FabricTlsSettings(),
) -> int:
    """Show where the time of each unit goes, from the socket to the device and back.

    Receives the spans of all processes whose OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is this address,
    until Ctrl-C; or reads a file that `--out` wrote. Shows the time of each stage, the slowest
    units with the stage that made them late, and the stages of the slowest unit. A terminal shows
    the report again at an interval; otherwise it is shown once, at the end.

    With --fabric-tls, processes send spans over TLS with their own certificates: to
    `https://operator.duplane.internal:PORT`, a name that must lead to this machine, with
    OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE, _CLIENT_CERTIFICATE and _CLIENT_KEY as the files of their
    --fabric-tls.

    Parameters
    ----------
    file
        File of spans to read, in the file format of OTLP: one export as JSON per line.
    listen
        Address at which to receive spans over gRPC.
    metrics_public
        Allow an address at which other machines can send spans without TLS.
    out
        Append the received spans to this file, up to a gigabyte.
    session
        Show only this session, and its steps from the queue to its end.
    unit
        Show the stages of the units with this number.
    slowest
        Number of units to list.
    keep
        Number of units to keep in memory. Older units are dropped.
    interval_s
        Seconds between two reports in a terminal.
    """
    from duplane.fabric.tls.credentials import open_credentials
    from duplane.fabric.tls.identity import Role, server_name
    from duplane.tools.trace.receiver import receiving
    from duplane.tools.trace.spans_json import read_lines
    from duplane.tools.trace.units import Collected
    from duplane.tools.trace.views import Choice, report

    collected = Collected(keep)
    choice = Choice(session, unit, slowest)
    if file is not None:
        for request in read_lines(file):
            collected.add(request)
        sys.stdout.write(report(collected, choice))
        return 0

    try:
        parse_address(listen, "listen", min_port=0)
    except ValueError as error:
        raise UsageError(str(error)) from None

    def show(before: str) -> None:
        sys.stdout.write(before + report(collected, choice))
        sys.stdout.flush()

    async def receive(shutdown: process.Shutdown) -> None:
        is_allowed = metrics_public or fabric.fabric_tls is not None
        await check_metrics_exposure(listen, is_public_allowed=is_allowed)
        credentials = open_credentials(fabric, Role.OPERATOR)
        async with receiving(listen, collected, out, credentials) as address:
            url = f"https://{server_name(Role.OPERATOR)}:{address.port}"
            url = url if credentials else f"http://{address}"
            sys.stdout.write(f"receiving spans: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT={url}\n")
            sys.stdout.flush()
            shown_count = 0
            while not shutdown.is_draining:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await shutdown.wait()
                if sys.stdout.isatty() and collected.span_count != shown_count:
                    shown_count = collected.span_count
                    show(_CLEAR)
        show("\n")

    configure_logging("trace", "WARNING")
    return process.run(receive)
