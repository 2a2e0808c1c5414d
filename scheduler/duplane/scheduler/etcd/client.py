"""Calls to an etcd cluster. Each call has a time limit; only idempotent requests are repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from duplane.scheduler.etcd.credentials import Credentials
from duplane.scheduler.etcd.endpoints import Endpoint, Endpoints
from duplane.scheduler.etcd.v3 import etcd_pb2

CALL_TIMEOUT_S = 0.7  # shorter than an election with etcd's default settings (1 s or more)
_RETRY_PAUSE_S = 0.05
_PAGE_LENGTH = 1000  # keys that one call of `read_all` reads

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Metadata = tuple[tuple[str, str], ...]
# With this header, a member without a leader refuses a call immediately instead of delaying it.
_NEEDS_LEADER: Metadata = (("hasleader", "true"),)


class EtcdError(Exception):
    """etcd has refused a request and did not execute it."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"etcd: {message}")
        self.code = code
        self.message = message


class NoAnswerError(Exception):
    """No member answered in time. The request may have been executed, or may be executed later."""


class FullError(NoAnswerError):
    """The database of etcd exceeds its quota. The request may have been executed nevertheless."""


@dataclass(frozen=True)
class _Method(Generic[Request, Response]):
    """A method of etcd that takes one request and returns one response."""

    path: str
    request: type[Request]
    response: type[Response]

    def on(self, channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable[Request, Response]:
        return channel.unary_unary(
            self.path,
            request_serializer=self.request.SerializeToString,
            response_deserializer=self.response.FromString,
        )


_RANGE = _Method("/etcdserverpb.KV/Range", etcd_pb2.RangeRequest, etcd_pb2.RangeResponse)
_PUT = _Method("/etcdserverpb.KV/Put", etcd_pb2.PutRequest, etcd_pb2.PutResponse)
_DELETE = _Method(
    "/etcdserverpb.KV/DeleteRange", etcd_pb2.DeleteRangeRequest, etcd_pb2.DeleteRangeResponse
)
_TXN = _Method("/etcdserverpb.KV/Txn", etcd_pb2.TxnRequest, etcd_pb2.TxnResponse)
_GRANT = _Method(
    "/etcdserverpb.Lease/LeaseGrant", etcd_pb2.LeaseGrantRequest, etcd_pb2.LeaseGrantResponse
)
_REVOKE = _Method(
    "/etcdserverpb.Lease/LeaseRevoke", etcd_pb2.LeaseRevokeRequest, etcd_pb2.LeaseRevokeResponse
)
_TIME_TO_LIVE = _Method(
    "/etcdserverpb.Lease/LeaseTimeToLive",
    etcd_pb2.LeaseTimeToLiveRequest,
    etcd_pb2.LeaseTimeToLiveResponse,
)
_AUTHENTICATE = _Method(
    "/etcdserverpb.Auth/Authenticate", etcd_pb2.AuthenticateRequest, etcd_pb2.AuthenticateResponse
)
_STATUS = _Method(
    "/etcdserverpb.Maintenance/Status", etcd_pb2.StatusRequest, etcd_pb2.StatusResponse
)

# If a call fails with one of these codes, etcd may have executed the request or not.
# RESOURCE_EXHAUSTED means that etcd is full, or has too many requests. A member whose database
# exceeds its quota with a request executes the request, and nevertheless reports this code.
_AMBIGUOUS = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
)
# Codes with which etcd refuses all writes of a client until an operator has changed something.
_LASTING = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.DATA_LOSS,
)


