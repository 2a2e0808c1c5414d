"""Keeps the worker attached to one of its schedulers: registers, reports, executes requests.

All schedulers of one store share its workers, so the worker is attached to only one of them at a
time. If this scheduler ends the stream or does not answer, the worker attaches to the next one.
While no scheduler can be reached, running sessions continue and granted leases stay valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import grpc.aio

from duplane.fabric.addresses import resolve
from duplane.fabric.channel import open_channel
from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason, from_rpc
from duplane.fabric.repeated_log import RepeatedLog
from duplane.fabric.tls.credentials import FabricCredentials
from duplane.fabric.tls.failures import TlsFailures
from duplane.fabric.tls.identity import Role
from duplane.fabric.v1 import registry_pb2, registry_pb2_grpc, session_pb2
from duplane.worker.admission import Admission
from duplane.worker.scheduler_health import first_serving

_log = logging.getLogger(__name__)

_SERVICE = registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name
_CONNECT_S = 0.5  # wait for a connection to one scheduler
_PAUSE_S = 0.1  # between two attempts, unless a scheduler has refused the worker
_MAX_PAUSE_S = 0.5  # before the worker asks which scheduler serves
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
_ANSWER_TIMEOUT_S = 10.0  # longest wait for `registered`
_LEAVE_TIMEOUT_S = 1.0  # longest wait for the scheduler after the last report
_MIN_REPORT_INTERVAL_S = 0.05  # lower bound of the interval that the scheduler asks for

Call = grpc.aio.StreamStreamCall[registry_pb2.AttachRequest, registry_pb2.AttachResponse]


@dataclass(frozen=True)
class AttachedWorker:
    """The parts of a worker that `AttachLoop` uses."""

    admission: Admission
    register: Callable[[], registry_pb2.Register]
    report: Callable[[], registry_pb2.Report]
    end_session: Callable[[int, session_pb2.CloseReason], None]
    drain: Callable[[], None]
    undrain: Callable[[], None]
    stop: Callable[[], None]


# Why a session of a void lease is closed, by `Revoke.is_end`.
_REVOKED = {
    False: session_pb2.CLOSE_REASON_REVOKED,
    True: session_pb2.CLOSE_REASON_OPERATOR,
}


class AttachLoop:
    """Attaches the worker to one scheduler after another, until it leaves."""

    def __init__(
        self,
        schedulers: Sequence[str],
        worker: AttachedWorker,
        credentials: FabricCredentials | None = None,
    ) -> None:
        """Attach `worker` to one of `schedulers`. A DNS name stands for all its addresses.

        With `credentials`, with mutual TLS.
        """
        self._schedulers = schedulers
        self._credentials = credentials
        self._tls_failures = TlsFailures(has_tls=credentials is not None)
        self._scheduler = ""  # address of the scheduler in use
        self._worker = worker
        self._changed = asyncio.Event()
        self._is_attached = False
        self._is_leaving = False
        self._has_left = asyncio.Event()
        self._stream_numbers = itertools.count(1)
        self._absence = RepeatedLog(_log)

    def report_soon(self) -> None:
        """Send a report soon. A report has the whole state, so one covers many changes."""
        self._changed.set()

    async def leave(self) -> None:
        """Tell the scheduler that this process ends as planned, so that the worker is not lost.

        `run` then returns. The scheduler has a second to take the last report.
        """
        self._is_leaving = True
        self._changed.set()
        if self._is_attached:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    await self._has_left.wait()

    async def run(self) -> None:
        """Attach to a scheduler; whenever the stream breaks, attach to the next one.

        When all addresses have been tried in vain, the loop waits for a limited time until a
        scheduler says that it accepts calls. If a scheduler accepts calls but refuses the worker,
        the loop pauses. Both times grow with each pass over the addresses without success.
        """
        failure_count = 0
        backoff_s = FIRST_BACKOFF_S
        index = random.getrandbits(16)  # random, so that the workers use all schedulers
        while not self._is_leaving:
            addresses = await resolve(self._schedulers)
            self._scheduler = addresses[index % len(addresses)]
            async with open_channel(self._scheduler, Role.SCHEDULER, self._credentials) as channel:
                await _connect(channel, _CONNECT_S)
                was_registered, failure = await self._attempt(channel)
            if self._is_leaving:
                break
            failure_count = 0 if was_registered else failure_count + 1
            peer = f"{Role.SCHEDULER} {self._scheduler}"
            self._tls_failures.note(peer, failure, is_new=not was_registered)
            self._absence.report(f"not attached at {self._scheduler}: {failure}")
            index += 1
            round_count, tried_count = divmod(failure_count, len(addresses))
            backoff_s = min(FIRST_BACKOFF_S * 2 ** min(round_count, 10), MAX_BACKOFF_S)
            is_refused = not was_registered and failure.reason is not Reason.UNAVAILABLE
            is_round_over = round_count > 0 and tried_count == 0 and not is_refused
            pause_s = min(backoff_s, _MAX_PAUSE_S) if is_round_over else _PAUSE_S
            await asyncio.sleep((backoff_s if is_refused else pause_s) * random.uniform(0.5, 1.0))
            if is_round_over and (one := await self._first_serving(addresses, backoff_s)):
                index = addresses.index(one)
        self._has_left.set()

    async def _first_serving(self, addresses: Sequence[str], timeout_s: float) -> str | None:
        return await first_serving(addresses, _SERVICE, timeout_s, self._credentials)

    async def _attempt(self, channel: grpc.aio.Channel) -> tuple[bool, FabricError]:
        """Attach once. Return whether the worker was registered, and why the stream ended."""
        call: Call = registry_pb2_grpc.RegistryServiceStub(channel).Attach()
        is_registered = False
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                interval_s = await self._register(call)
            is_registered = self._is_attached = True
            async with asyncio.TaskGroup() as tasks:
                reports = tasks.create_task(self._report(call, interval_s))
                failure = await self._obey(call)
                reports.cancel()
        except TimeoutError:
            failure = FabricError(Reason.UNAVAILABLE, "the scheduler does not answer")
        except grpc.aio.AioRpcError as error:
            failure = from_rpc(error)
        except FabricError as error:
            failure = error
        except Exception:  # noqa: BLE001 - the root of a task, which must re-attach after any error
            _log.exception("the attach stream to %s failed", self._scheduler)
            failure = FabricError(Reason.UNKNOWN, "an internal error")
        finally:
            call.cancel()
            self._is_attached = False
            self._worker.admission.detach(time.monotonic())
        return is_registered, failure

    async def _register(self, call: Call) -> float:
        """Register the worker; return the report interval in seconds."""
        register = self._worker.register()
        register.stream_number = next(self._stream_numbers)
        request = registry_pb2.AttachRequest(register=register)
        # If the call has ended, `write` raises an error without the reason. `read` then raises one
        # with the reason.
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.write(request)
        response = await call.read()
        if not isinstance(response, registry_pb2.AttachResponse) or not response.HasField(
            "registered"
        ):
            raise FabricError(Reason.OUT_OF_ORDER, "the scheduler does not answer with registered")
        registered = response.registered
        self._accept(registered)
        self._absence.resolve(f"attached again at {self._scheduler}")
        _log.info(
            "worker %s attached at %s, epoch %d",
            *(register.worker_id, self._scheduler, registered.worker_epoch),
        )
        return max(to_seconds(registered.report_interval), _MIN_REPORT_INTERVAL_S)

    def _accept(self, registered: registry_pb2.Registered) -> None:
        self._worker.admission.register(
            registered.worker_epoch, registered.verification_keys, time.monotonic()
        )

    async def _report(self, call: Call, interval_s: float) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                self._changed.clear()
                report = self._worker.report()
                report.is_leaving = self._is_leaving
                await call.write(registry_pb2.AttachRequest(report=report))
                if report.is_leaving:
                    await call.done_writing()
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await self._changed.wait()

    async def _obey(self, call: Call) -> FabricError:
        """Execute the scheduler's requests until the stream ends. Return the reason of the end."""
        try:
            while True:
                response = await call.read()
                if not isinstance(response, registry_pb2.AttachResponse):
                    return FabricError(Reason.UNAVAILABLE, "the scheduler ended the stream")
                self._execute(response)
        except grpc.aio.AioRpcError as error:
            return from_rpc(error)

    def _execute(self, response: registry_pb2.AttachResponse) -> None:
        match response.WhichOneof("message"):
            case "drain" if response.drain.is_stop:
                _log.info("an operator stops this worker, through %s", self._scheduler)
                self._worker.stop()
            case "drain":
                _log.info("an operator drains this worker, through %s", self._scheduler)
                self._worker.drain()
            case "undrain":
                _log.info("an operator takes the drain back, through %s", self._scheduler)
                self._worker.undrain()
            case "revoke":
                revoke = response.revoke
                if self._worker.admission.revoke(
                    revoke.slot, revoke.fencing_number, revoke.lease_id
                ):
                    self._worker.end_session(revoke.slot, _REVOKED[revoke.is_end])
            case "registered":
                self._accept(response.registered)
            case "progress":
                number = response.progress.fencing_number
                self._worker.admission.note_progress(number, time.monotonic())
            case None:
                pass  # an unknown message of a newer scheduler
            case unknown:
                assert_never(unknown)


async def _connect(channel: grpc.aio.Channel, timeout_s: float) -> None:
    """Wait until the channel is connected, but at most `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
