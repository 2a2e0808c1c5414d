"""One worker process from start to end: load, serve, attach, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys

from duplane.fabric import process
from duplane.fabric.channel import FabricServer
from duplane.fabric.telemetry import Telemetry
from duplane.fabric.v1 import (
    lease_pb2,
    registry_pb2,
    session_pb2,
    session_pb2_grpc,
)
from duplane.worker.admission import Admission
from duplane.worker.attach import Attachment, Presence
from duplane.worker.device import TorchDevice
from duplane.worker.engine import Engine
from duplane.worker.rounds import Device, Model
from duplane.worker.sessions import Sessions, slot_reports
from duplane.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

_SERVICE = session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
_STOP_GRACE_S = 2.0  # for `closed` to reach clients once nothing runs any more
# The device thread is Python between its kernels; it must let the event loop in soon.
_SWITCH_INTERVAL_S = 0.0005


async def serve(
    settings: WorkerSettings,
    shutdown: process.Shutdown,
    device: Device | None = None,
    tracer: Telemetry | None = None,
) -> None:
    """Run one worker until `shutdown` asks to drain and its sessions have ended.

    Without `device` the checkpoint is loaded with torch. Cancelling ends the sessions at once.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    device = device or TorchDevice(settings)
    engine = Engine(
        device,
        memory_tolerance_bytes=settings.memory_tolerance_bytes,
        inbox_unit_count=settings.limits.inbox_unit_count,
    )
    tracer = tracer or Telemetry("worker")
    try:
        if await _load(engine, shutdown):
            await Worker(settings, device, engine, tracer).serve(shutdown)
    finally:
        await engine.stop()
        tracer.shutdown()


async def _load(engine: Engine, shutdown: process.Shutdown) -> bool:
    """Load the model; False when asked to stop meanwhile. Raises what loading raises."""
    try:
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(engine.start())
            stopping = tasks.create_task(shutdown.wait())
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            loading.cancel()
            stopping.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # only loading can fail
    return not shutdown.is_draining


class Worker:
    """The parts of a worker, wired together. The engine is loaded."""

    def __init__(
        self, settings: WorkerSettings, device: Device, engine: Engine, tracer: Telemetry
    ) -> None:
        self._settings = settings
        self._device = device
        self._engine = engine
        self._tracer = tracer
        self._incarnation = secrets.token_hex(16)
        self._address = ""
        self._idle = asyncio.Event()
        self._attachments: list[Attachment] = []
        self._server = FabricServer(_SERVICE)
        self._admission = Admission(
            settings.worker_id, engine.model.slot_count, _kinds(engine.model), self._on_change
        )
        self._idle.set()

    async def serve(self, shutdown: process.Shutdown) -> None:
        """Serve until drained. Raises, grouped, what ended the device thread."""
        async with asyncio.TaskGroup() as cleanups:
            sessions = Sessions(
                self._admission, self._engine, self._tracer, self._settings.limits, cleanups
            )
            session_pb2_grpc.add_SessionServiceServicer_to_server(sessions, self._server.grpc)
            bound = await self._server.start(self._settings.listen)
            self._address = self._settings.advertise or bound
            grace_s = 0.0
            try:
                process.announce("worker", bound)
                await self._run(sessions, shutdown)
                grace_s = _STOP_GRACE_S
            finally:
                sessions.stop()
                await self._server.stop(grace_s)

    async def _run(self, sessions: Sessions, shutdown: process.Shutdown) -> None:
        """Be present at every scheduler until asked to drain, and while draining."""
        presence = Presence(self._admission, self._register, sessions.report, sessions.end)
        self._attachments = [
            Attachment(scheduler, presence) for scheduler in self._settings.schedulers
        ]
        watch = self._engine.watch(self._settings.stuck_after_s, self._on_stuck)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(coroutine)
                for coroutine in (watch, *(attachment.run() for attachment in self._attachments))
            ]
            await shutdown.wait()
            await self._drain(sessions)
            for task in background:
                task.cancel()

    async def _drain(self, sessions: Sessions) -> None:
        """Let running sessions end by themselves for a while, then close them."""
        self._admission.drain()
        await self._until_idle(self._settings.drain_timeout_s)
        sessions.stop()
        await self._until_idle(_STOP_GRACE_S)

    async def _until_idle(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    def _on_change(self) -> None:
        for attachment in self._attachments:
            attachment.tell()
        if self._admission.is_idle:
            self._idle.set()
        else:
            self._idle.clear()

    async def _on_stuck(self, is_stuck: bool) -> None:
        if is_stuck:
            _log.critical("the device has not answered for %g s", self._settings.stuck_after_s)
        else:
            _log.warning("the device answers again")
        self._admission.set_stuck(is_stuck)
        await self._server.set_serving(not is_stuck)

    def _register(self) -> registry_pb2.Register:
        model = self._engine.model
        return registry_pb2.Register(
            worker_id=self._settings.worker_id,
            incarnation=self._incarnation,
            address=self._address,
            pool=self._settings.pool,
            device=self._device.description(),
            model=registry_pb2.Model(
                name=model.name,
                parameter_count=model.parameter_count,
                context_token_limit=model.context_capacity,
            ),
            kinds=self._admission.kinds,
            slots=slot_reports(self._admission),
            is_draining=self._admission.is_draining,
        )


def _kinds(model: Model) -> tuple[lease_pb2.SessionKind, ...]:
    """What the model can serve."""
    if model.sees_frames:
        return (lease_pb2.SESSION_KIND_AUDIO_DUPLEX, lease_pb2.SESSION_KIND_OMNI_DUPLEX)
    return (lease_pb2.SESSION_KIND_AUDIO_DUPLEX,)
