"""Finds a session that another edge had at the workers, and takes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import grpc.aio

from duplane.fabric.channel_pool import ChannelPool
from duplane.fabric.converse import ConverseStream
from duplane.fabric.errors import FabricError, Reason, from_rpc
from duplane.fabric.v1 import admin_pb2, admin_pb2_grpc, lease_pb2, session_pb2, session_pb2_grpc

_Answer = TypeVar("_Answer")
_TakeOverCall = grpc.aio.UnaryStreamCall[session_pb2.TakeOverRequest, session_pb2.TakeOverResponse]
_LIST_S = 2.0  # in which a scheduler must answer
_FIRST_ANSWER_S = 2.0  # in which a worker must answer whether it has the session
_COPY_S = 10.0  # in which it must send the whole copy
_ASKED_AT_ONCE = 32  # workers that are asked for a copy at the same time
# If no worker gives the session away, the first of these reasons is told.
_TELLING = (Reason.NOT_ALLOWED, Reason.COPY_STALE, Reason.NOT_READY, Reason.SLOT_OCCUPIED)


class Administrator(Protocol):
    """Makes calls to AdminService."""

    async def administer(
        self, call: Callable[[admin_pb2_grpc.AdminServiceAsyncStub], Awaitable[_Answer]]
    ) -> _Answer:
        """Make a call. Raises FabricError."""
        ...


@dataclass(slots=True)
class TakenSession:
    """A session that another edge had. Without a `stream` it has no slot any more."""

    attached: session_pb2.Attached
    stream: ConverseStream | None = None
    deltas: list[session_pb2.Delta] = field(default_factory=list[session_pb2.Delta])
    past_units: list[session_pb2.PastUnit] = field(default_factory=list[session_pb2.PastUnit])

    def add(self, part: session_pb2.ConverseResponse | session_pb2.TakeOverResponse) -> bool:
        """Add a message of the worker. Return whether it is the last one."""
        if part.HasField("delta"):
            self.deltas.append(part.delta)
        self.past_units.extend(part.kept.units)
        return part.kept.is_last


class SessionTaker:
    """Takes sessions from the workers of one pool, for one process."""

    def __init__(self, to_workers: ChannelPool) -> None:
        self._to_workers = to_workers

    @contextlib.asynccontextmanager
    async def taken(
        self, attach: session_pb2.Attach, addresses: Sequence[str], others: Sequence[str]
    ) -> AsyncGenerator[TakenSession]:
        """Take a session; hold it during the body of the `with`. Raises FabricError.

        `addresses` are those of the workers with a lease of the session, the best first. `others`
        are those of all workers, which may have its copy.
        """
        async with contextlib.AsyncExitStack() as stack:
            yield await self._take(stack, attach, addresses, others)

    async def _take(
        self,
        stack: contextlib.AsyncExitStack,
        attach: session_pb2.Attach,
        addresses: Sequence[str],
        others: Sequence[str],
    ) -> TakenSession:
        failures, occupied = list[FabricError](), list[str]()
        for address in addresses:
            try:
                return await stack.enter_async_context(self._attached(address, attach))
            except FabricError as error:
                failures.append(error)
        is_away = any(error.reason is Reason.UNAVAILABLE for error in failures)
        try:
            return await self._taken_over(attach, others, failures, occupied)
        except FabricError as error:
            for address in set(occupied) - set(addresses):
                # The scheduler has lost the lease, or does not tell the address of its worker.
                return await stack.enter_async_context(self._attached(address, attach))
            if is_away and error.reason is Reason.UNKNOWN_SESSION:
                message = "the worker with the lease of the session does not answer"
                raise FabricError(Reason.UNAVAILABLE, message) from None
            raise

    @contextlib.asynccontextmanager
    async def _attached(
        self, address: str, attach: session_pb2.Attach
    ) -> AsyncGenerator[TakenSession]:
        """Continue a session that has its slot at a worker."""
        async with self._to_workers.use(address) as channel:
            call = session_pb2_grpc.SessionServiceStub(channel).Converse()
            stream = ConverseStream(call, lease_pb2.Granted())
            try:
                taken = await _read_attached(stream, attach)
                stream.granted = taken.attached.granted
                yield taken
            finally:
                await stream.finish()

    async def _taken_over(
        self,
        attach: session_pb2.Attach,
        addresses: Sequence[str],
        failures: list[FabricError],
        occupied: list[str],
    ) -> TakenSession:
        """Take the copy with the most units of a session without a slot.

        Adds to `occupied` the addresses of workers at which the session has a slot.
        """
        places = asyncio.Semaphore(_ASKED_AT_ONCE)
        request = session_pb2.TakeOverRequest(attach=attach)
        async with contextlib.AsyncExitStack() as stack:

            async def ask(address: str) -> tuple[_TakeOverCall, TakenSession] | None:
                async with places:
                    channel = await stack.enter_async_context(self._to_workers.use(address))
                    call = session_pb2_grpc.SessionServiceStub(channel).TakeOver(request)
                    stack.callback(call.cancel)
                    try:
                        async with asyncio.timeout(_FIRST_ANSWER_S):
                            first = await call.read()
                    except TimeoutError:
                        return None
                    except grpc.aio.AioRpcError as error:
                        # A worker of an older release has no such method, and no copy.
                        failures.append(failure := from_rpc(error))
                        if failure.reason is Reason.SLOT_OCCUPIED:
                            occupied.append(address)
                        return None
                    if not isinstance(first, session_pb2.TakeOverResponse):
                        return None
                    return call, TakenSession(first.attached)

            answers = await asyncio.gather(*map(ask, addresses))
            found = [answer for answer in answers if answer]
            if not found:
                raise _telling(failures)
            call, taken = max(found, key=lambda one: one[1].attached.last_sequence)
            await _read_copy(call, taken)
            return taken


async def _read_copy(call: _TakeOverCall, taken: TakenSession) -> None:
    """Read to the end of the call: only then has the worker given the copy to no other edge."""
    is_whole = False
    try:
        async with asyncio.timeout(_COPY_S):
            while isinstance(part := await call.read(), session_pb2.TakeOverResponse):
                is_whole = taken.add(part)
    except TimeoutError:
        is_whole = False
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None
    if not is_whole:
        raise FabricError(Reason.UNAVAILABLE, "the worker did not send the whole copy")


async def _read_attached(stream: ConverseStream, attach: session_pb2.Attach) -> TakenSession:
    try:
        async with asyncio.timeout(_FIRST_ANSWER_S):
            await stream.write(session_pb2.ConverseRequest(attach=attach))
            taken = TakenSession((await stream.read()).attached, stream)
        async with asyncio.timeout(_COPY_S):
            while not taken.add(await stream.read()):
                pass
    except TimeoutError:
        raise FabricError(Reason.UNAVAILABLE, "the worker did not send the session") from None
    return taken


def _telling(failures: Sequence[FabricError]) -> FabricError:
    for reason in _TELLING:
        for failure in failures:
            if failure.reason is reason:
                return failure
    return FabricError(Reason.UNKNOWN_SESSION, "no worker has the session")


async def leases_of(administrator: Administrator, session_id: str) -> Sequence[str]:
    """Return the addresses of the workers with a lease of a session, the latest lease first."""
    request = admin_pb2.ListLeasesRequest(session_id=session_id)
    listed = await administrator.administer(
        lambda admin: admin.ListLeases(request, timeout=_LIST_S)
    )
    leases = [one for one in listed.leases if one.claims.session_id == session_id]
    leases.sort(key=lambda one: one.claims.fencing_number, reverse=True)
    return [one.worker_address for one in leases if one.worker_address]


async def workers_of(administrator: Administrator, pool: str) -> Sequence[str]:
    """Return the addresses of the workers of a pool."""
    addresses, request = list[str](), admin_pb2.ListWorkersRequest()
    while True:
        listed = await administrator.administer(
            lambda admin: admin.ListWorkers(request, timeout=_LIST_S)
        )
        for one in listed.workers:
            if one.worker.pool == pool and not one.HasField("lost_duration"):
                addresses.append(one.worker.address)
        if not listed.next_page_token:
            return addresses
        request.page_token = listed.next_page_token
