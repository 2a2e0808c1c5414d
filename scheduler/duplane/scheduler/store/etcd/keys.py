"""The names of the store's keys in etcd, all with one prefix."""

from __future__ import annotations

import re
import zlib
from urllib.parse import quote, unquote

_ARRIVALS_COUNT = 64
_is_plain = re.compile(r"[A-Za-z0-9_.~-]*").fullmatch  # `quote` would not change it
SlotKey = tuple[str, int]  # worker id, slot


class Keys:
    """Makes and parses keys.

    - `base`: the number that is added to a revision to make an epoch, order or fencing number.
    - `ticket-key`: the secret with which all schedulers prove that they issued a ticket.
    - `barrier`: an empty value. Its event shows that all earlier changes have arrived.
    - `session/ID`: one scheduler. Its lease holds the scheduler's registrations and tickets too.
    - `presence/ID`: the same scheduler, with a short lease. Shows that it is alive.
    - `signing/KEY_ID/ID`: the public key that a scheduler signs with; outlasts its session.
    - `worker/ID`: a registration without its slots. A scheduler of an older release writes it with
      the slots, and without the two keys `reports/ID` and `report/ID/N`.
    - `epoch/ID`: an empty value, which only registrations write.
    - `reports/ID`: the reports of all slots of a worker. `report/ID/N`: a later report of one slot.
    - `slot/WORKER/N`: the last grant of a slot.
    - `request/ID`: a request that waits or has a grant.
    - `order/N`: reserves an order for a ticket that has returned to this order.
    - `time/TENANT`: for how long the ended sessions of a tenant have held slots on the last day.
    - `arrivals/N`: an empty value, which every new ticket writes. Several pools share a key.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()
        self.base = self._key("base")
        self.ticket_key = self._key("ticket-key")
        self.barrier = self._key("barrier")

    def session(self, name: str) -> bytes:
        return self._key("session", name)

    def presence(self, name: str) -> bytes:
        return self._key("presence", name)

    def signing(self, key_id: str, name: str) -> bytes:
        return self._key("signing", key_id, name)

    def worker(self, worker_id: str) -> bytes:
        return self._key("worker", worker_id)

    def epoch(self, worker_id: str) -> bytes:
        return self._key("epoch", worker_id)

    def reports(self, worker_id: str) -> bytes:
        return self._key("reports", worker_id)

    def report(self, worker_id: str, slot: int) -> bytes:
        return self._key("report", worker_id, str(slot))

    def later_reports(self, worker_id: str) -> bytes:
        """The common beginning of the keys of a worker's later reports."""
        return self._key("report", worker_id, "")

    def slot(self, key: SlotKey) -> bytes:
        worker_id, slot = key
        return self._key("slot", worker_id, str(slot))

    def slots(self, worker_id: str) -> bytes:
        """The common beginning of the keys of a worker's slots."""
        return self._key("slot", worker_id, "")

    def request(self, request_id: str) -> bytes:
        return self._key("request", request_id)

    def order(self, order: int) -> bytes:
        return self._key("order", str(order))

    def arrivals(self, pool: str) -> bytes:
        """The key that every new ticket of a pool writes.

        Callers can send any pool name, so the number of these keys is fixed and pools share them.
        """
        return self._key("arrivals", str(zlib.crc32(pool.encode()) % _ARRIVALS_COUNT))

    def time(self, tenant_id: str) -> bytes:
        return self._key("time", tenant_id)

    def parse(self, key: bytes) -> list[str]:
        """Return the first word of a key, such as `slot`, and then its other parts."""
        parts = key[len(self.prefix) :].decode().split("/")
        return [unquote(part) for part in parts] if b"%" in key else parts

    def _key(self, *parts: str) -> bytes:
        quoted = (part if _is_plain(part) else quote(part, safe="") for part in parts)
        return self.prefix + "/".join(quoted).encode()
