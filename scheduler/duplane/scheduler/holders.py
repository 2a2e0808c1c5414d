"""Who holds a ticket or a grant, and the proof that a ticket was issued to its holder. Pure.

A holder is the SHA-256 of a secret that only one caller has. A caller without a secret is no holder
(an empty one): the tickets and grants of such callers are open to every caller.
"""

from __future__ import annotations

import hashlib
import hmac

_HOLDER_CONTEXT = b"duplane caller\0"
_PROOF_CONTEXT = b"duplane ticket\0"
_SESSION_CONTEXT = b"duplane session\0"
_SEPARATOR = "\0"  # no caller may use it in a request id
_SCOPE_LENGTH = 32  # hexadecimal digits


def holder_of(caller_key: bytes) -> bytes:
    """Return the holder with this secret."""
    return hashlib.sha256(_HOLDER_CONTEXT + caller_key).digest() if caller_key else b""


def is_open_to(holder: bytes, caller: bytes) -> bool:
    """True if the holder `caller` may change a ticket or grant of `holder`."""
    return not holder or hmac.compare_digest(holder, caller)


def is_free_of_scope(request_id: str) -> bool:
    """True if a caller may send this request id."""
    return _SEPARATOR not in request_id


def scoped(request_id: str, holder: bytes) -> str:
    """Return the name of a request among the requests of all holders.

    So a caller that guesses the request id of another holder names a request of its own.
    """
    return f"{request_id}{_SEPARATOR}{holder.hex()[:_SCOPE_LENGTH]}" if holder else request_id


def ticket_proof(key: bytes, order: int, holder: bytes, *, is_granted: bool = False) -> bytes:
    """Return the proof that the ticket `order` was issued to `holder`.

    `is_granted` means that the ticket has had a slot. `key` is the secret of the store that issued
    the ticket; without it there is no proof.
    """
    if not key:
        return b""
    proven = order.to_bytes(8) + bytes([is_granted]) + holder
    return hmac.digest(key, _PROOF_CONTEXT + proven, "sha256")


def is_proven(
    key: bytes, order: int, holder: bytes, proof: bytes, *, is_granted: bool = False
) -> bool:
    """True if `proof` is the proof of this ticket and holder."""
    expected = ticket_proof(key, order, holder, is_granted=is_granted)
    return bool(key) and hmac.compare_digest(expected, proof)


def session_proof(key: bytes, order: int, session_id: str, tenant_id: str) -> bytes:
    """Return the proof that a session has had a slot with the ticket `order`.

    It holds for every caller that continues the session. There is none without a `session_id`, or
    without the secret `key` of the store.
    """
    if not (key and session_id):
        return b""
    session = hashlib.sha256(repr((session_id, tenant_id)).encode()).digest()
    return hmac.digest(key, _SESSION_CONTEXT + order.to_bytes(8) + session, "sha256")


def is_proven_of_session(
    key: bytes, order: int, session_id: str, tenant_id: str, proof: bytes
) -> bool:
    """True if `proof` is the proof of this ticket and session."""
    expected = session_proof(key, order, session_id, tenant_id)
    return bool(expected) and hmac.compare_digest(expected, proof)
