"""gRPC's pings detect a hung peer process during an open call."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import grpc.aio
import pytest

from duplane.fabric.channel import open_channel
from duplane.fabric.v1 import session_pb2, session_pb2_grpc

pytestmark = pytest.mark.timing

SERVER = """
import asyncio
import uvloop
from duplane.fabric.channel import FabricServer
from duplane.fabric.v1 import session_pb2, session_pb2_grpc

class Sessions(session_pb2_grpc.SessionServiceServicer):
    async def Converse(self, requests, context):
        yield session_pb2.ConverseResponse(claimed=session_pb2.Claimed())
        await asyncio.Event().wait()

async def main():
    server = FabricServer()
    session_pb2_grpc.add_SessionServiceServicer_to_server(Sessions(), server.grpc)
    print(await server.start("127.0.0.1:0"), flush=True)
    await asyncio.Event().wait()

uvloop.run(main())
"""


async def test_open_call_to_a_stopped_process_fails_within_20_s() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout
        address = (await process.stdout.readline()).decode().strip()
        async with open_channel(address) as channel:
            call = session_pb2_grpc.SessionServiceStub(channel).Converse()
            await call.write(session_pb2.ConverseRequest())
            assert isinstance(await call.read(), session_pb2.ConverseResponse)
            os.kill(process.pid, signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async with asyncio.timeout(40):
                    await call.read()
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - began < 20
    finally:
        process.kill()  # also ends a stopped process
        await process.wait()
