"""The state of a fabric as an edge sends it to the pages of operators: whole, and as changes. Pure.

The view keeps each worker, lease and ticket as the JSON that pages get. So a snapshot for one more
page only joins texts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import orjson
from google.protobuf.duration_pb2 import Duration

from duplane.fabric.durations import to_seconds
from duplane.fabric.kinds import kind_name
from duplane.fabric.v1 import admin_pb2, registry_pb2

MAX_WORKERS = 1000
MAX_LEASES = 8000
MAX_TICKETS = 2000
PORTION = 64  # workers, leases and tickets that are noted before other tasks can run

_STATES = {
    registry_pb2.SLOT_STATE_FREE: "free",
    registry_pb2.SLOT_STATE_OCCUPIED: "occupied",
    registry_pb2.SLOT_STATE_CLEANING: "cleaning",
    registry_pb2.SLOT_STATE_BROKEN: "broken",
}
_UNKNOWN = "unknown"  # a state that only newer workers have

_Status = TypeVar("_Status", admin_pb2.WorkerStatus, admin_pb2.LeaseStatus, admin_pb2.TicketStatus)
_Describe = Callable[[_Status, float], dict[str, object]]


class _Table(Generic[_Status]):
    """The workers, the leases or the tickets, by their ids.

    At most `limit` of them are kept: of more, the first ones. `is_cut` then stays true until the
    next snapshot.
    """

    def __init__(self, limit: int, describe: _Describe[_Status]) -> None:
        self.is_cut = False
        self._limit = limit
        self._describe = describe
        self._rows: dict[str, bytes] = {}
        # Changes that no page has, by id: the status and the time of its arrival, None if removed.
        self._changed: dict[str, tuple[_Status, float] | None] = {}

    def put(self, key: str, status: _Status, now_s: float) -> bool:
        """Note a status, which replaces an older one. Returns False if there is no place for it."""
        if key not in self._rows and len(self._rows) >= self._limit:
            self.is_cut = True
            return False
        self._rows.setdefault(key, b"")  # takes a place; `changes` writes the row
        self._changed[key] = status, now_s
        return True

    def remove(self, key: str) -> None:
        """Note that there is no such object any more."""
        if self._rows.pop(key, None) is not None:
            self._changed[key] = None

    def changes(self) -> tuple[Sequence[bytes], Sequence[str]]:
        """Return the rows that changed since the last call, and the ids of those removed."""
        rows: list[bytes] = []
        removed: list[str] = []
        for key, change in self._changed.items():
            if change is None:
                removed.append(key)
                continue
            self._rows[key] = row = orjson.dumps(self._describe(*change))
            rows.append(row)
        self._changed.clear()
        return rows, removed

    @property
    def rows(self) -> Sequence[bytes]:
        """All rows. Call `changes` before."""
        return [*self._rows.values()]

    def __len__(self) -> int:
        return len(self._rows)


class FabricView:
    """What a scheduler's Watch tells.

    `note` takes its messages. Until the first snapshot is whole, `is_known` is false. Times in rows
    are Unix times of the edge, so that a page can count on from them.
    """

    def __init__(self) -> None:
        self.is_known = False
        self.ticket_limit = 0
        self.store_refusal = ""
        self._clear()
        self._parts: FabricView | None = None  # a snapshot whose last part has not come

    def _clear(self) -> None:
        self._workers = _Table(MAX_WORKERS, _worker)
        self._leases = _Table(MAX_LEASES, _lease)
        self._tickets = _Table(MAX_TICKETS, _ticket)
        self._slots: dict[str, int] = {}  # the number of slots of each worker that is not lost

    def note(self, message: admin_pb2.WatchResponse, now_s: float) -> Iterator[bool]:
        """Note a message in portions; yield after each whether a whole snapshot has replaced all.

        `now_s` is the Unix time.
        """
        match message.WhichOneof("event"):
            case "snapshot":
                yield from self._note_part(message.snapshot, now_s)
                return
            case "worker":
                self._put_worker(message.worker, now_s)
            case "removed_worker_id":
                self._workers.remove(message.removed_worker_id)
                self._slots.pop(message.removed_worker_id, None)
            case "lease":
                self._put_lease(message.lease, now_s)
            case "removed_lease_id":
                self._leases.remove(message.removed_lease_id)
            case "ticket":
                self._put_ticket(message.ticket, now_s)
            case "removed_ticket_id":
                self._tickets.remove(message.removed_ticket_id)
            case _:
                pass  # of a newer scheduler
        yield False

    def _note_part(self, part: admin_pb2.Snapshot, now_s: float) -> Iterator[bool]:
        if self._parts is None:
            self._parts = FabricView()
            self._parts.ticket_limit = part.ticket_limit
            self._parts.store_refusal = part.store_refusal
        parts = self._parts
        puts = itertools.chain(
            (functools.partial(parts._put_worker, worker) for worker in part.workers),
            (functools.partial(parts._put_lease, lease) for lease in part.leases),
            (functools.partial(parts._put_ticket, ticket) for ticket in part.tickets),
        )
        while portion := list(itertools.islice(puts, PORTION)):
            for put in portion:
                put(now_s)
            parts.changes()  # writes the rows
            yield False
        if not part.has_more:
            self._replace(parts)
            yield True

    def _replace(self, other: FabricView) -> None:
        self._parts = None
        self.is_known = True
        self.ticket_limit, self.store_refusal = other.ticket_limit, other.store_refusal
        self._workers, self._leases, self._tickets = other._workers, other._leases, other._tickets
        self._slots = other._slots

    def _put_worker(self, status: admin_pb2.WorkerStatus, now_s: float) -> None:
        worker_id = status.worker.worker_id
        is_kept = self._workers.put(worker_id, status, now_s)
        if status.HasField("lost_duration"):
            self._slots.pop(worker_id, None)
        elif is_kept:
            self._slots[worker_id] = len(status.worker.slots)

    def _put_lease(self, status: admin_pb2.LeaseStatus, now_s: float) -> None:
        self._leases.put(status.claims.lease_id, status, now_s)

    def _put_ticket(self, status: admin_pb2.TicketStatus, now_s: float) -> None:
        self._tickets.put(status.ticket_id, status, now_s)

    def counts(self) -> dict[str, int]:
        """Return the length of the queue, the number of slots, and of those that are leased."""
        return {
            "waiting": len(self._tickets),
            "slots": sum(self._slots.values()),
            "leases": len(self._leases),
        }

    def changes(self) -> bytes:
        """Return the JSON of everything that changed since the last call; empty if nothing did."""
        fields: list[bytes] = []
        for name, table in self._tables():
            rows, removed = table.changes()
            if rows:
                fields.append(b'"%b":[%b]' % (name, b",".join(rows)))
            if removed:
                fields.append(b'"removed_%b":%b' % (name, orjson.dumps(removed)))
        return b"{%b}" % b",".join(fields) if fields else b""

    def snapshot(self) -> bytes:
        """Return the JSON of everything, as of the last call of `changes`."""
        facts = {
            "is_known": self.is_known,
            "ticket_limit": self.ticket_limit,
            "store_refusal": self.store_refusal,
            "cut": [name.decode() for name, table in self._tables() if table.is_cut],
        }
        fields = [
            b'"%b":[%b]' % (name, b",".join(filter(None, table.rows)))
            for name, table in self._tables()
        ]
        return b"%b,%b}" % (orjson.dumps(facts)[:-1], b",".join(fields))

    def _tables(
        self,
    ) -> Sequence[
        tuple[
            bytes,
            _Table[admin_pb2.WorkerStatus]
            | _Table[admin_pb2.LeaseStatus]
            | _Table[admin_pb2.TicketStatus],
        ]
    ]:
        return [(b"workers", self._workers), (b"leases", self._leases), (b"tickets", self._tickets)]


def _since(now_s: float, duration: Duration) -> float:
    """Return the Unix time at which something began that has lasted for `duration`."""
    return round(now_s - to_seconds(duration), 3)


def _worker(status: admin_pb2.WorkerStatus, now_s: float) -> dict[str, object]:
    register, report = status.worker, status.report
    is_lost = status.HasField("lost_duration")
    return {
        "worker_id": register.worker_id,
        "address": register.address,
        "release": register.release,
        "pool": register.pool,
        "labels": dict(register.labels),
        "device": register.device.name,
        "device_description": register.device.description,
        "kinds": [kind_name(kind) for kind in register.kinds],
        "slots": [_slot(slot) for slot in register.slots],
        "attached_at": _since(now_s, status.attached_duration),
        "reported_at": _since(now_s, status.report_age),
        "is_draining": status.is_draining,
        "is_silent": status.is_silent,
        "is_unreachable": status.is_unreachable,
        "lost_at": _since(now_s, status.lost_duration) if is_lost else None,
        "lost_reason": status.lost_reason,
        "unit_count": report.unit_count,
        "unit_ms": round(to_seconds(report.unit_time) * 1e3, 1) or None,
        "memory_used_bytes": report.memory_used_bytes or None,
        "memory_bytes": register.device.memory_bytes or None,
    }


def _slot(slot: registry_pb2.SlotReport) -> dict[str, object]:
    """Describe a slot. A free one has only its state, because most slots of a page are free."""
    state = "withheld" if slot.is_withheld else _STATES.get(slot.state, _UNKNOWN)
    described: dict[str, object] = {"slot": slot.slot, "state": state}
    if slot.lease_id:
        described |= {
            "lease_id": slot.lease_id,
            "session_id": slot.session_id,
            "kind": kind_name(slot.kind),
            "is_paused": slot.is_paused,
            "cannot_move": slot.cannot_move,
        }
    return described


def _lease(status: admin_pb2.LeaseStatus, now_s: float) -> dict[str, object]:
    claims = status.claims
    ends_at = None
    if status.HasField("estimated_remaining"):
        ends_at = round(now_s + to_seconds(status.estimated_remaining), 3)
    return {
        "lease_id": claims.lease_id,
        "worker_id": claims.worker_id,
        "slot": claims.slot,
        "kind": kind_name(claims.kind),
        "session_id": claims.session_id,
        "tenant": claims.tenant_id,
        "is_claimed": status.is_claimed,
        "granted_at": _since(now_s, status.held_duration),
        "ends_at": ends_at,
    }


def _ticket(status: admin_pb2.TicketStatus, now_s: float) -> dict[str, object]:
    wait_s = None
    if status.HasField("estimated_wait"):
        wait_s = round(to_seconds(status.estimated_wait), 1)
    return {
        "ticket_id": status.ticket_id,
        "kind": kind_name(status.kind),
        "pool": status.pool,
        "session_id": status.session_id,
        "tenant": status.tenant_id,
        "position": status.position,
        "needs": dict(status.needs),
        "queued_at": _since(now_s, status.waited_duration),
        "estimated_wait_s": wait_s,
    }
