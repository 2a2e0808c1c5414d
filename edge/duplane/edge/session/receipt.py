"""When a client's message was received and parsed."""

from __future__ import annotations

from typing import NamedTuple

from duplane.edge.clock import Moment


class Receipt(NamedTuple):
    """The times of one message, in wall-clock nanoseconds.

    `received_ns` is that of its last byte, `read_ns` the one at which the session took it.
    """

    received_ns: int
    read_ns: int
    parsed_ns: int

    @classmethod
    def at(cls, now: Moment) -> Receipt:
        """Return the times of a message that waited for nothing."""
        return cls(now.wall_ns, now.wall_ns, now.wall_ns)
