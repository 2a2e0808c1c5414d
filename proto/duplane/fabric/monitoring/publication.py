"""Publishes the metrics of one process over HTTP, for Prometheus."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator

from prometheus_client import CollectorRegistry, disable_created_metrics

from duplane.fabric.addresses import Address, parse_address
from duplane.fabric.process import StartError

_log = logging.getLogger(__name__)
_KEEPALIVE_S = 75.0


@contextlib.asynccontextmanager
async def published(registry: CollectorRegistry, listen: str) -> AsyncGenerator[str]:
    """Publish the metrics during the body of the `with`.

    Yields the URL at which Prometheus can read the metrics, or an empty URL if `listen` is empty.
    The event loop reads the metrics. Raises StartError if the process cannot listen there.
    """
    disable_created_metrics()  # `_created` series would double the number of series
    if not listen:
        yield ""
        return
    async with _served(registry, listen) as url:
        _log.info("metrics at %s", url)
        yield url


@contextlib.asynccontextmanager
async def _served(registry: CollectorRegistry, listen: str) -> AsyncGenerator[str]:
    # Imported only here: this import takes a third of the time in which a scheduler starts.
    from aiohttp import web
    from prometheus_client.aiohttp import make_aiohttp_handler

    address = parse_address(listen, "metrics_listen", min_port=0)
    application = web.Application()
    application.router.add_get("/metrics", make_aiohttp_handler(registry))
    runner = web.AppRunner(
        application, access_log=None, keepalive_timeout=_KEEPALIVE_S, shutdown_timeout=1.0
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, address.host, address.port).start()
        except OSError as error:
            raise StartError(f"cannot listen on {listen}: {error}") from None
        yield f"http://{Address(address.host, int(runner.addresses[0][1]))}/metrics"
    finally:
        await runner.cleanup()
