"""RegistryService: the streams with which workers attach and report."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from duplane.fabric.durations import to_duration
from duplane.fabric.errors import FabricError, Reason, abort
from duplane.fabric.tls.peers import peer_identity
from duplane.fabric.v1 import lease_pb2, registry_pb2, registry_pb2_grpc
from duplane.scheduler import revisions, wall_clock
from duplane.scheduler.messages import revoke
from duplane.scheduler.policy.slot_reports import Verdict, judge
from duplane.scheduler.rpc.worker_stream import Context, WorkerStream
from duplane.scheduler.settings import SchedulerSettings
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.base import (
    Change,
    DrainRequest,
    Grant,
    GrantEnd,
    GrantGone,
    GrantPut,
    LeaseStore,
    Worker,
    WorkerGone,
    WorkerPut,
)
from duplane.scheduler.validation import check_reachable, check_register, check_report
from duplane.scheduler.watch import Watch

_log = logging.getLogger(__name__)

_SILENT_INTERVALS = 3  # a worker is silent after this many intervals without a report
_MAX_REPEATED_REVOKES = 64  # maximum number of revokes that are repeated at once


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Keeps each worker registered as long as its stream lasts."""

    def __init__(
        self,
        settings: SchedulerSettings,
        store: LeaseStore,
        state: SchedulerState,
        watch: Watch,
        wall_ms: Callable[[], int] = wall_clock.now_ms,
    ) -> None:
        self._settings = settings
        self._wall_ms = wall_ms
        self._store = store
        self._state = state
        self._watch = watch
        self._streams: dict[str, WorkerStream] = {}  # by worker id
        self._why_refused = ""
        self._keys: Sequence[registry_pb2.VerificationKey] = ()
        store.watch_keys(self._on_keys)
        state.listeners.append(self._on_change)

    # This method writes its responses and does not yield them, so that a cancelled stream stops
    # immediately.
    async def Attach(  # pyright: ignore[reportIncompatibleMethodOverride]  # stubs: yields
        self,
        request_iterator: AsyncIterator[registry_pb2.AttachRequest],
        context: Context,
    ) -> None:
        try:
            register = await self._read_register(request_iterator)
            _check_name(register.worker_id, context)
            check_reachable(register.address, context.peer())
            worker = await self._register(register)
            stream = WorkerStream(worker)
            try:
                self._require_accepted()
                if self._current(stream) is None:  # a later stream may have replaced this one
                    raise FabricError(Reason.SUPERSEDED, "the worker has attached again")
                # From now on slots may be granted, so `_revoke` needs the stream from now on.
                self._streams[worker.worker_id] = stream
                name, address = worker.worker_id, register.address
                _log.info("worker %s at %s attached: %d slots", name, address, len(register.slots))
                await self._exchange(worker, stream, request_iterator, context)
            finally:
                if self._streams.get(worker.worker_id) is stream:
                    del self._streams[worker.worker_id]
                with contextlib.suppress(FabricError):  # without contact, the store does it later
                    await self._store.unregister(worker.worker_id, worker.epoch)
                _log.info("worker %s detached", worker.worker_id)
        except FabricError as error:
            await abort(context, error)

    def refuse(self, why: str) -> None:
        """Refuse streams for the reason `why`, or accept streams again if `why` is empty.

        A refusal ends every open stream with UNAVAILABLE. The workers attach to another scheduler.
        """
        self._why_refused = why
        for stream in self._streams.values() if why else ():
            stream.fail(Reason.UNAVAILABLE, why)

    @property
    def _fencing_limit(self) -> int:
        return revisions.fencing_limit(self._state.revision, self._wall_ms())

    def _require_accepted(self) -> None:
        if self._why_refused:
            raise FabricError(Reason.UNAVAILABLE, self._why_refused)

    async def _read_register(
        self, requests: AsyncIterator[registry_pb2.AttachRequest]
    ) -> registry_pb2.Register:
        try:
            async with asyncio.timeout(self._settings.register_timeout_s):
                first = await anext(requests, None)
        except TimeoutError:
            first = None
        if first is None or not first.HasField("register"):
            raise FabricError(
                Reason.OUT_OF_ORDER, "the first message must be `register`", field="register"
            )
        check_register(first.register, self._fencing_limit)
        return first.register

    async def _register(self, register: registry_pb2.Register) -> Worker:
        self._require_accepted()
        worker = await self._store.register(register)
        if worker is None:
            raise FabricError(
                Reason.WORKER_ATTACHED,
                f"another process, or a later stream of this one, is {register.worker_id!r}",
                field="register.worker_id",
            )
        return worker

    async def _exchange(
        self,
        worker: Worker,
        stream: WorkerStream,
        requests: AsyncIterator[registry_pb2.AttachRequest],
        context: Context,
    ) -> None:
        stream.send(registry_pb2.AttachResponse(registered=self._registered(worker)))
        try:
            async with asyncio.TaskGroup() as tasks:
                sides = (
                    tasks.create_task(stream.write_messages(context)),
                    tasks.create_task(stream.raise_failure()),
                    tasks.create_task(self._watch_silence(stream)),
                )
                # Apply the slots of `register` first, then the reports in the order of arrival.
                await asyncio.gather(*self._settle(worker, worker.slots))
                stream.is_reading = True
                async for request in requests:
                    stream.is_reading = False
                    await self._apply_report(stream, request)
                    stream.is_reading = True
                for side in sides:
                    side.cancel()
        except ExceptionGroup as failed:
            ends, faults = failed.split(FabricError)
            if ends is None or faults:
                raise
            raise ends.exceptions[0] from None

    def _registered(self, worker: Worker) -> registry_pb2.Registered:
        return registry_pb2.Registered(
            worker_epoch=worker.epoch,
            verification_keys=self._keys,
            report_interval=to_duration(self._settings.report_interval_s),
        )

    async def _watch_silence(self, stream: WorkerStream) -> None:
        """Mark a worker as silent while its reports are overdue. Silent workers get no grants."""
        overdue_s = _SILENT_INTERVALS * self._settings.report_interval_s
        while True:
            try:
                async with asyncio.timeout(overdue_s):
                    await stream.has_report.wait()
            except TimeoutError:
                if not stream.is_reading:  # its reports wait behind one that the store delays
                    continue
                _log.warning("worker %s sends no reports: no grants", stream.worker_id)
                if worker := self._current(stream):
                    await self._store.report(replace(worker, is_silent=True))
                await stream.has_report.wait()
            stream.has_report.clear()

    async def _apply_report(
        self, stream: WorkerStream, request: registry_pb2.AttachRequest
    ) -> None:
        if not request.HasField("report"):
            raise FabricError(Reason.OUT_OF_ORDER, "only reports may follow", field="report")
        worker = self._current(stream)
        report = request.report
        if worker is None:
            return  # superseded: this stream is about to end
        check_report(report, len(worker.slots), self._fencing_limit)
        stream.has_report.set()
        self._announce_progress(stream, report.slots)
        self._watch.note_report(worker.worker_id, report)
        changes = self._settle(worker, report.slots)
        changed = replace(
            worker,
            slots=tuple(report.slots),
            is_draining=report.is_draining,
            is_silent=False,
            is_leaving=report.is_leaving,
        )
        if changed != worker:
            changes.append(self._store.report(changed))
        else:
            self._watch.publish_worker(worker)
        await asyncio.gather(*changes)

    def _announce_progress(
        self, stream: WorkerStream, slots: Sequence[registry_pb2.SlotReport]
    ) -> None:
        """Send the highest fencing number of the fabric, and repeat revokes of unseen numbers.

        Does nothing if the last such message is younger than half the report interval.
        """
        now = self._state.clock()
        if now >= stream.progress_due:
            stream.progress_due = now + self._settings.report_interval_s / 2
            progress = registry_pb2.Progress(fencing_number=self._state.revision)
            stream.send(registry_pb2.AttachResponse(progress=progress))
            self._repeat_revokes(stream, slots)

    def _repeat_revokes(
        self, stream: WorkerStream, slots: Sequence[registry_pb2.SlotReport]
    ) -> None:
        """Repeat the revokes of void fencing numbers that the worker has not seen.

        Until the worker has seen the void number of a slot, the slot is not granted. No session has
        such a number, so these messages name no lease. If there are more revokes than the limit,
        the others wait for a later report.
        """
        numbers = ((slot, self._state.void_number(stream.worker_id, slot.slot)) for slot in slots)
        unseen = ((slot.slot, number) for slot, number in numbers if slot.fencing_number < number)
        for index, number in itertools.islice(unseen, _MAX_REPEATED_REVOKES):
            repeated = registry_pb2.Revoke(slot=index, fencing_number=number)
            stream.send(registry_pb2.AttachResponse(revoke=repeated))

    def _settle(
        self, worker: Worker, slots: Sequence[registry_pb2.SlotReport]
    ) -> list[Coroutine[Any, Any, bool]]:
        """Return one coroutine for each grant that has to be updated from the worker's report.

        The caller runs them together, so that the store can make the updates in one step. If two
        slots name the same lease, the second slot waits for the next report.
        """
        updates: dict[str | int, Coroutine[Any, Any, bool]] = {}
        for slot in slots:
            key = slot.lease_id or slot.slot
            grant = self._state.grant_of(worker.worker_id, slot.slot)
            if key not in updates and judge(grant, slot) is not Verdict.NOTHING:
                updates[key] = self._settle_slot(worker, slot)
        return list(updates.values())

    async def _settle_slot(self, worker: Worker, slot: registry_pb2.SlotReport) -> bool:
        """Update the grant of a slot from the worker's report. Returns False if nothing changed."""
        grant = self._state.grant_of(worker.worker_id, slot.slot)
        verdict = judge(grant, slot)
        has_changed = False
        if grant and verdict is Verdict.CLAIMED:
            has_changed = await self._store.claim(grant)
        elif grant and verdict is Verdict.ENDED:
            has_changed = await self._store.release(grant)
            verdict = judge(None, slot)
        if verdict is Verdict.UNKNOWN_LEASE and slot.lease_id not in self._state.grants:
            has_changed = await self._store.adopt(_adopted(worker, slot))
        return has_changed

    def _current(self, stream: WorkerStream) -> Worker | None:
        worker = self._state.workers.get(stream.worker_id)
        return worker if worker and worker.epoch == stream.epoch else None

    def _on_keys(self, keys: Sequence[registry_pb2.VerificationKey]) -> None:
        """Send the keys of all schedulers to every worker, in another `registered` message."""
        self._keys = keys
        for stream in self._streams.values():
            if worker := self._current(stream):
                stream.send(registry_pb2.AttachResponse(registered=self._registered(worker)))

    def _on_change(self, change: Change) -> None:
        match change:
            case WorkerPut(worker=worker) if worker.drain_request is not DrainRequest.NONE:
                self._send_drain(worker)
            case WorkerGone(worker=worker):
                stream = self._streams.get(worker.worker_id)
                if stream and stream.epoch == worker.epoch:
                    stream.fail(Reason.SUPERSEDED, "the worker has attached again")
            case GrantPut(grant=grant) if grant.is_revoked:
                self._revoke(grant)
            case GrantGone(grant=grant, end=GrantEnd.RETURNED | GrantEnd.EXPIRED):
                self._revoke(grant)
            case _:
                pass

    def _send_drain(self, worker: Worker) -> None:
        """Send what operators have asked last, unless it has been sent."""
        stream, request = self._streams.get(worker.worker_id), worker.drain_request
        if stream is None or stream.sent_request is request:
            return
        stream.sent_request = request
        if request is DrainRequest.UNDRAIN:
            stream.send(registry_pb2.AttachResponse(undrain=registry_pb2.Undrain()))
        else:
            drain = registry_pb2.Drain(is_stop=request is DrainRequest.STOP)
            stream.send(registry_pb2.AttachResponse(drain=drain))

    def _revoke(self, grant: Grant) -> None:
        if stream := self._streams.get(grant.claims.worker_id):
            stream.send(registry_pb2.AttachResponse(revoke=revoke(grant)))


def _check_name(worker_id: str, context: Context) -> None:
    """Check that the certificate of a worker allows its id. Raises FabricError."""
    caller = peer_identity(context)
    if caller and not caller.may_register_as(worker_id):
        raise FabricError(
            Reason.NOT_ALLOWED,
            f"the certificate is for {caller.name!r}, so worker_id must be this name or begin with"
            " it and a dash",
            field="register.worker_id",
        )


def _adopted(worker: Worker, slot: registry_pb2.SlotReport) -> Grant:
    """Return a grant for a lease that a worker reports and that has no grant in the store."""
    claims = lease_pb2.LeaseClaims(
        lease_id=slot.lease_id,
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        slot=slot.slot,
        fencing_number=slot.fencing_number,
        kind=slot.kind,
        session_id=slot.session_id,
        tenant_id=slot.tenant_id,
        holder=slot.holder,
    )
    return Grant(claims, is_claimed=True)
