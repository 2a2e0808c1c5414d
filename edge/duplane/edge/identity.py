"""The names of one session: its id inside and in B, its id in A, and the id of its recording."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """The ids of one session; `recording_id` is empty when the session is not recorded."""

    session_id: str  # sess_ and 12 hex digits
    realtime_id: str  # in A: rt_ and a Unix time in milliseconds, as its specification documents
    recording_id: str = ""
