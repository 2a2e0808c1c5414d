"""Settings of recording: where sessions are recorded, which ones, and how much is kept."""

from __future__ import annotations

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
    """Which sessions are recorded, given `?recording=on` or `?recording=off` in their URL."""

    ALWAYS = "always"  # every session; the parameter is ignored
    UNLESS_REFUSED = "unless_refused"  # every session whose URL does not refuse
    ON_REQUEST = "on_request"  # only sessions whose URL agrees


def _seconds(_: object, tokens: Sequence[Token]) -> float:
    return float(tokens[0].value) * 86_400


def _bytes(_: object, tokens: Sequence[Token]) -> int:
    return int(float(tokens[0].value) * 1e9)


@Parameter(name="*", group="Recording")
@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """Recording, once a directory is given. Sizes in bytes, times in seconds, None for no bound.

    Raises ValueError naming the bound that is out of range.
    """

    directory: Annotated[Path, Parameter("--record")]
    """Directory to record sessions in. Default: nothing is recorded, and no other flag of
    recording can be set."""
    consent: Annotated[Consent, Parameter("--record-consent")] = Consent.ALWAYS
    """Sessions to record: all, those whose URL does not say `?recording=off`, or only those whose
    URL says `?recording=on`."""
    queue_bytes: Annotated[NonNegativeInt, Parameter("--record-queue-bytes")] = 64 * 1024 * 1024
    """Bytes of events of all sessions that wait to be written. Events above it are missing in
    their recordings, which say so; sessions are not affected."""
    session_bytes: Annotated[NonNegativeInt, Parameter("--record-session-bytes")] = 1024**3
    """Bytes of one recording. A recording that reaches them ends; its session continues."""
    replay_bytes: Annotated[NonNegativeInt, Parameter("--record-replay-bytes")] = 512 * 1024 * 1024
    """Bytes of the mixed replay of a recording (the default is 93 minutes); a longer recording
    has none."""
    upload_bytes: Annotated[NonNegativeInt, Parameter("--record-upload-bytes")] = 200 * 1024 * 1024
    """Bytes of one upload to a recording."""
    upload_s: Annotated[NonNegativeFloat, Parameter("--record-upload-s")] = 600.0
    """Seconds for one upload to a recording to arrive."""
    max_age_s: Annotated[
        NonNegativeFloat | None, Parameter("--record-days", converter=_seconds)
    ] = None
    """Days to keep recordings; older ones are deleted. Running recordings are never deleted."""
    max_total_bytes: Annotated[
        NonNegativeInt | None, Parameter("--record-gigabytes", converter=_bytes)
    ] = None
    """Gigabytes of all recordings; above it the oldest are deleted."""
    sweep_interval_s: Annotated[PositiveFloat, Parameter("--record-sweep-interval-s")] = 3600.0
    """Seconds between two deletions of old recordings."""

    def __post_init__(self) -> None:
        check_bounds(self)

    def is_recorded(self, path: str) -> bool:
        """Return whether a session with this URL path and query is recorded."""
        query = parse_qs(path.partition("?")[2], keep_blank_values=True)
        answers = query.get("recording", [])
        # Any other word is a refusal.
        is_agreed = all(answer.lower() in _AGREED for answer in answers)
        match self.consent:
            case Consent.ALWAYS:
                return True
            case Consent.UNLESS_REFUSED:
                return is_agreed
            case Consent.ON_REQUEST:
                return is_agreed and bool(answers)
