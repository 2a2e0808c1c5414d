"""Whether, where and how long sessions are recorded; off unless a directory is given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import parse_qs


class Consent(StrEnum):
    """What a client's own wish counts for: `?recording=on` or `?recording=off` in its URL."""

    ALWAYS = "always"  # nothing: every session is recorded
    UNLESS_REFUSED = "unless_refused"
    ON_REQUEST = "on_request"


@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """Recording, once it is switched on. Sizes in bytes, times in seconds, None for no bound."""

    directory: Path
    consent: Consent = Consent.ALWAYS

    # Events on their way to the disk, of all sessions. Those above it are lost to the recording,
    # which says so; the sessions do not notice.
    queue_bytes: int = 64 * 1024 * 1024
    session_bytes: int = 1024 * 1024 * 1024  # of one recording; it ends there, the session not
    replay_bytes: int = 512 * 1024 * 1024  # of its mix, 93 minutes; what is longer has none

    # What a page has recorded itself, sent afterwards.
    upload_bytes: int = 200 * 1024 * 1024
    upload_s: float = 600.0

    # The oldest go first; recordings that still run never.
    max_age_s: float | None = None
    max_total_bytes: int | None = None
    sweep_interval_s: float = 3600.0

    def is_wanted(self, path: str) -> bool:
        """Tell whether a session that came to this path and query is to be recorded."""
        wish = parse_qs(path.partition("?")[2]).get("recording", [""])[0].lower()
        match self.consent:
            case Consent.ALWAYS:
                return True
            case Consent.UNLESS_REFUSED:
                return wish not in ("off", "0", "false")
            case Consent.ON_REQUEST:
                return wish in ("on", "1", "true")


def recording_settings(
    directory: Path | None, consent: str, days: float | None, gigabytes: float | None
) -> RecordingSettings | None:
    """Return the settings as people give them; None when nothing is recorded.

    Raises ValueError for a consent there is not.
    """
    if consent not in list(Consent):
        raise ValueError(f"record-consent: {consent!r} is not one of {', '.join(Consent)}")
    if directory is None:
        return None
    return RecordingSettings(
        directory,
        Consent(consent),
        max_age_s=None if days is None else days * 86_400,
        max_total_bytes=None if gigabytes is None else int(gigabytes * 1e9),
    )