class EtcdClient:
    """A client of one cluster. Raises `EtcdError` or `NoAnswerError`, never `AioRpcError`.

    `has_refused` is set when etcd has refused a request for a reason that may last.
    """

    def __init__(self, addresses: Sequence[str], credentials: Credentials | None = None) -> None:
        self._addresses = addresses
        self._credentials = credentials or Credentials()
        self._token = ""
        self._authenticating = asyncio.Lock()
        self.has_refused = asyncio.Event()
        self._opened: list[Endpoints] = []
        self.endpoints = self.open_endpoints()

    def open_endpoints(self) -> Endpoints:
        """Return new channels to all members, for calls that must not wait behind other calls."""
        endpoints = Endpoints(self._addresses, self._credentials.tls)
        self._opened.append(endpoints)
        return endpoints

    def use(self, credentials: Credentials) -> None:
        """Use other credentials for new calls. Running calls continue."""
        if (credentials.user, credentials.password) != (
            self._credentials.user,
            self._credentials.password,
        ):
            self._token = ""
        self._credentials = credentials
        for endpoints in self._opened:
            endpoints.renew(credentials.tls)

    async def close_endpoints(self, endpoints: Endpoints) -> None:
        """Close channels that `open_endpoints` opened."""
        self._opened.remove(endpoints)
        await endpoints.close()

    async def close(self) -> None:
        """Close every connection."""
        for endpoints in self._opened:
            await endpoints.close()

    async def read(
        self, key: bytes, range_end: bytes = b"", limit: int = 0, revision: int = 0
    ) -> etcd_pb2.RangeResponse:
        """Read keys. The read is linearizable: it sees every write that has been confirmed."""
        request = etcd_pb2.RangeRequest(
            key=key, range_end=range_end, limit=limit, revision=revision
        )
        return await self._repeat(_RANGE, request)

    async def read_all(
        self, prefix: bytes
    ) -> tuple[etcd_pb2.ResponseHeader, Sequence[etcd_pb2.KeyValue]]:
        """Return a header, and all keys with this prefix as they were at the header's revision."""
        end = end_of(prefix)
        page = await self.read(prefix, end, _PAGE_LENGTH)
        header = page.header
        found = list(page.kvs)
        while page.more:
            page = await self.read(page.kvs[-1].key + b"\0", end, _PAGE_LENGTH, header.revision)
            found += page.kvs
        return header, found

    async def txn(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        """Execute a transaction, without a second attempt."""
        return await self._call(_TXN, request)

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """Set a key, without a second attempt; return the revision that etcd has then."""
        request = etcd_pb2.PutRequest(key=key, value=value, lease=lease)
        return (await self._call(_PUT, request)).header.revision

    async def delete(self, key: bytes, range_end: bytes = b"") -> int:
        """Delete keys, without a second attempt; return how many existed."""
        request = etcd_pb2.DeleteRangeRequest(key=key, range_end=range_end)
        return (await self._call(_DELETE, request)).deleted

    async def grant_lease(self, lease: int, ttl_s: int) -> None:
        """Make a lease with the unused id `lease`. Repeating the call changes nothing."""
        try:
            await self._repeat(_GRANT, etcd_pb2.LeaseGrantRequest(ID=lease, TTL=ttl_s))
        except EtcdError as error:
            if "already exists" not in error.message:
                raise

    async def revoke_lease(self, lease: int) -> None:
        """End a lease and delete its keys. Does nothing if the lease has ended."""
        try:
            await self._repeat(_REVOKE, etcd_pb2.LeaseRevokeRequest(ID=lease))
        except EtcdError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise

    async def lease_ttl_s(self, lease: int, avoided: str = "") -> int:
        """Return the seconds that a lease has left, or -1 if the lease has ended.

        The member at the address `avoided` is asked only if there is no other member.
        """
        request = etcd_pb2.LeaseTimeToLiveRequest(ID=lease)
        answer = await self._repeat(_TIME_TO_LIVE, request, self.endpoints.find(avoided))
        return answer.TTL

    async def alarms(self) -> Sequence[str]:
        """Return the cluster's alarms. While there is one, etcd refuses writes."""
        status = await self._repeat(_STATUS, etcd_pb2.StatusRequest())
        return [error.strip() for error in status.errors if "alarm:" in error]

    async def metadata(self) -> Metadata:
        """Return the metadata that authenticates a call."""
        if self._credentials.user and not self._token:
            await self._authenticate("")
        return (*_NEEDS_LEADER, ("token", self._token)) if self._token else _NEEDS_LEADER

    def forget_token(self) -> None:
        """Drop a token that etcd has refused. The next call authenticates again."""
        self._token = ""

    async def _repeat(
        self,
        method: _Method[Request, Response],
        request: Request,
        avoided: Endpoint | None = None,
    ) -> Response:
        """Send an idempotent request to one member after another until a member answers."""
        for _ in range(len(self.endpoints)):
            try:
                return await self._call(method, request, avoided)
            except NoAnswerError:
                await asyncio.sleep(_RETRY_PAUSE_S)
        return await self._call(method, request, avoided)

    async def _call(
        self,
        method: _Method[Request, Response],
        request: Request,
        avoided: Endpoint | None = None,
    ) -> Response:
        try:
            return await self._send(method, request, await self.metadata(), avoided)
        except EtcdError as error:
            if not is_token_refused(error.message):
                raise
        await self._authenticate(self._token)
        return await self._send(method, request, await self.metadata(), avoided)

    async def _send(
        self,
        method: _Method[Request, Response],
        request: Request,
        metadata: Metadata,
        avoided: Endpoint | None = None,
    ) -> Response:
        endpoint = self.endpoints.pick(avoided)
        try:
            response = await method.on(endpoint.channel)(
                request, timeout=CALL_TIMEOUT_S, metadata=metadata
            )
        except grpc.aio.AioRpcError as error:
            message = error.details() or ""
            if error.code() in _LASTING:
                self.has_refused.set()
            if error.code() in _AMBIGUOUS:
                self.endpoints.note_failure(endpoint)
                failure = FullError if "space exceeded" in message else NoAnswerError
                raise failure(f"{endpoint.address}: {message}") from error
            self.endpoints.note_answer(endpoint)
            raise EtcdError(error.code(), message) from error
        self.endpoints.note_answer(endpoint)
        return response

    async def _authenticate(self, refused: str) -> None:
        """Get a new token, unless another call has already replaced the refused token."""
        async with self._authenticating:
            if self._token == refused:
                request = etcd_pb2.AuthenticateRequest(
                    name=self._credentials.user, password=self._credentials.password
                )
                self._token = (await self._send(_AUTHENTICATE, request, _NEEDS_LEADER)).token


def is_token_refused(message: str) -> bool:
    """True if etcd refused a token, because it is too old or a user or role has changed since."""
    return "invalid auth token" in message or "auth store is old" in message


def end_of(prefix: bytes) -> bytes:
    """Return the `range_end` that selects all keys with `prefix`, which must not end with 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
