"""One worker process from start to end: load the model, serve, attach, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys

from duplane.fabric import process
from duplane.fabric.channel import CallLimits, FabricServer
from duplane.fabric.durations import to_duration
from duplane.fabric.exposure import warned_hourly
from duplane.fabric.monitoring.certificates import observe_certificates
from duplane.fabric.monitoring.health import Health, reported_health
from duplane.fabric.monitoring.publication import published
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.releases import WORKER_FEATURES, own_release
from duplane.fabric.settings import parse_labels
from duplane.fabric.tls.credentials import FabricCredentials, open_credentials
from duplane.fabric.tls.identity import Role
from duplane.fabric.v1 import (
    lease_pb2,
    model_pb2,
    registry_pb2,
)
from duplane.fabric.watched_files import reload_on_hangup, watching
from duplane.worker.admission import Admission, slot_reports
from duplane.worker.attach import AttachedWorker, AttachLoop
from duplane.worker.engine.device_thread import SWITCH_INTERVAL_S, DeviceThread
from duplane.worker.engine.engine import AnyEngine
from duplane.worker.engine.engine_process import EngineProcess
from duplane.worker.metrics import WorkerMetrics
from duplane.worker.models.families import open_device
from duplane.worker.models.interface import Device, DeviceLostError, LoadError, ModelConstants
from duplane.worker.session.copies import Copies
from duplane.worker.session.servicer import SERVICE, SessionServicer
from duplane.worker.settings import WorkerSettings
from duplane.worker.start_check import check_exposure, check_start

_log = logging.getLogger(__name__)

# Calls beside those with a slot: health checks, and calls whose lease is not checked yet.
_OTHER_CALLS = 1024
_OTHER_CALLS_PER_CONNECTION = 256
_STOP_GRACE_S = 2.0  # in which `closed` can reach clients after the last session has ended


async def serve(
    settings: WorkerSettings,
    shutdown: process.Shutdown,
    device: Device | None = None,
    tracer: Telemetry | None = None,
) -> None:
    """Run one worker until `shutdown` asks to drain and all sessions have ended.

    `device` replaces the device that the settings name. If this coroutine is cancelled, the
    sessions end immediately. Raises StartError if the model cannot be loaded, and FatalError if the
    device is lost.
    """
    warning = await check_exposure(settings)
    # Before the model is loaded, which may take minutes.
    credentials = open_credentials(settings.fabric, Role.WORKER)
    _check_worker_id(settings.worker_id, credentials)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if device is None:
        check_start(settings)
    async with (
        reported_health("worker", settings.health_listen, shutdown) as health,
        warned_hourly(warning),
    ):
        await _load_and_serve(settings, shutdown, health, device, tracer, credentials)


async def _load_and_serve(
    settings: WorkerSettings,
    shutdown: process.Shutdown,
    health: Health,
    device: Device | None,
    tracer: Telemetry | None,
    credentials: FabricCredentials | None,
) -> None:
    try:
        engine = _open_engine(settings, device)
    except LoadError as error:
        raise process.StartError(str(error)) from error
    tracer = tracer or Telemetry("worker")
    try:
        if await _load(engine, shutdown):
            worker = Worker(settings, engine, tracer, credentials)
            await worker.serve(shutdown, health)
    except LoadError as error:
        raise process.StartError(str(error)) from error
    except ExceptionGroup as failures:
        if failures.subgroup(DeviceLostError):
            raise process.FatalError("the device is lost, and with it this worker") from None
        raise
    finally:
        await engine.stop()
        tracer.shutdown()


def _open_engine(settings: WorkerSettings, device: Device | None) -> AnyEngine:
    """Return the engine of the settings. A given `device` is used in this process."""
    if device is None and settings.has_engine_process:
        return EngineProcess(open_device(settings), settings)
    return DeviceThread(device or open_device(settings), settings)


async def _load(engine: AnyEngine, shutdown: process.Shutdown) -> bool:
    """Load the model. Return False if a shutdown is requested meanwhile.

    Raises the exceptions of loading.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(engine.start())
            stopping = tasks.create_task(shutdown.wait())
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            loading.cancel()
            stopping.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # `loading` is the only task that can fail
    return not shutdown.is_draining


