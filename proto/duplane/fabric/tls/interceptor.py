"""Refuses calls that the role of the caller may not make, and ends calls of denied certificates."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from cachetools import TTLCache
from google.protobuf import text_format
from google.protobuf.message import Message

from duplane.fabric.errors import FabricError, Reason, abort
from duplane.fabric.monitoring.logs import AUDIT
from duplane.fabric.tls import access
from duplane.fabric.tls.handshakes import Handshakes
from duplane.fabric.tls.identity import Identity
from duplane.fabric.tls.peers import peer_certificate, peer_identity

if TYPE_CHECKING:
    # Not imported without TLS: it imports cryptography, which takes a tenth of a second.
    from duplane.fabric.tls.credentials import FabricCredentials

_log = logging.getLogger(__name__)
_audit = logging.getLogger(AUDIT)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context = grpc.aio.ServicerContext[Any, Any]
_Behavior = Callable[[Any, _Context], Any]
# A refusal is logged once an hour for each caller and rpc. Of more callers and rpcs than the limit,
# the oldest are forgotten, and may be logged again.
_LOGGED_AGAIN_S = 3600.0
_MAX_LOGGED = 1024
_MAX_AUDIT_LENGTH = 300  # characters of a request in the log


@dataclass(eq=False, slots=True)
class _Call:
    """A running call."""

    caller: Identity
    certificate: bytes
    task: asyncio.Task[Any]
    is_denied: bool = False


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Checks the caller of every call of a server against the table of roles."""

    def __init__(self, credentials: FabricCredentials, handshakes: Handshakes) -> None:
        self._credentials = credentials
        self._handshakes = handshakes
        self._calls: set[_Call] = set()
        self._logged = TTLCache[tuple[str, str], bool, float](_MAX_LOGGED, _LOGGED_AGAIN_S)
        # By path. Only rpcs that a servicer has are kept, so a caller cannot add any.
        self._checked: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        if credentials.deny_list:
            credentials.deny_list.on_change = self._end_denied

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Request, _Response] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Request, _Response] | None:
        """Return the handler of an rpc, with the check before it."""
        method: str = handler_call_details.method
        if checked := self._checked.get(method):
            return checked
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # the server answers UNIMPLEMENTED
        checked = self._checked[method] = self._check(method, handler)
        return checked

    def _check(
        self, method: str, handler: grpc.RpcMethodHandler[Any, Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        make, behavior = _parts(handler)
        if inspect.isasyncgenfunction(behavior):
            checked = self._generating(method, behavior)
        else:
            checked = self._awaiting(method, behavior)
        return make(
            checked,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _awaiting(self, method: str, behavior: _Behavior) -> _Behavior:
        """Wrap a coroutine function: of one response, or one that calls `context.write`."""

        async def checked(request: Any, context: _Context) -> Any:
            try:
                with self._running(method, request, context):
                    return await behavior(request, context)
            except _DeniedError as error:
                return await abort(context, error)

        return checked

    def _generating(self, method: str, behavior: _Behavior) -> _Behavior:
        """Wrap an async generator function."""

        async def checked(request: Any, context: _Context) -> AsyncIterator[Any]:
            responses: AsyncGenerator[Any] = behavior(request, context)
            try:
                with self._running(method, request, context):
                    async with contextlib.aclosing(responses):
                        async for response in responses:
                            yield response
            except _DeniedError as error:
                await abort(context, error)

        return checked

    @contextlib.contextmanager
    def _running(self, method: str, request: Any, context: _Context) -> Generator[None]:
        """Check the caller, and end the body when the caller is denied. Raises _DeniedError."""
        call = self._admit(method, request, context)
        self._calls.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if not call.is_denied:
                raise
            call.task.uncancel()
            raise _DeniedError(f"the certificate of {call.caller} is denied") from None
        finally:
            self._calls.discard(call)

    def _admit(self, method: str, request: Any, context: _Context) -> _Call:
        self._handshakes.note_call(context.peer())
        caller = peer_identity(context)
        if caller is None:
            host = context.peer().rpartition(":")[0]
            raise self._refused(method, host, "the certificate names no process")
        operator = _operator(context)
        if caller.trust_domain != self._credentials.trust_domain:
            domain = self._credentials.trust_domain
            raise self._refused(method, str(caller), f"the trust domain is not {domain}")
        if why := access.refusal(method, caller.role, operator):
            raise self._refused(method, str(caller), why)
        certificate, deny_list = peer_certificate(context), self._credentials.deny_list
        if deny_list and deny_list.refuses(str(caller), certificate):
            raise self._refused(method, str(caller), "the certificate is denied")
        if method in access.FOR_OPERATORS:
            _log_operation(method, request, caller, operator)
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("gRPC runs each call in a task")
        return _Call(caller, certificate, task)

    def _refused(self, method: str, caller: str, why: str) -> _DeniedError:
        if (caller, method) not in self._logged:
            self._logged[caller, method] = True
            _log.warning("a call of %s to %s was refused: %s", caller, method, why)
        return _DeniedError(why)

    def _end_denied(self) -> None:
        """End the running calls whose certificates are denied now."""
        deny_list = self._credentials.deny_list
        for call in tuple(self._calls):
            if deny_list and deny_list.refuses(str(call.caller), call.certificate):
                _log.warning("a call of %s ends: its certificate is denied", call.caller)
                call.is_denied = True
                call.task.cancel()


class _DeniedError(FabricError):
    """A caller may not make a call."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.NOT_ALLOWED, message)


def _parts(
    handler: grpc.RpcMethodHandler[Any, Any],
) -> tuple[Callable[..., grpc.RpcMethodHandler[Any, Any]], _Behavior]:
    """Return what makes a handler of the same kind, and the behavior of this one."""
    kinds: dict[tuple[bool, bool], tuple[Callable[..., Any], Any]] = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }
    return kinds[handler.request_streaming, handler.response_streaming]


def _operator(context: _Context) -> str:
    """Return the operator that an edge acts for; empty if the call names none."""
    for name, value in context.invocation_metadata() or ():
        if name == access.OPERATOR_KEY and isinstance(value, str):
            return value
    return ""


def _log_operation(method: str, request: Any, caller: Identity, operator: str) -> None:
    """Log who has changed what. Control characters of the request and the name are escaped."""
    what = text_format.MessageToString(request, as_one_line=True) if _is_message(request) else ""
    _audit.info(
        "%s {%s} by %s%s",
        method.rpartition("/")[2],
        what[:_MAX_AUDIT_LENGTH],
        caller,
        f" for operator {operator!a}" if operator else "",
    )


def _is_message(request: object) -> bool:
    return isinstance(request, Message)
