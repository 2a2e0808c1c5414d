"""A receiver for the spans and metrics of a fabric, so that a run can include their export."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Generator, Mapping

from duplane.fabric.addresses import Address
from duplane.tools.otlp_receiver import METRICS, SPANS, receiving_otlp


class Receiver:
    """Receives OTLP exports, counts their bytes, and discards them."""

    def __init__(self) -> None:
        self.byte_count = 0

    def _count(self, export: bytes) -> None:
        self.byte_count += len(export)

    @classmethod
    @contextlib.asynccontextmanager
    async def exporting(cls) -> AsyncGenerator[Receiver]:
        """Serve, and set the environment so that new processes export to this receiver."""
        receiver, listen = cls(), Address("127.0.0.1", 0)
        async with receiving_otlp(listen, (SPANS, METRICS), receiver._count) as address:
            with _environment(
                {
                    "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}",
                    "OTEL_EXPORTER_OTLP_INSECURE": "true",
                }
            ):
                yield receiver


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
