"""The names of one session: its ids in B and A, its recording's id, and the model it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """The ids of one session; `recording_id` is empty when the session is not recorded.

    `model` is the client's name of the model, in its URL; clients of E get it back. `url_id` is the
    client's own id of the session, in its URL; clients of H get it back. `tenant` is that of the
    client's credential: only clients of the same one may return to the session.

    `may_be_recorded` is true if the edge records sessions, or if the client's credential says
    whether it must be recorded: then a client that is not recorded is told this, too.
    """

    session_id: str  # sess_ and 12 hex digits
    realtime_id: str  # rt_ and a Unix time in milliseconds, as A's specification requires
    recording_id: str = ""
    may_be_recorded: bool = False
    model: str = ""
    url_id: str = ""
    tenant: str = ""

    @property
    def recording_field(self) -> Mapping[str, bool]:
        """The field that tells the client whether it is recorded; empty if the edge never records.

        So nothing changes for the clients of an edge that does not record.
        """
        is_recorded = bool(self.recording_id)
        return {"recording": is_recorded} if is_recorded or self.may_be_recorded else {}
