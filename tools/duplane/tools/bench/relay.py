"""The relay of `duplane bench fabric --floor`: the libraries of the edge without the edge.

The relay is a server on the same libraries: aiohttp's WebSocket, grpc.aio through FabricClient, and
uvloop. It receives the frames of clients of dialect C. For each frame with sound it writes a unit
with fixed sound to a worker. For each delta it writes a fixed `result`, as long as the one that the
edge renders. It parses no JSON, decodes and encodes no base64, checks nothing, and keeps no journal
and no metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator

from aiohttp import WSMsgType, web

from duplane.edge.clock import Moment
from duplane.edge.dialects.actions import NO_TAG, NOTHING_DROPPED
from duplane.edge.dialects.c import DialectC
from duplane.edge.identity import Identity
from duplane.edge.modes import MODES
from duplane.edge.settings import Limits
from duplane.fabric import process
from duplane.fabric.addresses import Address, parse_address
from duplane.fabric.audio import OUTPUT_RATE_HERTZ
from duplane.fabric.client import FabricClient
from duplane.fabric.converse import ConverseStream
from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.tools.bench.load.sessions import SOUND
from duplane.tools.up.supervisor import Role

_log = logging.getLogger(__name__)
_END_S = 1.0  # for the last connections to end
_CONTROL_BYTES = 4096  # shorter frames of clients have no sound: the settings, or the end


def _result() -> bytes:
    """Return the text frame, with its header, that the edge sends for one second of speech."""
    dialect = DialectC(Identity("relay", "relay"), Limits(), MODES["audio"])
    speech = session_pb2.Speech(text="floor", audio=bytes(4 * OUTPUT_RATE_HERTZ))
    delta = session_pb2.Delta(speech=speech, context_token_count=1)
    delta.stage_times.total.FromMilliseconds(1)  # the load generator takes 0 for a dropped unit
    (event,) = dialect.delta(delta, NO_TAG, NOTHING_DROPPED, Moment(0.0, 0))
    return b"\x81\x7f" + len(event).to_bytes(8, "big") + event


class _Relay:
    """The sessions of all clients."""

    def __init__(self, fabric: FabricClient) -> None:
        self._fabric = fabric
        self._result = _result()

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Serve one client."""
        socket = web.WebSocketResponse(compress=False, decode_text=False)
        await socket.prepare(request)
        kind = lease_pb2.SESSION_KIND_AUDIO_DUPLEX
        acquiring = lease_pb2.AcquireLeaseRequest(request_id=str(uuid.uuid4()), kind=kind)
        async with self._fabric.session(acquiring) as stream:
            await socket.send_json({"type": "queue_done"})
            await socket.receive()
            await stream.open(session_pb2.Open())
            await socket.send_json({"type": "prepared"})
            answering = asyncio.create_task(self._answer(request, stream))
            try:
                await self._read(socket, stream)
            finally:
                answering.cancel()
                await asyncio.wait({answering})
        if not socket.closed:
            await socket.send_json({"type": "stopped"})
        return socket

    async def _read(self, socket: web.WebSocketResponse, stream: ConverseStream) -> None:
        """Write a unit to the worker for each frame with sound, until another frame comes."""
        sequence = 0
        async for message in socket:
            if message.type is not WSMsgType.TEXT or len(message.data) < _CONTROL_BYTES:
                return
            request = session_pb2.ConverseRequest()
            request.unit.sequence, request.unit.audio = sequence, SOUND
            await stream.write(request)
            sequence += 1

    async def _answer(self, request: web.Request, stream: ConverseStream) -> None:
        """Write a `result` to the client for each delta."""
        transport = request.transport
        while transport and not transport.is_closing():
            try:
                response = await stream.read()
            except FabricError as error:
                _log.warning("a session ends: %s", error)
                return
            if response.WhichOneof("message") == "delta":
                transport.write(self._result)


async def serve(scheduler: str, listen: str, shutdown: process.Shutdown) -> None:
    """Serve until the first signal."""
    address = parse_address(listen, "listen", min_port=0)
    async with FabricClient([scheduler]) as fabric:
        application = web.Application()
        application.router.add_get("/{path:.*}", _Relay(fabric).serve)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=_END_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, address.host, address.port).start()
            process.announce("relay", str(Address(*runner.addresses[0][:2])))
            await shutdown.wait()
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def relaying(scheduler: str) -> AsyncGenerator[Role]:
    """Run a relay, as a process of its own, for the body of the `with`.

    Raises RoleError in a group.
    """
    role = Role("relay", ("bench", "relay", "--scheduler", scheduler), "127.0.0.1:0")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(role.keep_running())
        try:
            await role.ready()
            yield role
        finally:
            await role.stop()
