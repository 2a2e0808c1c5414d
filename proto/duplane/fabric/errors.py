"""Errors between processes: a reason for each, and the gRPC status code of each reason.

Between processes, an error is a gRPC status with exactly one `google.rpc.ErrorInfo` (AIP-193). In
Python, an error is a `FabricError`, in the server and in the client.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2 as _error_details  # pyright: ignore[reportMissingTypeStubs]  it ships none
from google.rpc import status_pb2 as _status  # pyright: ignore[reportMissingTypeStubs]  it ships none
from grpc_status import rpc_status as _rpc_status

# This generated module has no type stubs.
error_details_pb2: Any = _error_details
status_pb2: Any = _status
rpc_status: Any = _rpc_status

DOMAIN = "duplane"


class Reason(StrEnum):
    """Why a call failed, for programs."""

    INVALID_FIELD = "INVALID_FIELD"
    OUT_OF_ORDER = "OUT_OF_ORDER"
    QUEUE_FULL = "QUEUE_FULL"
    TENANT_QUOTA = "TENANT_QUOTA"
    KIND_NOT_SERVED = "KIND_NOT_SERVED"
    MODEL_NOT_SERVED = "MODEL_NOT_SERVED"
    TICKET_CANCELLED = "TICKET_CANCELLED"
    SUPERSEDED = "SUPERSEDED"
    UNKNOWN_WORKER = "UNKNOWN_WORKER"
    UNKNOWN_TICKET = "UNKNOWN_TICKET"
    UNKNOWN_SESSION = "UNKNOWN_SESSION"
    TOO_MANY_WATCHES = "TOO_MANY_WATCHES"
    WORKER_ATTACHED = "WORKER_ATTACHED"
    LEASE_FORGED = "LEASE_FORGED"
    LEASE_STALE = "LEASE_STALE"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    WRONG_WORKER = "WRONG_WORKER"
    WRONG_EPOCH = "WRONG_EPOCH"
    SLOT_OCCUPIED = "SLOT_OCCUPIED"
    OPEN_TIMEOUT = "OPEN_TIMEOUT"
    SLOW_CLIENT = "SLOW_CLIENT"
    DRAINING = "DRAINING"
    ENGINE_FAILED = "ENGINE_FAILED"
    REBUILD_REFUSED = "REBUILD_REFUSED"
    REBUILD_DIFFERS = "REBUILD_DIFFERS"
    COPY_STALE = "COPY_STALE"
    NOT_READY = "NOT_READY"
    NOT_ALLOWED = "NOT_ALLOWED"
    UNAVAILABLE = "UNAVAILABLE"
    UNKNOWN = "UNKNOWN"


CODES: dict[Reason, grpc.StatusCode] = {
    Reason.INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.OUT_OF_ORDER: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TENANT_QUOTA: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.KIND_NOT_SERVED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.MODEL_NOT_SERVED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.TICKET_CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.SUPERSEDED: grpc.StatusCode.ABORTED,
    Reason.UNKNOWN_WORKER: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_TICKET: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_SESSION: grpc.StatusCode.NOT_FOUND,
    Reason.TOO_MANY_WATCHES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.WORKER_ATTACHED: grpc.StatusCode.ALREADY_EXISTS,
    Reason.LEASE_FORGED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.LEASE_STALE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LEASE_EXPIRED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.WRONG_WORKER: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.WRONG_EPOCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SLOT_OCCUPIED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.OPEN_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.SLOW_CLIENT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.ENGINE_FAILED: grpc.StatusCode.INTERNAL,
    Reason.REBUILD_REFUSED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.REBUILD_DIFFERS: grpc.StatusCode.DATA_LOSS,
    Reason.COPY_STALE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_READY: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.UNKNOWN: grpc.StatusCode.UNKNOWN,
}


_TOO_MANY = "Concurrent RPC limit exceeded!"  # gRPC's text for a call above `CallLimits.total`


class FabricError(Exception):
    """A failure with a reason. `field` is the path of the message field that is invalid, or that
    has the exhausted limit, if any.

    `is_foreign` means that gRPC wrote the message, not one of our processes. Such a message may
    contain internal addresses and must not be shown to clients.
    """

    def __init__(
        self, reason: Reason, message: str, *, field: str = "", is_foreign: bool = False
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.field = field
        self.is_foreign = is_foreign


def from_rpc(error: grpc.aio.AioRpcError) -> FabricError:
    """Return the error of a failed call.

    Its reason is UNAVAILABLE if the peer did not answer, or runs as many calls as it may: another
    peer may answer.
    """
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in set(Reason):
            field = info.metadata.get("field", "")
            return FabricError(Reason(info.reason), error.details() or "", field=field)
    unreachable = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    is_full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and error.details() == _TOO_MANY
    is_unavailable = is_full or error.code() in unreachable
    reason = Reason.UNAVAILABLE if is_unavailable else Reason.UNKNOWN
    return FabricError(reason, f"{error.code().name}: {error.details()}", is_foreign=True)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: FabricError) -> NoReturn:
    """End a call with `error`. Servicers call this."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.field:
        info.metadata["field"] = error.field
    detail = any_pb2.Any()
    detail.Pack(info)
    code: int = CODES[error.reason].value[0]
    status = status_pb2.Status(code=code, message=error.message, details=[detail])
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status always raises")
