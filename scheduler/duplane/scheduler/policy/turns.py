"""The order in which tickets of several tenants are granted: tenants take turns. Pure.

Each tenant has a line, in which its tickets stand by their order numbers. Of the first tickets of
all lines, the one with the lowest turn is next. The turn of a line is the higher one of two
numbers: the order number of its first ticket, and the fencing number of the tenant's last grant.
(Both are revisions of the store, so they can be compared.) A grant gives a tenant a higher turn
than all other lines have. So while a ticket is the first of its line, at most one ticket of each
other tenant is granted before it. With one tenant, the order is that of the order numbers.

Turns follow from what all schedulers of a fabric know, so all choose the same ticket. A scheduler
that starts later knows no last grant that has ended, so a tenant may get one turn too early.

Tickets that return because their slot was lost come before all lines, by their order numbers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence

from sortedcontainers import SortedList

from duplane.scheduler.store.base import Ticket

Turn = tuple[int, int, str]  # the turn of a line, the order of its first ticket, and the tenant


def place(ticket: Ticket) -> str | None:
    """Return the tenant in whose line a ticket stands; None if it comes before all lines.

    It does if it has returned, after a grant, to the order that it had.
    """
    request = ticket.request
    is_returned = request.was_granted and request.ticket_id == ticket.ticket_id
    return None if is_returned else request.tenant_id


def merged(parts: Sequence[Turns]) -> Iterator[int]:
    """Yield the orders of tickets of several sets, as if these sets were one."""
    yield from heapq.merge(*(part.returned for part in parts))
    lines: dict[str, list[Iterator[int]]] = {}
    for (_, first, tenant_id), line in heapq.merge(*(part.lines() for part in parts), key=_turn):
        if tenant_id not in lines:
            yield first
        lines.setdefault(tenant_id, []).append(line)
    rests = (itertools.islice(heapq.merge(*same), 1, None) for same in lines.values())
    for orders in itertools.zip_longest(*rests):
        yield from (order for order in orders if order is not None)


def _turn(line: tuple[Turn, Iterator[int]]) -> Turn:
    return line[0]


class Turns:
    """A set of tickets in the order in which they are granted.

    Changes cost O(log n). A rank or a place costs O(log n) for each length that lines have: with n
    tickets, lines have at most the square root of 2 n different lengths.
    """

    def __init__(self, last_numbers: Mapping[str, int]) -> None:
        """`last_numbers` has the fencing number of the last grant of each tenant, if known."""
        self._last_numbers = last_numbers
        self._returned: SortedList[int] = SortedList()
        self._tenants: dict[int, str | None] = {}  # by order; None for tickets that have returned
        self._lines: dict[str, SortedList[int]] = {}  # orders, by tenant
        # The turns of the lines, by tenant, sorted, and by length. Empty if there is one line only.
        self._turns: dict[str, Turn] = {}
        self._sorted: SortedList[Turn] = SortedList()
        self._by_length: dict[int, SortedList[Turn]] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, order: int) -> bool:
        return order in self._tenants

    def __iter__(self) -> Iterator[int]:
        return self.islice(0)

    def __getitem__(self, rank: int) -> int:
        """Return the order of the ticket with a rank, from 0. The rank must exist."""
        return next(self.islice(rank))

    def turn_of(self, tenant_id: str) -> Turn:
        """Return the turn of a line."""
        first = self._lines[tenant_id][0]
        return max(first, self._last_numbers.get(tenant_id, 0)), first, tenant_id

    def add(self, ticket: Ticket) -> None:
        """Add a ticket whose order is not in the set."""
        order = ticket.order
        tenant_id = self._tenants[order] = place(ticket)
        if tenant_id is None:
            self._returned.add(order)
            return
        is_new = tenant_id not in self._lines
        if is_new and len(self._lines) == 1:
            self._list(*self._lines)
        self._unlist(tenant_id)
        self._lines.setdefault(tenant_id, SortedList()).add(order)
        if len(self._lines) > 1:
            self._list(tenant_id)

    def remove(self, order: int) -> None:
        """Remove a ticket."""
        tenant_id = self._tenants.pop(order)
        if tenant_id is None:
            self._returned.remove(order)
            return
        is_listed = self._unlist(tenant_id)
        line = self._lines[tenant_id]
        line.remove(order)
        if not line:
            del self._lines[tenant_id]
            if len(self._lines) == 1:
                self._unlist(*self._lines)
        elif is_listed:
            self._list(tenant_id)

    def renew(self, tenant_id: str) -> int | None:
        """Compute the turn of a line again, because its tenant has got a grant.

        Returns the lowest rank at which tickets may have moved up; None if none have.
        """
        if tenant_id not in self._turns:
            return None
        rank = len(self._returned) + self._sorted.bisect_left(self._turns[tenant_id])
        self._unlist(tenant_id)
        self._list(tenant_id)
        return rank

    def rank(self, order: int) -> int:
        """Return how many tickets are granted before a ticket."""
        tenant_id = self._tenants[order]
        if tenant_id is None:
            return self._returned.index(order)
        index = self._lines[tenant_id].index(order)
        return len(self._returned) + self._ahead(index, self._turns.get(tenant_id))

    def _ahead(self, index: int, turn: Turn | None) -> int:
        """Count the tickets of lines ahead of the ticket at `index` of the line with this turn.

        Without a turn, count the tickets of the first `index` rounds.
        """
        ahead = 0 if self._by_length else index
        for length, turns in self._by_length.items():
            ahead += min(length, index) * len(turns)
            if turn and length > index:
                ahead += turns.bisect_left(turn)
        return ahead

    def islice(self, start: int) -> Iterator[int]:
        """Yield the orders of the tickets from a rank on. The set must not change meanwhile."""
        yield from self._returned.islice(start)
        start = max(0, start - len(self._returned))
        if len(self._lines) == 1:
            yield from next(iter(self._lines.values())).islice(start)
        elif self._lines:
            index = self._round_of(start)
            skipped = start - self._ahead(index, None)
            while turns := self._turns_of_round(index, skipped):
                for turn in turns:
                    yield self._lines[turn[2]][index]
                index, skipped = index + 1, 0

    def lines(self) -> Iterator[tuple[Turn, Iterator[int]]]:
        """Yield the turn and the orders of each line, in turn."""
        if len(self._lines) == 1:
            ((tenant_id, line),) = self._lines.items()
            yield self.turn_of(tenant_id), iter(line)
        else:
            for turn in self._sorted:
                yield turn, iter(self._lines[turn[2]])

    @property
    def returned(self) -> Iterator[int]:
        """The orders of the tickets that have returned."""
        return iter(self._returned)

    def _round_of(self, start: int) -> int:
        """Return the index of the last round that begins at a rank or before it."""
        low, high = 0, max(self._by_length)
        while high - low > 1:
            middle = (low + high) // 2
            if self._ahead(middle, None) <= start:
                low = middle
            else:
                high = middle
        return low if self._ahead(high, None) > start else high

    def _turns_of_round(self, index: int, skipped: int) -> Iterator[Turn] | None:
        """Return the turns of the lines with more than `index` tickets, except the first ones."""
        if not index:
            return self._sorted.islice(skipped)
        longer = [turns for length, turns in self._by_length.items() if length > index]
        if not longer:
            return None
        return itertools.islice(sorted(itertools.chain(*longer)), skipped, None)

    def _list(self, tenant_id: str) -> None:
        turn = self._turns[tenant_id] = self.turn_of(tenant_id)
        self._sorted.add(turn)
        length = len(self._lines[tenant_id])
        self._by_length.setdefault(length, SortedList()).add(turn)

    def _unlist(self, tenant_id: str) -> bool:
        turn = self._turns.pop(tenant_id, None)
        if turn is None:
            return False
        self._sorted.remove(turn)
        length = len(self._lines[tenant_id])
        self._by_length[length].remove(turn)
        if not self._by_length[length]:
            del self._by_length[length]
        return True
