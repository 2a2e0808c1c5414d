"""A watch of keys in etcd that continues at another member when a member fails.

It yields every event once, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio

from duplane.fabric.repeated_log import RepeatedLog
from duplane.scheduler.etcd.client import (
    EtcdClient,
    EtcdError,
    NoAnswerError,
    end_of,
    is_token_refused,
)
from duplane.scheduler.etcd.endpoints import Endpoint
from duplane.scheduler.etcd.v3 import etcd_pb2

PROBE_INTERVAL_S = 0.8
_MISSED_PROBES = 2  # unanswered probes after which a member counts as hung
_MAX_LAG_S = 3.0  # a member that is further behind the cluster counts as failed
_PAUSE_S = 0.1  # between a failure and the call to the next member
_PATH = "/etcdserverpb.Watch/Watch"

_log = logging.getLogger(__name__)


class CompactedError(Exception):
    """etcd no longer has the next events.

    The caller must read all keys, and then begin a watch at the revision of this read.
    """


class OtherHistoryError(CompactedError):
    """Old revisions may have other values now.

    The members belong to another cluster, or the cluster has lost data or was restored.
    """


class _WatchFailedError(Exception):
    """A stream ended, and another member can continue it."""


class PrefixWatch:
    """The events of all keys with a prefix.

    The watch sends probes to the member that it reads from. If this member answers nothing for
    1.6 to 2.4 s, the watch continues at another member. The answer to a probe has the member's
    revision. If this revision is more than 3 s behind the revision of the cluster, the watch
    continues at another member, too.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: bytes,
        start_revision: int,
        cluster_id: int,
        on_current: Callable[[float], None],
    ) -> None:
        """Watch from `start_revision` on. The revision belongs to the cluster `cluster_id`.

        `on_current` is called with a time (of the event loop) when the watch has reached the
        revision that the cluster had at this time.
        """
        self._on_current = on_current
        self._reached = 0  # the highest revision that the member of the present stream has shown
        self._has_response = asyncio.Event()
        self.next_revision = start_revision  # events before this revision were delivered
        self._client = client
        self._cluster_id = cluster_id
        self._endpoints = client.open_endpoints()
        self._prefix = prefix
        self._answered_at = 0.0
        self._absence = RepeatedLog(_log)

    async def batches(self) -> AsyncGenerator[Sequence[etcd_pb2.Event]]:
        """Yield events in batches. All events of one revision are in the same batch.

        Raises CompactedError or OtherHistoryError.
        """
        failed: Endpoint | None = None
        while True:
            endpoint = self._endpoints.pick(failed)
            try:
                async with contextlib.aclosing(self._read(endpoint)) as batches:
                    async for batch in batches:
                        yield batch
            except _WatchFailedError as error:
                self._absence.report(f"the watch at {endpoint.address} failed: {error}")
                if is_token_refused(str(error)):
                    self._client.forget_token()
            self._endpoints.note_failure(endpoint)
            failed = endpoint
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close_endpoints(self._endpoints)

    async def _read(self, endpoint: Endpoint) -> AsyncGenerator[Sequence[etcd_pb2.Event]]:
        """Yield the events of one stream until it ends or its member hangs."""
        await self._check_history()
        call = await self._open(endpoint)
        self._answered_at = time.monotonic()
        self._reached = 0
        probing = asyncio.create_task(self._probe(call))
        comparing = asyncio.create_task(self._compare(call))
        try:
            await _write(call, self._create_request())
            while True:
                response = await _next(call)
                self._answered_at = time.monotonic()
                if response.canceled:
                    self._raise_canceled(response)
                self._endpoints.note_answer(endpoint)
                self._absence.resolve(f"watching at {endpoint.address}")
                first = bisect_left(response.events, self.next_revision, key=_revision_of)
                if events := response.events[first:]:
                    self.next_revision = _revision_of(events[-1]) + 1
                    self._answered_at = math.inf  # nothing is read while the events are applied
                    yield events
                    self._answered_at = time.monotonic()
                self._note_revision(response)
        finally:
            comparing.cancel()
            probing.cancel()
            call.cancel()

    async def _check_history(self) -> None:
        """Raise OtherHistoryError if etcd is another cluster, or has lost the last revision."""
        try:
            header = (await self._client.read(self._prefix, limit=1)).header
        except (EtcdError, NoAnswerError) as error:
            raise _WatchFailedError(str(error)) from error
        if header.cluster_id != self._cluster_id:
            raise OtherHistoryError(f"etcd is now the cluster {header.cluster_id:x}")
        if header.revision < self.next_revision - 1:
            was = self.next_revision - 1
            raise OtherHistoryError(f"etcd is at revision {header.revision}, after {was}")

    async def _open(self, endpoint: Endpoint) -> Any:
        try:
            metadata = await self._client.metadata()
        except (EtcdError, NoAnswerError) as error:
            raise _WatchFailedError(str(error)) from error
        return endpoint.channel.stream_stream(
            _PATH,
            request_serializer=etcd_pb2.WatchRequest.SerializeToString,
            response_deserializer=etcd_pb2.WatchResponse.FromString,
        )(metadata=metadata)

    def _create_request(self) -> etcd_pb2.WatchRequest:
        return etcd_pb2.WatchRequest(
            create_request=etcd_pb2.WatchCreateRequest(
                key=self._prefix,
                range_end=end_of(self._prefix),
                start_revision=self.next_revision,
            )
        )

    def _raise_canceled(self, response: etcd_pb2.WatchResponse) -> None:
        if response.compact_revision:
            raise CompactedError(f"compacted up to revision {response.compact_revision}")
        raise _WatchFailedError(response.cancel_reason or "cancelled")

    async def _probe(self, call: Any) -> None:
        """Send a probe at each interval; end the stream if no answer comes."""
        probe = etcd_pb2.WatchRequest(progress_request=etcd_pb2.WatchProgressRequest())
        while time.monotonic() - self._answered_at < _MISSED_PROBES * PROBE_INTERVAL_S:
            await asyncio.sleep(PROBE_INTERVAL_S)
            with contextlib.suppress(_WatchFailedError):  # `_read` raises the cause
                await _write(call, probe)
        call.cancel()

    def _note_revision(self, response: etcd_pb2.WatchResponse) -> None:
        if response.events:  # more events of older revisions than the header's may follow
            self._reached = _revision_of(response.events[-1])
        elif not response.created:
            self._reached = response.header.revision
        self._has_response.set()

    async def _compare(self, call: Any) -> None:
        """Compare the member with the cluster at intervals; end the stream if the member lags."""
        loop = asyncio.get_running_loop()
        while True:
            asked_at = loop.time()
            with contextlib.suppress(EtcdError, NoAnswerError):
                revision = (await self._client.read(self._prefix, limit=1)).header.revision
                while not await self._reaches(revision):
                    if self._answered_at != math.inf:
                        call.cancel()
                        return
                self._on_current(asked_at)
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _reaches(self, revision: int) -> bool:
        """Wait until the member has sent `revision` or a later one; return False if it lags."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_LAG_S):
                while self._reached < revision:
                    self._has_response.clear()
                    await self._has_response.wait()
                return True
        return False


def _revision_of(event: etcd_pb2.Event) -> int:
    return event.kv.mod_revision


async def _write(call: Any, request: etcd_pb2.WatchRequest) -> None:
    try:
        await call.write(request)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError) as error:
        raise _WatchFailedError(str(error)) from error
    except asyncio.CancelledError:
        _raise_unless_call_cancelled()


def _raise_unless_call_cancelled() -> NoReturn:
    """Raise CancelledError again if this task was cancelled, else _WatchFailedError.

    If this task was not cancelled, `_probe` or `_compare` has cancelled the call.
    """
    task = asyncio.current_task()
    if task and task.cancelling():
        raise
    raise _WatchFailedError("the member does not answer, or lags behind the cluster") from None


async def _next(call: Any) -> etcd_pb2.WatchResponse:
    try:
        response = await call.read()
    except grpc.aio.AioRpcError as error:
        raise _WatchFailedError(error.details()) from error
    except asyncio.CancelledError:
        _raise_unless_call_cancelled()
    if not isinstance(response, etcd_pb2.WatchResponse):
        raise _WatchFailedError("the member ended the stream")
    return response
