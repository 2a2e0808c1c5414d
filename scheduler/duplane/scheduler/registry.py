"""RegistryService: the workers that are attached, what they report and what they are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

from duplane.fabric.errors import FabricError, Reason, abort
from duplane.fabric.lease import LeaseSigner
from duplane.fabric.v1 import registry_pb2, registry_pb2_grpc
from duplane.scheduler.attachment import Attachment, Context
from duplane.scheduler.checks import check_register, check_report
from duplane.scheduler.feed import Feed
from duplane.scheduler.messages import duration, revoke
from duplane.scheduler.placement import Placement
from duplane.scheduler.policy import Place, Verdict, judge
from duplane.scheduler.settings import SchedulerSettings
from duplane.scheduler.store.base import (
    Change,
    End,
    Grant,
    GrantGone,
    GrantPut,
    LeaseStore,
    Worker,
    WorkerGone,
    WorkerPut,
)
from duplane.scheduler.view import View

_log = logging.getLogger(__name__)

_SILENT_INTERVALS = 3


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Keeps each worker's registration for as long as its stream lasts."""

    def __init__(
        self,
        settings: SchedulerSettings,
        store: LeaseStore,
        view: View,
        placement: Placement,
        feed: Feed,
        signer: LeaseSigner,
    ) -> None:
        self._settings = settings
        self._store = store
        self._view = view
        self._placement = placement
        self._feed = feed
        self._signer = signer
        self._attachments: dict[str, Attachment] = {}
        self._is_closed = False
        view.listeners.append(self._on_change)

    # The stubs know generators only; one that writes is ended where it waits.
    async def Attach(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        request_iterator: AsyncIterator[registry_pb2.AttachRequest],
        context: Context,
    ) -> None:
        try:
            register = await self._read_register(request_iterator)
            worker = await self._register(register)
            attachment = Attachment(worker)
            self._attachments[worker.worker_id] = attachment
            _log.info("worker %s attached: %d slots", worker.worker_id, len(register.slots))
            try:
                await self._converse(worker, attachment, request_iterator, context)
            finally:
                if self._attachments.get(worker.worker_id) is attachment:
                    del self._attachments[worker.worker_id]
                await self._store.unregister(worker.worker_id, worker.epoch)
                _log.info("worker %s detached", worker.worker_id)
        except FabricError as error:
            await abort(context, error)

    def close(self) -> None:
        """End every stream with UNAVAILABLE, and refuse new ones: workers attach elsewhere."""
        self._is_closed = True
        for attachment in self._attachments.values():
            attachment.end(Reason.UNAVAILABLE, "the scheduler is stopping")

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
        check_register(first.register)
        return first.register

    async def _register(self, register: registry_pb2.Register) -> Worker:
        if self._is_closed:
            raise FabricError(Reason.UNAVAILABLE, "the scheduler is stopping")
        if any(slot.fencing_number for slot in register.slots):
            self._placement.expect_returning()
        worker = await self._store.register(register)
        if worker is None:
            raise FabricError(
                Reason.WORKER_ATTACHED,
                f"another process is attached as {register.worker_id!r}",
                field="register.worker_id",
            )
        await self._settle_slots(worker, register.slots)
        return worker

    async def _converse(
        self,
        worker: Worker,
        attachment: Attachment,
        requests: AsyncIterator[registry_pb2.AttachRequest],
        context: Context,
    ) -> None:
        attachment.tell(registry_pb2.AttachResponse(registered=self._registered(worker)))
        try:
            async with asyncio.TaskGroup() as tasks:
                sides = (
                    tasks.create_task(attachment.send(context)),
                    tasks.create_task(attachment.fail()),
                    tasks.create_task(self._watch_silence(attachment)),
                )
                async for request in requests:
                    await self._take_report(attachment, request)
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
            verification_keys=[self._signer.verification_key],
            report_interval=duration(self._settings.report_interval_s),
        )

    async def _watch_silence(self, attachment: Attachment) -> None:
        """Stop granting from a worker whose reports are overdue; its next report undoes it."""
        patience_s = _SILENT_INTERVALS * self._settings.report_interval_s
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    await attachment.heard.wait()
            except TimeoutError:
                _log.warning("worker %s reports nothing", attachment.worker_id)
                if worker := self._current(attachment):
                    await self._store.report(_changed(worker, is_silent=True))
                await attachment.heard.wait()
            attachment.heard.clear()

    async def _take_report(
        self, attachment: Attachment, request: registry_pb2.AttachRequest
    ) -> None:
        if not request.HasField("report"):
            raise FabricError(Reason.OUT_OF_ORDER, "only reports may follow", field="report")
        worker, report = self._current(attachment), request.report
        if worker is None:
            return  # superseded, and about to be told so
        check_report(report, len(worker.register.slots))
        attachment.heard.set()
        attachment.is_told_to_drain |= report.is_draining
        self._feed.note_report(worker.worker_id, report)
        changed = _changed(worker, report)
        if changed != worker:
            await self._store.report(changed)
        else:
            self._feed.tell_worker(worker)
        await self._settle_slots(worker, report.slots)

    async def _settle_slots(self, worker: Worker, slots: Sequence[registry_pb2.SlotReport]) -> None:
        """Bring the grants into line with what the worker says of its slots."""
        for slot in slots:
            grant = self._view.grant_of(worker.worker_id, slot.slot)
            verdict = judge(grant, slot)
            if grant and verdict is Verdict.CLAIMED:
                await self._store.claim(grant)
            elif grant and verdict is Verdict.ENDED:
                await self._store.release(grant)
                verdict = judge(None, slot)
            if verdict is Verdict.UNKNOWN_LEASE and slot.lease_id not in self._view.grants:
                await self._store.adopt(_adopted(worker, slot))

    def _current(self, attachment: Attachment) -> Worker | None:
        worker = self._view.workers.get(attachment.worker_id)
        return worker if worker and worker.epoch == attachment.epoch else None

    def _on_change(self, change: Change, moved: Sequence[Place]) -> None:
        del moved
        match change:
            case WorkerPut(worker=worker) if worker.is_drain_wanted:
                self._tell_to_drain(worker)
            case WorkerGone(worker=worker):
                attachment = self._attachments.get(worker.worker_id)
                if attachment and attachment.epoch == worker.epoch:
                    attachment.end(Reason.SUPERSEDED, "the worker has attached again")
            case GrantPut(grant=grant) if grant.is_revoked:
                self._revoke(grant)
            case GrantGone(grant=grant, end=End.RETURNED | End.EXPIRED):
                self._revoke(grant)
            case _:
                pass

    def _tell_to_drain(self, worker: Worker) -> None:
        attachment = self._attachments.get(worker.worker_id)
        if attachment and not attachment.is_told_to_drain:
            attachment.is_told_to_drain = True
            attachment.tell(registry_pb2.AttachResponse(drain=registry_pb2.Drain()))

    def _revoke(self, grant: Grant) -> None:
        if attachment := self._attachments.get(grant.worker_id):
            attachment.tell(registry_pb2.AttachResponse(revoke=revoke(grant)))


def _changed(
    worker: Worker, report: registry_pb2.Report | None = None, *, is_silent: bool = False
) -> Worker:
    """Return a registration as its worker reports it now."""
    register = registry_pb2.Register()
    register.CopyFrom(worker.register)
    if report:
        del register.slots[:]
        register.slots.extend(report.slots)
        register.is_draining = report.is_draining
    return Worker(
        epoch=worker.epoch,
        register=register,
        is_draining=register.is_draining,
        is_drain_wanted=worker.is_drain_wanted,
        is_silent=is_silent,
    )


def _adopted(worker: Worker, slot: registry_pb2.SlotReport) -> Grant:
    """Return a lease as its worker tells of it."""
    return Grant(
        token=slot.fencing_number,
        lease_id=slot.lease_id,
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        slot=slot.slot,
        kind=slot.kind,
        session_id=slot.session_id,
        is_claimed=True,
    )
