"""The ids of one session: its session id (B uses it, too), its id in A, its recording's id."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """The ids of one session; `recording_id` is empty when the session is not recorded."""

    session_id: str  # sess_ and 12 hex digits
    realtime_id: str  # rt_ and a Unix time in milliseconds, as A's specification requires
    recording_id: str = ""
