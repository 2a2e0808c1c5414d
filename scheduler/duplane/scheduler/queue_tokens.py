"""Queue tokens: encrypted tickets, with which clients return to their places at other edges.

A ticket's id contains its order, and orders are consecutive numbers: a client that saw its id could
name an earlier place. So clients get their tickets encrypted, under a key of the store, which all
schedulers of a fabric share.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import Callable

from cachetools import TTLCache
from cryptography.fernet import Fernet, InvalidToken

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.policy.needs import MODEL
from duplane.scheduler.store.base import (
    Change,
    Grant,
    GrantGone,
    GrantPut,
    LeaseStore,
    Ticket,
    ticket_id_of,
)
from duplane.scheduler.wall_clock import now_s

_READ_TIMEOUT_S = 5.0  # time limit of the wait for the facts, as of `LeaseStore.enqueue`
TOKEN_S = 120.0  # for which a token is valid; a waiting client gets a new one every few seconds
_MAX_SPENT = 65_536  # tickets that have had a slot lately; above this the oldest is forgotten
_KEY_CONTEXT = b"duplane queue token\0"
_ORDER_BYTES = 8


async def read_ticket_key(store: LeaseStore) -> bytes:
    """Return the key of a store as soon as its facts are read. Raises FabricError."""
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            await store.until_read()  # the key is a fact, too
    except TimeoutError:
        raise FabricError(Reason.UNAVAILABLE, "the store does not answer") from None
    return store.ticket_key


class QueueTokens:
    """Seals tickets for clients, and opens what clients bring back.

    A token is valid until its ticket has a slot. A scheduler that was restarted does not know the
    tickets whose sessions have ended already; their tokens expire after `TOKEN_S`.
    """

    def __init__(self, clock: Callable[[], float] = now_s) -> None:
        """`clock` is the wall clock, because other schedulers open the tokens."""
        self._clock = clock
        self._spent = TTLCache[int, None, float](_MAX_SPENT, TOKEN_S, clock)
        self._held: set[int] = set()  # orders whose session has a slot now
        self._fernet: tuple[bytes, Fernet] | None = None  # and the store's key that it is from

    def seal(self, key: bytes, ticket: Ticket) -> str:
        """Return a token for a ticket; empty without the `key` of the store."""
        if not key:
            return ""
        place = ticket.order.to_bytes(_ORDER_BYTES) + _digest(ticket.request)
        return self._cipher(key).encrypt_at_time(place, int(self._clock())).decode()

    def open(self, key: bytes, request: lease_pb2.AcquireLeaseRequest, token: str) -> int | None:
        """Return the order of the ticket in a token, or None if the token is not valid.

        Raises FabricError if the token is valid for another kind of request.
        """
        if not key:
            return None
        try:
            now = int(self._clock())
            place = self._cipher(key).decrypt_at_time(token.encode(), int(TOKEN_S), now)
        except InvalidToken:
            return None
        order = int.from_bytes(place[:_ORDER_BYTES])
        if order in self._held or order in self._spent:
            return None
        if not hmac.compare_digest(place[_ORDER_BYTES:], _digest(request)):
            message = "queue_token is from a request of another kind, pool, tenant or other needs"
            raise FabricError(Reason.INVALID_FIELD, message, field="queue_token")
        return order

    def exchange(
        self, key: bytes, request: lease_pb2.AcquireLeaseRequest, token: str
    ) -> int | None:
        """Give a request the ticket id in a token, as if its caller had returned with the ticket.

        Returns the ticket's order, or None if the token is not valid. Raises FabricError.
        """
        order = self.open(key, request, token)
        if order is not None:
            request.ticket_id = ticket_id_of(order)
        request.was_granted = False
        return order

    def on_change(self, change: Change) -> None:
        """Note which tickets have had a slot. A slot that was not claimed does not count."""
        match change:
            case GrantPut(grant=Grant(ticket=Ticket(order=order), is_claimed=True)):
                self._held.add(order)
            case GrantGone(grant=Grant(ticket=Ticket(order=order))) if order in self._held:
                self._held.remove(order)
                self._spent[order] = None
            case _:
                pass

    def _cipher(self, key: bytes) -> Fernet:
        """Return the cipher of the store's key, which is another one in a new store."""
        if self._fernet is None or self._fernet[0] != key:
            derived = hmac.digest(key, _KEY_CONTEXT, "sha256")
            self._fernet = key, Fernet(base64.urlsafe_b64encode(derived))
        return self._fernet[1]


def _digest(request: lease_pb2.AcquireLeaseRequest) -> bytes:
    """Return what a request asks for, and for which tenant, as 32 bytes.

    A model counts the same whether a client names it or the scheduler has made it a need.
    """
    needs = dict(request.needs)
    needs[MODEL] = request.model or needs.get(MODEL, "")
    demand = (request.kind, request.pool, request.tenant_id, sorted(needs.items()))
    return hashlib.sha256(repr(demand).encode()).digest()
