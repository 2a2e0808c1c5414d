"""An OTLP receiver of spans over gRPC."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from duplane.fabric.addresses import Address, parse_address
from duplane.fabric.process import StartError
from duplane.fabric.tls.credentials import FabricCredentials
from duplane.tools.otlp_receiver import receiving_otlp
from duplane.tools.trace.spans_json import to_line
from duplane.tools.trace.units import Collected

_log = logging.getLogger(__name__)
_MAX_FILE_BYTES = 1_000_000_000  # a file of this size gets no more spans


class _Receiver:
    """Collects the spans that processes export, and writes them to a file if there is one."""

    def __init__(self, collected: Collected, out: BinaryIO | None) -> None:
        self._collected = collected
        self._out = out
        self._written_bytes = 0

    def store(self, export: bytes) -> None:
        """Store the spans of one export."""
        request = ExportTraceServiceRequest.FromString(export)
        self._collected.add(request)
        if self._out is not None:
            self._write(self._out, to_line(request))

    def _write(self, out: BinaryIO, line: bytes) -> None:
        if self._written_bytes + len(line) > _MAX_FILE_BYTES:
            _log.warning("the file has %d bytes; no more spans are written", self._written_bytes)
            self._out = None
            return
        try:
            _append(out, line)
        except OSError as error:
            _log.warning("the file cannot be written: %s; no more spans are written", error)
            self._out = None
            return
        self._written_bytes += len(line)


def _append(out: BinaryIO, line: bytes) -> None:
    """Write a whole line or nothing: a file with an incomplete line could not be read.

    Raises OSError.
    """
    written_bytes = out.write(line)
    if written_bytes < len(line):
        out.truncate(out.tell() - written_bytes)
        raise OSError("the disk is full")


@contextlib.asynccontextmanager
async def receiving(
    listen: str,
    collected: Collected,
    out: Path | None = None,
    credentials: FabricCredentials | None = None,
) -> AsyncGenerator[Address]:
    """Collect spans during the body of the `with`; yield the address. Raises StartError."""
    address = parse_address(listen, "listen", min_port=0)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(out.open("ab", buffering=0)) if out else None
        except OSError as error:
            raise StartError(f"cannot write {out}: {error.strerror}") from None
        receiver = _Receiver(collected, file)
        async with receiving_otlp(address, receiver.store, credentials) as bound:
            yield bound
