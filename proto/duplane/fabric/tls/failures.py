"""Names failures of TLS in the log, because the errors of gRPC hide them."""

from __future__ import annotations

import logging

import grpc
import grpc.aio
from cachetools import TTLCache

from duplane.fabric.errors import FabricError, Reason

_log = logging.getLogger(__name__)

# A failure is logged once an hour for each peer. Of more peers than the limit, the oldest are
# forgotten, and may be logged again.
_LOGGED_AGAIN_S = 3600.0
_MAX_PEERS = 1024
# Texts of gRPC when this process has refused the peer: its certificate, or the name in it.
_REFUSED_HERE = ("handshake failed", "verification check failed", "Verification Check failed")
# Texts of gRPC when the peer has closed the connection. In TLS 1.3 the client ends its handshake
# before the server has looked at the client's certificate, so no text says that it was refused.
_CLOSED = ("Socket closed", "Connection reset", "Broken pipe")
_TIMED_OUT = "connection attempt timed out"


class TlsFailures:
    """Logs once that TLS to a peer fails, or that the peer seems to want TLS."""

    def __init__(self, *, has_tls: bool = True) -> None:
        """`has_tls` says whether this process uses TLS."""
        self._has_tls = has_tls
        self._logged = TTLCache[str, bool, float](_MAX_PEERS, _LOGGED_AGAIN_S)

    def note(self, peer: str, error: grpc.aio.AioRpcError | FabricError, *, is_new: bool) -> None:
        """Log a failed call to `peer` if TLS has failed.

        `is_new` means that the connection was just opened and no call on it has succeeded.
        """
        why = tls_failure(_message(error), is_new=is_new, has_tls=self._has_tls)
        if why and peer not in self._logged:
            self._logged[peer] = True
            what = "TLS to %s fails: %s" if self._has_tls else "calls to %s fail: %s"
            _log.error(what, peer, why)


def tls_failure(message: str, *, is_new: bool, has_tls: bool = True) -> str:
    """Return why TLS has failed, from the text of a failed call; empty if it has not failed.

    Without `has_tls`, why TLS may be missing.
    """
    is_closed = is_new and any(text in message for text in _CLOSED)
    if not has_tls:
        return (
            "the peer has closed the connection at once, as a server with TLS does; if it has TLS,"
            f" this process needs --fabric-tls: {message}"
            if is_closed
            else ""
        )
    if any(text in message for text in _REFUSED_HERE):
        return f"this process refuses the certificate of the peer, or it has no TLS: {message}"
    if is_closed or (is_new and _TIMED_OUT in message):
        return (
            "the peer has closed the connection at once, as a server does that refuses the"
            f" certificate of this process, or has no TLS: {message}"
        )
    return ""


def _message(error: grpc.aio.AioRpcError | FabricError) -> str:
    """Return the text of a failure to reach a peer; empty for other errors."""
    if isinstance(error, FabricError):
        return error.message if error.is_foreign and error.reason is Reason.UNAVAILABLE else ""
    return (error.details() or "") if error.code() is grpc.StatusCode.UNAVAILABLE else ""
