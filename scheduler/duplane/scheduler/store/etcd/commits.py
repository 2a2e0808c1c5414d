"""Commits operations to etcd. Operations that are ready at the same time share one transaction."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import grpc

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.repeated_log import RepeatedLog
from duplane.scheduler.etcd.client import EtcdClient, EtcdError, NoAnswerError
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.etcd.facts import Facts
from duplane.scheduler.store.etcd.mirror import RETRY_PAUSE_S, Mirror
from duplane.scheduler.store.etcd.session import Session
from duplane.scheduler.store.etcd.transactions import Answer, Done, Step, Transaction

_log = logging.getLogger(__name__)

# etcd refuses a transaction of more than 128 operations or 1.5 MB, including the transactions that
# are nested in it.
_MAX_JOINT_COUNT = 32
_MAX_JOINT_BYTES = 512 * 1024
# Maximum number of transactions that wait for etcd at the same time. With a limit of two, fewer
# operations would share a transaction, so a sixth more transactions would be sent. More of these
# would fail because of changes by other schedulers. Arrivals, of which a transaction contains at
# most one, have their own limit.
_MAX_SENT_COUNT = 1
_MAX_SENT_ARRIVALS = 16
# Maximum number of successive transactions that contain an arrival and nothing else while other
# operations wait. An arrival that registers a worker always has a transaction of its own.
_MAX_PASSED_OVER = 4
_EXAMINED_COUNT = 64  # maximum number of operations that one `_flush` applies to the facts


@dataclass(eq=False, slots=True)
class _Operation(Generic[Answer]):
    """An operation that waits until it is sent to etcd, and then until etcd answers."""

    step_of: Callable[[Facts], Step[Answer]]
    future: asyncio.Future[Answer]
    is_arrival: bool
    is_alone: bool = False  # was refused together with others


_Sent = tuple[_Operation[Any], Transaction[Any]]


class _Joint:
    """Operations that share a transaction."""

    def __init__(self) -> None:
        self.sent: list[_Sent] = []
        self.is_full = False  # or its only operation shares with none
        self._size = 0
        self._touched: set[bytes] = set()
        self._written: set[bytes] = set()

    def add(self, operation: _Operation[Any], step: Transaction[Any]) -> bool:
        """Add an operation if it fits. The first one always fits.

        No operation may change a key that another operation requires or changes.
        """
        is_alone = step.is_alone or operation.is_alone
        if self.sent and (is_alone or self.is_full or not self._has_room(step)):
            return False
        self.sent.append((operation, step))
        self.is_full = is_alone or len(self.sent) == _MAX_JOINT_COUNT
        self._size += step.size
        self._touched |= step.touched
        self._written |= step.written
        return True

    def _has_room(self, step: Transaction[Any]) -> bool:
        is_small = self._size + step.size <= _MAX_JOINT_BYTES
        is_apart = step.written.isdisjoint(self._touched) and self._written.isdisjoint(step.touched)
        return is_small and is_apart


class Commits:
    """Applies operations to the present facts until their transactions succeed.

    Operations that wait at the same time share a transaction. Each has its own conditions in the
    transaction, so an operation can fail while the others succeed. Operations that touch the same
    key do not share a transaction. Two arrivals (operations that add a ticket or a worker) do not
    share one either, because each needs a revision of its own as its order or epoch.

    Operations are sent in their order, with two exceptions. An operation that cannot share the next
    transaction stays at its place, while operations behind it may be taken. Arrivals come before
    other operations. While others wait, at most `_MAX_PASSED_OVER` successive transactions contain
    only an arrival.

    Every transaction requires that the key of this scheduler's session is unchanged. If the outcome
    of a transaction is unknown, this key is written again. From then on the transaction cannot be
    executed any more, and the facts show whether it was executed before.
    """

    def __init__(self, client: EtcdClient, mirror: Mirror, session: Session) -> None:
        self._client = client
        self._mirror = mirror
        self._session = session
        self._facts = mirror.facts
        self._arrivals: deque[_Operation[Any]] = deque()
        self._others: deque[_Operation[Any]] = deque()
        self._shared: dict[object, asyncio.Future[Any]] = {}  # by the name `shared_as`
        # These dicts are used as sets that keep their order.
        self._unfinished: dict[asyncio.Future[Any], None] = {}
        self._sending: dict[asyncio.Task[None], None] = {}
        self._refusals = RepeatedLog(_log)
        self._resuming: asyncio.Task[None] | None = None
        self._left_count = 0  # operations that this `_flush` may still apply to the facts
        # Number of successive transactions that had only an arrival while other operations waited.
        self._passed_over_count = 0
        self._is_flush_due = False
        self._is_closed = False
        self._fencing = asyncio.Lock()

    @property
    def count(self) -> int:
        """The number of operations that wait."""
        return len(self._unfinished)

    async def commit(
        self,
        step_of: Callable[[Facts], Step[Answer]],
        shared_as: object = None,
        *,
        is_arrival: bool = False,
    ) -> Answer:
        """Complete an operation, even if the caller is cancelled. `begin` has the details."""
        return await asyncio.shield(self.begin(step_of, shared_as, is_arrival=is_arrival))

    def begin(
        self,
        step_of: Callable[[Facts], Step[Answer]],
        shared_as: object = None,
        *,
        is_arrival: bool = False,
    ) -> asyncio.Future[Answer]:
        """Begin an operation and return the future of its answer. Do not cancel this future.

        If an operation with the same `shared_as` already waits, both callers get its answer. This
        bounds the operations that a client can cause by repeating a request. `is_arrival` means
        that the operation may need a revision that no other operation uses.
        """
        if self._is_closed:
            raise FabricError(Reason.UNAVAILABLE, "the store is closed")
        future = self._shared.get(shared_as)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda ended: self._on_ended(ended, shared_as))
            self._unfinished[future] = None
            if shared_as is not None:
                self._shared[shared_as] = future
            self._put(_Operation(step_of, future, is_arrival))
        return future

    def _on_ended(self, ended: asyncio.Future[Any], shared_as: object) -> None:
        self._unfinished.pop(ended, None)
        self._shared.pop(shared_as, None)
        if not ended.cancelled():
            ended.exception()  # mark the error as read, because the caller may be gone

    def close(self) -> None:
        """Cancel every operation."""
        self._is_closed = True
        for task in (*self._sending, *filter(None, (self._resuming,))):
            task.cancel()
        for future in list(self._unfinished):
            future.cancel()

    async def catch_up(self) -> None:
        """Wait until the facts contain everything that etcd has confirmed by now."""
        while True:
            try:
                revision = await self._client.put(self._facts.keys.barrier, b"")
            except NoAnswerError:
                await asyncio.sleep(RETRY_PAUSE_S)
            except EtcdError as error:
                await self._report_refusal(error)
            else:
                await self._mirror.reached(revision)
                return

    def _put(self, operation: _Operation[Any]) -> None:
        self._queue_of(operation).append(operation)
        self._flush_soon()

    def _queue_of(self, operation: _Operation[Any]) -> deque[_Operation[Any]]:
        return self._arrivals if operation.is_arrival else self._others

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            # The event loop first runs the callbacks that are already scheduled, and then `_flush`.
            # So the operations that these callbacks add share a transaction.
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send as many operations as may be sent now. Examine at most `_EXAMINED_COUNT` of them."""
        self._is_flush_due = False
        if self._is_closed:
            return
        if not self._is_ready:
            self._resuming = self._resuming or asyncio.create_task(self._resume())
            return
        self._left_count = _EXAMINED_COUNT
        while self._may_send:
            if not self._left_count:
                self._flush_soon()
                return
            if joint := self._next_joint():
                # The request is made here and not in the task, because its values and its condition
                # must have the same base. An event can raise the base before the task runs.
                request = self._request([step for _, step in joint])
                session_revision = self._facts.sessions[self._session.name]
                task = asyncio.create_task(self._send(joint, request, session_revision))
                self._sending[task] = None
                task.add_done_callback(self._on_sent)

    @property
    def _may_send(self) -> bool:
        """True if an operation waits that may be sent now."""
        if self._arrivals or (self._others and self._passed_over_count >= _MAX_PASSED_OVER):
            return len(self._sending) < _MAX_SENT_ARRIVALS
        return bool(self._others) and len(self._sending) < _MAX_SENT_COUNT

    @property
    def _is_ready(self) -> bool:
        """True if transactions can be made from the facts.

        The facts must not be partial, and must contain this scheduler's session. Their base must be
        so high that the next numbers exceed all earlier ones.
        """
        if self._mirror.is_partial:
            return False
        has_session = self._session.name in self._facts.sessions
        return has_session and self._facts.base == self._facts.least_base

    async def _resume(self) -> None:
        """Raise `base` if etcd went back to an old revision; then send waiting operations."""
        while not self._is_ready:
            await self._mirror.until(lambda: self._session.name in self._facts.sessions)
            if (base := self._facts.least_base) != self._facts.base:
                await self._write(self._facts.keys.base, b"%d" % base)
        self._resuming = None
        self._flush()

    def _on_sent(self, task: asyncio.Task[None]) -> None:
        self._sending.pop(task, None)
        if not task.cancelled():
            task.result()
            self._flush()

    def _next_joint(self) -> Sequence[_Sent]:
        """Take waiting operations that can share a transaction.

        Operations that turn out to change nothing are completed without etcd.
        """
        joint = _Joint()
        later = list[_Operation[Any]]()
        if self._passed_over_count < _MAX_PASSED_OVER or not self._others:
            while self._arrivals and not joint.sent and self._left_count:
                self._join(self._arrivals.popleft(), joint, later)
        arrival_count = len(joint.sent)
        while self._others and not joint.is_full and self._left_count:
            self._join(self._others.popleft(), joint, later)
        self._others.extendleft(reversed(later))
        is_passing_over = self._others and arrival_count and len(joint.sent) == arrival_count
        self._passed_over_count = self._passed_over_count + 1 if is_passing_over else 0
        return joint.sent

    def _join(
        self, operation: _Operation[Any], joint: _Joint, later: list[_Operation[Any]]
    ) -> None:
        """Apply an operation to the facts. Add it to `joint` if it fits, else to `later`."""
        self._left_count -= 1
        if operation.future.done():
            return
        try:
            step = operation.step_of(self._facts)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            operation.future.set_exception(error)
            return
        if isinstance(step, Done):
            operation.future.set_result(step.answer)
        elif not joint.add(operation, step):
            later.append(operation)

    async def _send(
        self, joint: Sequence[_Sent], request: etcd_pb2.TxnRequest, session_revision: int
    ) -> None:
        """Execute one transaction. Operations whose conditions fail become the first of the queue.

        If etcd refuses the transaction, its operations go to the end of the queue, and each is sent
        alone. So an operation that cannot be executed stops no other operation.
        """
        try:
            revision, succeeded = await self._execute(request, len(joint), session_revision)
        except EtcdError as error:
            await self._after_refusal(error)
            for operation, _ in joint:
                operation.is_alone = True
                self._put(operation)
            return
        except Exception as error:  # noqa: BLE001 - the callers get it
            for operation, _ in joint:
                if not operation.future.done():
                    operation.future.set_exception(error)
            return
        failed: list[_Operation[Any]] = []
        for (operation, step), has_succeeded in zip(joint, succeeded, strict=True):
            if not has_succeeded:
                failed.append(operation)
            elif not operation.future.done():
                operation.future.set_result(step.answer(revision))
        for operation in reversed(failed):
            self._queue_of(operation).appendleft(operation)

    async def _execute(
        self, request: etcd_pb2.TxnRequest, count: int, session_revision: int
    ) -> tuple[int, Sequence[bool]]:
        """Execute the `count` operations of one transaction.

        Returns the revision of their changes, and whether each operation succeeded. The facts then
        contain the changes, or the cause of the failure. Raises EtcdError if etcd refuses the
        transaction.
        """
        failed = [False] * count
        try:
            response = await self._client.txn(request)
        except NoAnswerError:
            await self._fence(session_revision)
            return 0, failed
        self._refusals.resolve("etcd accepts requests again")
        succeeded = [response.succeeded]
        if response.succeeded and count > 1:
            succeeded = [one.response_txn.succeeded for one in response.responses]
        if response.succeeded and not any(succeeded):
            await self.catch_up()
            return 0, failed
        await self._mirror.reached(response.header.revision)
        return response.header.revision, succeeded if response.succeeded else failed

    def _request(self, steps: Sequence[Transaction[Any]]) -> etcd_pb2.TxnRequest:
        guard = Transaction[None](self._facts, lambda _: None)
        guard.require_unchanged(self._facts.keys.base, self._facts.keys.session(self._session.name))
        if len(steps) == 1:
            compares = [*guard.compares, *steps[0].compares]
            changes = steps[0].changes
        else:
            compares = guard.compares
            changes = [
                etcd_pb2.RequestOp(
                    request_txn=etcd_pb2.TxnRequest(compare=step.compares, success=step.changes)
                )
                for step in steps
            ]
        # A failed transaction writes the barrier, so that there is an event to wait for. Nested
        # transactions do not: etcd refuses a transaction that could put a key twice.
        barrier = etcd_pb2.PutRequest(key=self._facts.keys.barrier)
        failure = [etcd_pb2.RequestOp(request_put=barrier)]
        return etcd_pb2.TxnRequest(compare=compares, success=changes, failure=failure)

    async def _fence(self, session_revision: int) -> None:
        """Write the session's key again, so that older transactions fail; wait for the event."""
        async with self._fencing:
            while self._facts.sessions.get(self._session.name) == session_revision:
                key = self._facts.keys.session(self._session.name)
                await self._write(key, b"", self._session.lease)

    async def _write(self, key: bytes, value: bytes, lease: int = 0) -> None:
        """Try once to write a key. The facts show whether it was written."""
        step = Transaction[None](self._facts, lambda _: None)
        step.put(key, value, lease)
        try:
            response = await self._client.txn(self._request([step]))
        except NoAnswerError:
            await asyncio.sleep(RETRY_PAUSE_S)
        except EtcdError as error:
            await self._after_refusal(error)
        else:
            await self._mirror.reached(response.header.revision)

    async def _after_refusal(self, error: EtcdError) -> None:
        """Wait until a refused transaction, which was not executed, can be tried again."""
        if error.code is grpc.StatusCode.NOT_FOUND:
            await self.catch_up()  # a lease has ended; wait until the facts show its end
        else:
            await self._report_refusal(error)

    async def _report_refusal(self, error: EtcdError) -> None:
        """Log the refusal and wait. An operator may have to extend the rights of the etcd user."""
        self._refusals.report(f"etcd refuses requests: {error.message}")
        await asyncio.sleep(RETRY_PAUSE_S)
