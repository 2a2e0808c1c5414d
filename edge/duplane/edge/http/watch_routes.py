"""The routes of the page for operators: the stream of events, and drains of workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator
from typing import cast

from aiohttp import hdrs, web

from duplane.edge.access import Level, Scope, caller_of
from duplane.edge.http.fabric_routes import DEADLINE_S
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import closing, json_answer, read_body, read_object
from duplane.edge.http.queue_routes import for_sender
from duplane.edge.transport.client_protocol import ClientProtocol
from duplane.edge.watching.feed import TooManyReadersError, WatchFeed
from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import admin_pb2

# A page then opens the stream again, with its credential, which may have ended.
MAX_STREAM_S = 3600.0
_RETRY_AFTER_S = "10"
_MAX_BODY_BYTES = 4 * 1024
_BLOCK_BYTES = 64 * 1024
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "X-Accel-Buffering": "no",  # proxies must not hold events back
}


class WatchRoutes:
    """Streams the state of the fabric and drains workers. `body_s` limits the time for a body."""

    def __init__(self, fabric: FabricClient, feed: WatchFeed, body_s: float) -> None:
        self._fabric = fabric
        self._feed = feed
        self._body_s = body_s

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        drain = "/api/admin/workers/{worker}/drain"
        return [
            HttpRoute("GET", "/api/admin/watch", self._watch, Level.MONITOR),
            HttpRoute("POST", drain, self._drain, Level.OPERATOR, Scope.DRAIN),
            HttpRoute("DELETE", drain, self._undrain, Level.OPERATOR, Scope.DRAIN),
        ]

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """Write events until the client leaves, its credential ends or an hour has passed."""
        if request.method == hdrs.METH_HEAD:
            return closing(web.Response(headers=_HEADERS))
        caller = caller_of(request)
        ends_s = time.monotonic() + MAX_STREAM_S
        if caller.expires_s is not None:
            ends_s = min(ends_s, caller.expires_s)
        async with contextlib.AsyncExitStack() as stack:
            try:
                reader = await stack.enter_async_context(self._feed.reading(caller))
            except TooManyReadersError as error:
                raise web.HTTPTooManyRequests(
                    text=str(error), headers={hdrs.RETRY_AFTER: _RETRY_AFTER_S}
                ) from None
            protocol = cast("ClientProtocol", request.protocol)  # the server makes no other
            protocol.become_stream()
            response = closing(web.StreamResponse(headers=_HEADERS))
            await response.prepare(request)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, ends_s - time.monotonic())):
                    while events := await reader.read():
                        await _write(response, events)
        return response

    async def _drain(self, request: web.Request) -> web.Response:
        """Let a worker accept no more sessions; with `is_stop`, also end its process."""
        body = await read_body(request, _MAX_BODY_BYTES, self._body_s)
        is_stop = read_object(body).get("is_stop", False)
        if not isinstance(is_stop, bool):
            raise web.HTTPUnprocessableEntity(text="is_stop: must be true or false")
        drain = admin_pb2.DrainWorkerRequest(worker_id=_worker(request), is_stop=is_stop)
        metadata = for_sender(request)
        with _worker_found():
            await self._fabric.administer(
                lambda admin: admin.DrainWorker(drain, timeout=DEADLINE_S, metadata=metadata)
            )
        return json_answer({"success": True})

    async def _undrain(self, request: web.Request) -> web.Response:
        """Let a worker accept sessions again."""
        undrain = admin_pb2.UndrainWorkerRequest(worker_id=_worker(request))
        metadata = for_sender(request)
        with _worker_found():
            await self._fabric.administer(
                lambda admin: admin.UndrainWorker(undrain, timeout=DEADLINE_S, metadata=metadata)
            )
        return json_answer({"success": True})


@contextlib.contextmanager
def _worker_found() -> Generator[None]:
    """Answer 404 if the scheduler does not know the worker. Raises HTTPNotFound, FabricError."""
    try:
        yield
    except FabricError as error:
        if error.reason is not Reason.UNKNOWN_WORKER:
            raise
        raise web.HTTPNotFound(text="no worker with this id is attached") from None


async def _write(response: web.StreamResponse, events: bytes) -> None:
    """Write events in blocks, so that the write buffer holds no whole copy of a long snapshot."""
    for at in range(0, len(events), _BLOCK_BYTES):
        await response.write(events[at : at + _BLOCK_BYTES])


def _worker(request: web.Request) -> str:
    return request.match_info["worker"]
