"""The times at which a client's message was received, read and parsed."""

from __future__ import annotations

from typing import NamedTuple

from duplane.edge.clock import Moment


class Receipt(NamedTuple):
    """The times of one message, in wall-clock nanoseconds except `received_s`.

    `received_ns` is the time at which the message's last byte arrived. `read_ns` is the time at
    which the session began to handle the message, and `parsed_ns` the time after its JSON was
    parsed. `received_s` is the monotonic time at which the last byte arrived, to compute durations.
    """

    received_ns: int
    read_ns: int
    parsed_ns: int
    received_s: float

    @classmethod
    def at(cls, now: Moment) -> Receipt:
        """Return the times of a message that was received, read and parsed at one moment."""
        return cls(now.wall_ns, now.wall_ns, now.wall_ns, now.monotonic_s)
