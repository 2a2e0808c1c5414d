"""The worker's presence at one scheduler: attach, report, obey, and come back for ever.

Fails static: with no scheduler to reach, running sessions go on and leases already told stay good.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import grpc.aio

from duplane.fabric.channel import open_channel
from duplane.fabric.errors import FabricError, Reason, from_rpc
from duplane.fabric.v1 import registry_pb2, registry_pb2_grpc, session_pb2
from duplane.worker.admission import Admission

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_ANSWER_TIMEOUT_S = 10.0  # for `registered`
_MIN_REPORT_INTERVAL_S = 0.05  # whatever the scheduler says

Call = grpc.aio.StreamStreamCall[registry_pb2.AttachRequest, registry_pb2.AttachResponse]


@dataclass(frozen=True)
class Presence:
    """What an attachment shows of the worker, and what it may ask of it."""

    admission: Admission
    register: Callable[[], registry_pb2.Register]
    report: Callable[[], registry_pb2.Report]
    end_session: Callable[[int, session_pb2.CloseReason], None]


class Attachment:
    """One worker at one scheduler. Call `tell` after every change; `run` never returns."""

    def __init__(self, scheduler: str, presence: Presence) -> None:
        self._scheduler = scheduler
        self._presence = presence
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Report soon. Several changes may share one report: it says everything."""
        self._changed.set()

    async def run(self) -> None:
        """Attach, and attach again whenever the stream breaks."""
        backoff_s = _FIRST_BACKOFF_S
        channel = open_channel(self._scheduler)
        try:
            while True:
                was_registered, why = await self._attempt(channel)
                if was_registered:
                    backoff_s = _FIRST_BACKOFF_S
                _log.warning("not attached at %s: %s", self._scheduler, why)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)
        finally:
            await channel.close()

    async def _attempt(self, channel: grpc.aio.Channel) -> tuple[bool, str]:
        """Attach once; return whether it worked, and why it is over."""
        call: Call = registry_pb2_grpc.RegistryServiceStub(channel).Attach()
        is_registered = False
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                interval_s = await self._register(call)
            is_registered = True
            async with asyncio.TaskGroup() as tasks:
                reports = tasks.create_task(self._report(call, interval_s))
                why = await self._obey(call)
                reports.cancel()
        except TimeoutError:
            why = "it does not answer"
        except grpc.aio.AioRpcError as error:
            why = str(from_rpc(error))
        except FabricError as error:
            why = str(error)
        except Exception:  # noqa: BLE001 - a task root: our presence must outlive our mistakes
            _log.exception("attachment at %s failed", self._scheduler)
            why = "a fault of our own"
        finally:
            call.cancel()
        return is_registered, why

    async def _register(self, call: Call) -> float:
        """Make ourselves known; return the interval to report at, in seconds."""
        request = registry_pb2.AttachRequest(register=self._presence.register())
        # grpc.aio tells why only through read() or code(), once a call has ended.
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.write(request)
        response = await call.read()
        if not isinstance(response, registry_pb2.AttachResponse) or not response.HasField(
            "registered"
        ):
            raise FabricError(Reason.OUT_OF_ORDER, "it does not begin with registered")
        registered = response.registered
        self._presence.admission.register(
            self._scheduler, registered.worker_epoch, registered.verification_keys
        )
        _log.info("attached at %s, epoch %d", self._scheduler, registered.worker_epoch)
        interval_s = registered.report_interval.ToTimedelta().total_seconds()
        return max(interval_s, _MIN_REPORT_INTERVAL_S)

    async def _report(self, call: Call, interval_s: float) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                self._changed.clear()
                await call.write(registry_pb2.AttachRequest(report=self._presence.report()))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await self._changed.wait()

    async def _obey(self, call: Call) -> str:
        """Do what the scheduler says until its stream ends; return why it ended."""
        try:
            while True:
                response = await call.read()
                if not isinstance(response, registry_pb2.AttachResponse):
                    return "it ended the stream"
                self._do(response)
        except grpc.aio.AioRpcError as error:
            return str(from_rpc(error))

    def _do(self, response: registry_pb2.AttachResponse) -> None:
        match response.WhichOneof("message"):
            case "drain":
                _log.info("%s asks to drain", self._scheduler)
                self._presence.admission.drain()
            case "revoke":
                revoke = response.revoke
                if self._presence.admission.revoke(
                    revoke.slot, revoke.fencing_number, revoke.lease_id
                ):
                    self._presence.end_session(revoke.slot, session_pb2.CLOSE_REASON_REVOKED)
            case "registered":
                registered = response.registered
                self._presence.admission.register(
                    self._scheduler, registered.worker_epoch, registered.verification_keys
                )
            case None:
                pass  # a message of a newer scheduler
            case unknown:
                assert_never(unknown)