class Worker:
    """One worker: builds its parts and connects them. The model must be loaded already."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: AnyEngine,
        tracer: Telemetry,
        credentials: FabricCredentials | None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._tracer = tracer
        self._incarnation = secrets.token_hex(16)
        self._address = ""
        self._idle = asyncio.Event()
        self._attach_loop: AttachLoop | None = None
        self._credentials = credentials
        limits = _call_limits(engine.constants.slot_count)
        self._server = FabricServer(SERVICE, credentials=self._credentials, limits=limits)
        self._admission = Admission(
            settings.worker_id,
            engine.constants.slot_count,
            _kinds(engine.constants),
            self._on_change,
            latency_limit_s=settings.given_latency_limit_s,
        )
        self._copies = Copies(settings.copy_bytes, settings.copy_total_bytes, self._on_change)
        self._metrics = WorkerMetrics(
            self._admission,
            engine.constants,
            lambda: engine.memory_used_bytes,
            engine.description.memory_bytes,
            self._copies,
        )
        tracer.observe(self._metrics.registry)
        observe_certificates(
            self._metrics.registry, {"fabric": lambda: credentials.leaf if credentials else None}
        )
        self._idle.set()

    async def serve(self, shutdown: process.Shutdown, health: Health) -> None:
        """Serve until the drain has ended. Raises an ExceptionGroup if the device thread fails."""
        settings, registry = self._settings, self._metrics.registry
        files = self._credentials.watched_files if self._credentials else ()
        async with (
            published(registry, settings.metrics_listen),
            watching(files),
            asyncio.TaskGroup() as cleanups,
        ):
            sessions = SessionServicer(
                self._admission,
                self._engine,
                self._tracer,
                settings,
                cleanups,
                self._metrics,
                self._copies,
            )
            sessions.add_to(self._server.grpc)
            bound = await self._server.start(settings.listen)
            self._address = settings.advertise or bound
            grace_s = 0.0
            try:
                reload_on_hangup(files)
                admission = self._admission
                health.start(
                    accepts=lambda: not admission.is_draining,
                    answers=lambda: not admission.is_stuck,
                )
                process.announce("worker", bound)
                await self._run(sessions, shutdown)
                grace_s = _STOP_GRACE_S
            except Exception:
                grace_s = _STOP_GRACE_S  # `closed` must still reach the clients
                raise
            finally:
                sessions.stop()
                await self._server.stop(grace_s)

    async def _run(self, sessions: SessionServicer, shutdown: process.Shutdown) -> None:
        """Keep the worker attached until a drain is requested and has ended."""
        worker = AttachedWorker(
            self._admission,
            self._register,
            sessions.report,
            sessions.end,
            sessions.drain,
            sessions.undrain,
            shutdown.drain,
        )
        self._attach_loop = AttachLoop(self._settings.schedulers, worker, self._credentials)
        async with asyncio.TaskGroup() as tasks:
            background = (
                tasks.create_task(self._attach_loop.run()),
                tasks.create_task(self._watch(sessions)),
            )
            await shutdown.wait()
            await self._drain(sessions)
            await self._attach_loop.leave()
            for task in background:
                task.cancel()

    async def _watch(self, sessions: SessionServicer) -> None:
        """Watch the device thread. If it fails, close the sessions and raise its exception."""
        settings = self._settings
        try:
            await self._engine.watch(
                settings.stuck_after_s,
                settings.hung_after_s,
                lambda is_stuck: self._on_stuck(sessions, is_stuck),
            )
        except Exception as error:
            cause = str(error) if isinstance(error, DeviceLostError) else repr(error)
            _log.critical("worker %s: the device failed: %s", settings.worker_id, cause)
            self._admission.end()
            sessions.fail()
            raise

    async def _drain(self, sessions: SessionServicer) -> None:
        """Give running sessions time to move to another worker or to end, then close them."""
        timeout_s = self._settings.drain_timeout_s
        sessions.drain(timeout_s)
        await self._until_idle(timeout_s)
        if not self._admission.is_idle:
            held = [slot.session_id for slot in self._admission.slots if slot.lease_id]
            message = "the drain has waited for %g s; these sessions end with this worker: %s"
            _log.warning(message, timeout_s, ", ".join(held))
        sessions.stop()
        await self._until_idle(_STOP_GRACE_S)

    async def _until_idle(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    def _on_change(self) -> None:
        if self._attach_loop:
            self._attach_loop.report_soon()
        if self._admission.is_idle and not self._copies.are_needed:
            self._idle.set()
        else:
            self._idle.clear()

    async def _on_stuck(self, sessions: SessionServicer, is_stuck: bool) -> None:
        if is_stuck:
            _log.critical("the device has not answered for %g s", self._settings.stuck_after_s)
        else:
            _log.warning("the device answers again")
        sessions.set_stuck(is_stuck)
        await self._server.set_serving(not is_stuck)

    def _register(self) -> registry_pb2.Register:
        model, device = self._engine.constants, self._engine.description
        return registry_pb2.Register(
            worker_id=self._settings.worker_id,
            incarnation=self._incarnation,
            address=self._address,
            pool=self._settings.pool,
            labels={
                "model": model.name,
                "device": self._settings.device.partition(":")[0],
                **parse_labels(self._settings.labels, "labels"),
            },
            device=registry_pb2.Device(
                name=device.name,
                description=device.description,
                memory_bytes=device.memory_bytes,
            ),
            model=model_pb2.Model(
                name=model.name,
                parameter_count=model.parameter_count,
                context_token_limit=model.context_capacity,
                digest=model.digest,
                unit_duration=to_duration(model.unit_s),
                input_rate_hertz=model.input_hertz,
                output_rate_hertz=model.output_hertz,
                accepts_pictures=model.accepts_pictures,
                accepts_speech_requests=model.accepts_speech_requests,
            ),
            kinds=self._admission.kinds,
            slots=slot_reports(self._admission),
            is_draining=self._admission.is_draining,
            release=own_release(),
            features=WORKER_FEATURES,
        )


def _check_worker_id(worker_id: str, credentials: FabricCredentials | None) -> None:
    """Raise StartError if schedulers would refuse the worker's id with its certificate."""
    if credentials and not credentials.identity.may_register_as(worker_id):
        name = credentials.identity.name
        raise process.StartError(
            f"worker_id is {worker_id!r}, must be {name!r}, the name in the certificate, or begin"
            f" with '{name}-'"
        )


def _kinds(model: ModelConstants) -> list[lease_pb2.SessionKind]:
    """Return the session kinds that the model can serve."""
    kinds = [lease_pb2.SESSION_KIND_AUDIO_DUPLEX]
    if model.accepts_pictures:
        kinds.append(lease_pb2.SESSION_KIND_OMNI_DUPLEX)
    if model.has_chat:
        kinds.append(lease_pb2.SESSION_KIND_CHAT)
    return kinds


def _call_limits(slot_count: int) -> CallLimits:
    """Return how many calls a worker runs: those with a slot, and others until they are refused.

    One edge may have a call in every slot, and for each the next session's call that waits for the
    cleanup.
    """
    return CallLimits(4 * slot_count + _OTHER_CALLS, 2 * slot_count + _OTHER_CALLS_PER_CONNECTION)
