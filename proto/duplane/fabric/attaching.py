"""Finds a session that another edge had at the workers, and takes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import grpc.aio

from duplane.fabric.channel_pool import ChannelPool
from duplane.fabric.converse import ConverseStream
from duplane.fabric.errors import FabricError, Reason, from_rpc
from duplane.fabric.v1 import admin_pb2, admin_pb2_grpc, lease_pb2, session_pb2, session_pb2_grpc

_Answer = TypeVar("_Answer")
_TakeOverCall = grpc.aio.StreamStreamCall[session_pb2.TakeOverRequest, session_pb2.TakeOverResponse]
_LIST_S = 2.0  # in which a scheduler must answer
_FIRST_ANSWER_S = 2.0  # in which a worker must answer whether it has the session
_COPY_S = 10.0  # in which a worker must send what a client waits for
LATER_COPY_S = 30.0
"""Seconds in which the past units must come behind the answer to an attach.

A worker begins to send them when no edge has attached for a second, or after five seconds.
"""
_END_S = 1.0  # in which a worker must end a call whose copy is no longer needed
_ASKED_AT_ONCE = 32  # workers that are asked for a copy at the same time
# If no worker gives the session away, the first of these reasons is told. The old copy of one
# worker does not matter while another worker has the session and cannot give it away yet.
_TELLING = (Reason.NOT_ALLOWED, Reason.NOT_READY, Reason.SLOT_OCCUPIED, Reason.COPY_STALE)


class Administrator(Protocol):
    """Makes calls to AdminService."""

    async def administer(
        self, call: Callable[[admin_pb2_grpc.AdminServiceAsyncStub], Awaitable[_Answer]]
    ) -> _Answer:
        """Make a call. Raises FabricError."""
        ...


@dataclass(slots=True)
class TakenSession:
    """A session that another edge had. Without a `stream` it has no slot any more.

    Unless it `is_whole`, the other past units come on the stream.
    """

    attached: session_pb2.Attached
    stream: ConverseStream | None = None
    deltas: list[session_pb2.Delta] = field(default_factory=list[session_pb2.Delta])
    past_units: list[session_pb2.PastUnit] = field(default_factory=list[session_pb2.PastUnit])

    is_whole: bool = False
    is_safe: asyncio.Event = field(default_factory=asyncio.Event)
    """To be set when another worker has a copy, or the session has ended.

    Until then, the worker keeps the copy without a slot, because this process may be lost.
    """

    @property
    def has_deltas(self) -> bool:
        """Whether all deltas have come. The past units follow them."""
        if self.past_units or self.is_whole or not self.attached.HasField("first_sequence"):
            return True
        return bool(self.deltas) and self.deltas[-1].sequence >= self.attached.last_sequence

    def add(self, part: session_pb2.ConverseResponse | session_pb2.TakeOverResponse) -> None:
        """Add a message of the worker."""
        if part.HasField("delta"):
            self.deltas.append(part.delta)
        self.past_units.extend(part.kept.units)
        self.is_whole = part.kept.is_last


class _Workers(NamedTuple):
    """Workers that may have a copy.

    A session is lost if all workers that are `running` say so, and `are_all`. A scheduler says
    which ones are running. One that has just begun may name none yet.
    """

    addresses: Sequence[str]
    running: Sequence[str] = ()
    are_all: bool = False


class SessionTaker:
    """Takes sessions from the workers of one pool, for one process.

    A scheduler names the workers with a lease of the session and, if none of these gives the
    session away, all workers. In addition, the workers to which a channel is open are asked: the
    scheduler may have lost them, or none may answer. Then also those are asked that a scheduler has
    named last.
    """

    def __init__(self, administrator: Administrator, to_workers: ChannelPool) -> None:
        self._administrator = administrator
        self._to_workers = to_workers
        self._listed: Sequence[str] = ()  # the running workers, as a scheduler has named them last

    @contextlib.asynccontextmanager
    async def taken(self, attach: session_pb2.Attach, pool: str) -> AsyncGenerator[TakenSession]:
        """Take a session; hold it during the body of the `with`. Raises FabricError.

        The reason is UNAVAILABLE if a process that may know the session does not answer.
        """
        async with contextlib.AsyncExitStack() as stack:
            yield await self._take(stack, attach, pool)

    async def _take(
        self, stack: contextlib.AsyncExitStack, attach: session_pb2.Attach, pool: str
    ) -> TakenSession:
        leased = await self._if_answered(leases_of(self._administrator, attach.session_id))
        failures = dict[str, FabricError]()  # by address
        for address in leased or ():
            try:
                return await stack.enter_async_context(self._attached(address, attach))
            except FabricError as error:
                failures[address] = error
        workers = await self._workers(pool, leased)
        taken = await self._taken_over(stack, attach, workers.addresses, failures)
        if taken:
            return taken
        for address, failure in failures.items():
            if failure.reason is Reason.SLOT_OCCUPIED and address not in (leased or ()):
                # The scheduler has lost the lease, or does not tell the address of its worker.
                return await stack.enter_async_context(self._attached(address, attach))
        raise _refusal(failures, workers)

    async def _if_answered(self, listing: Awaitable[Sequence[str]]) -> Sequence[str] | None:
        """Return what a scheduler lists; None if no scheduler answers. Raises FabricError."""
        try:
            return await listing
        except FabricError as error:
            if error.reason is not Reason.UNAVAILABLE:
                raise
            return None

    async def _workers(self, pool: str, leased: Sequence[str] | None) -> _Workers:
        """Return the workers to ask for a copy. `leased` is None if no scheduler answers."""
        listed = None
        if leased is not None:
            listed = await self._if_answered(workers_of(self._administrator, pool))
        if listed is not None:
            self._listed = listed
        asked = tuple({*(leased or ()), *self._listed, *self._to_workers.addresses})
        if leased is None or listed is None:
            return _Workers(asked)
        return _Workers(asked, (*leased, *listed), are_all=bool(listed))

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
        held: contextlib.AsyncExitStack,
        attach: session_pb2.Attach,
        addresses: Sequence[str],
        failures: dict[str, FabricError],
    ) -> TakenSession | None:
        """Take the copy with the most units of a session without a slot; None if there is none.

        Notes in `failures` why a worker gives no copy away. `held` keeps the copy at its worker.
        """
        places, calls = asyncio.Semaphore(_ASKED_AT_ONCE), set[_TakeOverCall]()
        async with contextlib.AsyncExitStack() as stack:

            async def ask(address: str) -> tuple[str, _TakeOverCall, TakenSession] | None:
                async with places:
                    channel = await stack.enter_async_context(self._to_workers.use(address))
                    call = session_pb2_grpc.SessionServiceStub(channel).TakeOver()
                    calls.add(call)
                    try:
                        async with asyncio.timeout(_FIRST_ANSWER_S):
                            await _write(call, session_pb2.TakeOverRequest(attach=attach))
                            first = await call.read()
                    except TimeoutError:
                        failures[address] = FabricError(Reason.UNAVAILABLE, "the worker is silent")
                        return None
                    except grpc.aio.AioRpcError as error:
                        # A worker of an older release has no such method, and no copy.
                        failures[address] = from_rpc(error)
                        return None
                    if not isinstance(first, session_pb2.TakeOverResponse):
                        return None
                    return address, call, TakenSession(first.attached)

            try:
                answers = await asyncio.gather(*map(ask, addresses))
                found = [answer for answer in answers if answer]
                if not found or any(one.reason is Reason.NOT_READY for one in failures.values()):
                    return None  # in the latter case, another worker or edge has newer units
                address, call, taken = max(found, key=lambda one: one[2].attached.last_sequence)
                await _read_copy(call, taken)
                await held.enter_async_context(self._to_workers.use(address))
                await held.enter_async_context(_kept_until_safe(call, taken.is_safe))
                calls.remove(call)
            finally:
                for other in calls:
                    other.cancel()
            return taken


@contextlib.asynccontextmanager
async def _kept_until_safe(call: _TakeOverCall, is_safe: asyncio.Event) -> AsyncGenerator[None]:
    """Keep a call open, and with it the copy, in the body of the `with`, or until `is_safe`."""
    telling = asyncio.create_task(_tell_safe(call, is_safe))
    try:
        yield
    finally:
        if is_safe.is_set():
            await asyncio.wait({telling}, timeout=_END_S)
        telling.cancel()
        await asyncio.wait({telling})
        call.cancel()


async def _tell_safe(call: _TakeOverCall, is_safe: asyncio.Event) -> None:
    await is_safe.wait()
    with contextlib.suppress(grpc.aio.AioRpcError):  # the worker may be lost
        await _write(call, session_pb2.TakeOverRequest(is_done=True))
        await call.read()  # the end of the call: the worker has deleted its copy


async def _write(call: _TakeOverCall, request: session_pb2.TakeOverRequest) -> None:
    """Write a request. If the call has ended, `read` tells why."""
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(request)


async def _read_copy(call: _TakeOverCall, taken: TakenSession) -> None:
    """Read to the last message: only then has the worker given the copy to no other edge."""
    try:
        async with asyncio.timeout(_COPY_S):
            while not taken.is_whole:
                part = await call.read()
                if not isinstance(part, session_pb2.TakeOverResponse):
                    break
                taken.add(part)
    except TimeoutError:
        taken.is_whole = False
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None
    if not taken.is_whole:
        raise FabricError(Reason.UNAVAILABLE, "the worker did not send the whole copy")


async def _read_attached(stream: ConverseStream, attach: session_pb2.Attach) -> TakenSession:
    """Read what the client needs. The past units are only for a move, so they may come later."""
    try:
        async with asyncio.timeout(_FIRST_ANSWER_S):
            await stream.write(session_pb2.ConverseRequest(attach=attach))
            taken = TakenSession((await stream.read()).attached, stream)
        async with asyncio.timeout(_COPY_S):
            while not taken.has_deltas:
                taken.add(await stream.read())
    except TimeoutError:
        raise FabricError(Reason.UNAVAILABLE, "the worker did not send the session") from None
    return taken


def _refusal(failures: Mapping[str, FabricError], workers: _Workers) -> FabricError:
    """Return why no worker gives the session away."""
    refusal = FabricError(Reason.UNKNOWN_SESSION, "no worker has the session")
    for reason in reversed(_TELLING):
        refusal = next((one for one in failures.values() if one.reason is reason), refusal)
    silent = {address for address, one in failures.items() if one.reason is Reason.UNAVAILABLE}
    is_known = workers.are_all and silent.isdisjoint(workers.running)
    if is_known or refusal.reason not in (Reason.UNKNOWN_SESSION, Reason.COPY_STALE):
        return refusal
    return FabricError(Reason.UNAVAILABLE, "a process that may know the session does not answer")


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
