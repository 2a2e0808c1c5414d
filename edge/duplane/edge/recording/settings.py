"""Settings of recording: the directory, the choice of sessions, and the limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs

from cyclopts import Parameter, Token

from duplane.fabric.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, check_bounds

_AGREED = frozenset({"on", "1", "true", "yes"})


class Consent(StrEnum):
    """Which sessions are recorded, depending on `?recording=on` or `off` in their URL.

    The credential of a client can decide instead: it may forbid or require recording.
    """

    ALWAYS = "always"  # every session; the parameter is ignored
    UNLESS_REFUSED = "unless_refused"  # every session, except those whose URL has `recording=off`
    ON_REQUEST = "on_request"  # only sessions whose URL has `recording=on`


_UNLIMITED = "unlimited"


def _seconds(_: object, tokens: Sequence[Token]) -> float:
    days = tokens[0].value
    return math.inf if days == _UNLIMITED else float(days) * 86_400


def _bytes(_: object, tokens: Sequence[Token]) -> int:
    return int(float(tokens[0].value) * 1e9)


@Parameter(name="*", group="Recording")
@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """Settings of recording, if a directory is given. Sizes are bytes, times are seconds.

    A bound that is None does not apply. Raises ValueError naming the setting that is out of range.
    """

    directory: Annotated[Path, Parameter("--record")]
    """Directory for recordings of sessions. By default nothing is recorded, and no other flag of
    recording can be set."""
    consent: Annotated[Consent, Parameter("--record-consent")] = Consent.ON_REQUEST
    """Sessions to record: all sessions (`always`), sessions without `?recording=off` in their URL
    (`unless_refused`), or only sessions with `?recording=on`. If the client's token forbids or
    requires recording, the token decides."""
    queue_bytes: Annotated[NonNegativeInt, Parameter("--record-queue-bytes")] = 64 * 1024 * 1024
    """Largest size of all events that wait to be written. Further events are missing from their
    recordings, which are marked as incomplete; sessions are not affected."""
    session_bytes: Annotated[NonNegativeInt, Parameter("--record-session-bytes")] = 1024**3
    """Largest size of one recording. A recording that reaches it ends; its session continues."""
    replay_bytes: Annotated[NonNegativeInt, Parameter("--record-replay-bytes")] = 512 * 1024 * 1024
    """Largest size of the mixed replay of a recording (the default holds 93 minutes). A longer
    recording has no replay."""
    upload_bytes: Annotated[NonNegativeInt, Parameter("--record-upload-bytes")] = 200 * 1024 * 1024
    """Largest size of one upload to a recording."""
    upload_s: Annotated[NonNegativeFloat, Parameter("--record-upload-s")] = 600.0
    """Time limit for one upload to a recording."""
    max_age_s: Annotated[
        NonNegativeFloat | None, Parameter("--record-days", converter=_seconds)
    ] = None
    """Days to keep recordings; older ones are deleted. Running recordings are never deleted. An
    edge that records does not start without this flag; `unlimited` keeps recordings until somebody
    deletes them."""
    max_total_bytes: Annotated[
        NonNegativeInt | None, Parameter("--record-gigabytes", converter=_bytes)
    ] = None
    """Largest size of all recordings in gigabytes; above it the oldest are deleted."""
    sweep_interval_s: Annotated[PositiveFloat, Parameter("--record-sweep-interval-s")] = 3600.0
    """Seconds between two deletions of old recordings."""

    def __post_init__(self) -> None:
        check_bounds(self)

    def is_recorded(self, path: str, may_record: bool | None = None) -> bool:
        """Return whether a session with this URL path and query is recorded.

        `may_record` is what the client's credential says: False forbids recording, True requires
        it, None leaves it to the URL.
        """
        if may_record is not None:
            return may_record
        query = parse_qs(path.partition("?")[2], keep_blank_values=True)
        answers = query.get("recording", [])
        # Any other word counts as a refusal.
        is_agreed = all(answer.lower() in _AGREED for answer in answers)
        match self.consent:
            case Consent.ALWAYS:
                return True
            case Consent.UNLESS_REFUSED:
                return is_agreed
            case Consent.ON_REQUEST:
                return is_agreed and bool(answers)
