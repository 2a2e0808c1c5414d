"""What the dialects of OpenAI's protocols share: the queue, and the samples of appends."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import ClassVar

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import REFUSALS, CloseReason
from duplane.edge.dialects.actions import Append
from duplane.edge.dialects.dialect import Dialect
from duplane.edge.dialects.openai_sound import DEFAULT_FORMAT, decode_append
from duplane.edge.identity import Identity
from duplane.edge.modes import Mode
from duplane.edge.payload.fields import Fields
from duplane.edge.settings import Limits
from duplane.fabric.v1 import lease_pb2


class OpenAIDialect(Dialect, ABC):
    """One client of OpenAI's protocols."""

    refusals: ClassVar[Mapping[CloseReason, ErrorCode]] = {
        **REFUSALS,
        CloseReason.CREDENTIAL_ENDED: ErrorCode.CREDENTIAL_ENDED,
    }

    def __init__(self, identity: Identity, limits: Limits, mode: Mode) -> None:
        super().__init__(identity, limits, mode)
        self.input_sound = self.output_sound = DEFAULT_FORMAT
        self._begun = b""  # the bytes of a sample that is not complete
        self._expires_s: int | None = None  # Unix time; None before the session has its slot

    # --- client events ---

    def _input_id(self, event: Fields) -> str | None:
        event_id = event.whole.get("event_id")
        if not isinstance(event_id, str) or len(event_id.encode()) > self.limits.text_bytes:
            return None
        return event_id

    def _decode_sound(self, event: Fields, *, is_muted: bool = False) -> Append:
        """Decode an append. The bytes of a sample that is not complete wait for the next one."""
        sound = self.input_sound
        audio, rest = decode_append(event, sound, self._begun, self.limits.append_s)
        if is_muted:
            audio = bytes(len(audio))
        kind = event.get("type", str, required=True)
        return Append(audio, kind=kind, rate_hertz=sound.rate_hertz, rest=rest)

    def appended(self, append: Append) -> list[bytes]:
        """Keep the bytes of a sample that is not complete."""
        self._begun = append.rest
        return []

    # --- the session ---

    @property
    def queue_s(self) -> float:
        """How long a client waits in the queue, at most: it cannot be told its position."""
        return self.limits.openai_queue_s

    def started(self, session_s: float, now: Moment) -> None:
        """Note that the session has its slot, and ends after `session_s`."""
        self._expires_s = int(now.wall_s + session_s)

    def _expires_at(self, now: Moment) -> int:
        """Return the Unix time at which the session ends."""
        if self._expires_s is not None:
            return self._expires_s
        return int(now.wall_s + (self.limits.session_s or self.mode.session_s))

    # --- server events ---

    def queued(self, queued: lease_pb2.Queued, *, is_update: bool) -> list[bytes]:
        """Render nothing: these protocols have no event for the queue."""
        del queued, is_update
        return []

    def queue_done(self) -> list[bytes]:
        """Render nothing: these protocols have no event for the queue."""
        return []
