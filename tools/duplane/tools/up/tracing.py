"""Runs `duplane trace` beside a fabric, for `duplane up --trace`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from duplane.fabric import process
from duplane.tools.up.environment import environment_of

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
_ALIVE = f"{process.ALIVE}\n".encode()  # the receiver writes it each second, as each process does
_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@contextlib.asynccontextmanager
async def traced(
    is_traced: bool, out: Path | None, show: Callable[[str], None]
) -> AsyncGenerator[None]:
    """Receive the spans of the processes that start in the body of the `with`.

    At the end, `show` where the time of each unit went, also if the body is cancelled. The receiver
    is a separate process, because it uses gRPC: a process that uses gRPC should not start others,
    and this process has to start them. Raises StartError.
    """
    if not is_traced:
        yield
        return
    into = ("--out", str(out)) if out else ()
    receiver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "duplane.tools", "trace", "--listen", "127.0.0.1:0", *into),
        stdin=asyncio.subprocess.PIPE,  # the process ends when this pipe closes
        stdout=asyncio.subprocess.PIPE,
        env=environment_of("trace"),
        start_new_session=True,  # Ctrl-C reaches only `up`
    )
    try:
        os.environ.update(await _exporter_settings(receiver))
        try:
            yield
        except asyncio.CancelledError:  # the user does not wait for the drain, but for the report
            show(await _report(receiver))
            raise
        show(await _report(receiver))
    finally:
        if receiver.returncode is None:
            receiver.kill()
            await receiver.wait()


async def _report(receiver: asyncio.subprocess.Process) -> str:
    """Stop the receiver and return its report; the report is empty if the receiver has failed."""
    assert receiver.stdout, "it was started with a pipe"
    report = b""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        receiver.send_signal(signal.SIGINT)
        async with asyncio.timeout(STOP_TIMEOUT_S):
            # `communicate` would close stdin, and the receiver would end as if this process had
            # died.
            report = (await receiver.stdout.read()).replace(_ALIVE, b"")
            await receiver.wait()
    if not report:
        _log.error("there is no report of spans: their receiver has failed or is too slow")
    return report.decode()


async def _exporter_settings(receiver: asyncio.subprocess.Process) -> dict[str, str]:
    """Return the standard settings with which a process exports its spans to the receiver."""
    assert receiver.stdout, "it was started with a pipe"
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while (line := await receiver.stdout.readline()) == _ALIVE:
                pass
    except TimeoutError:
        line = b""
    _, _, address = line.decode().strip().partition(f"{_ENDPOINT}=")
    if not address:
        raise process.StartError("the receiver of spans does not start")
    return {
        "OTEL_TRACES_EXPORTER": "otlp",
        _ENDPOINT: address,
        "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
        "OTEL_BSP_SCHEDULE_DELAY": "500",  # milliseconds
    }
