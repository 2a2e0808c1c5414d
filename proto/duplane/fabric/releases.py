"""The release of this process, and the additions to the contract that its workers know."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

# Additions that a worker of this release knows and that a worker of an older one ignores. A name is
# never given a second meaning.
WORKER_FEATURES: Sequence[str] = (
    "end_session",  # Revoke.is_end
    "lease_metadata",  # the lease of a chat in the metadata of the call
    "past_audio_exponent",  # PastUnit.audio_exponent
    "past_row_count",  # PastUnit.row_count, if the model accepts it
    "speech_requests",  # Unit.speech_requests, if the model accepts them
    "unit_audio_int16",  # Unit.audio_int16
    "undrain",  # AttachResponse.undrain
)
MAX_FEATURE_COUNT = 64
MAX_FEATURE_LENGTH = 64


def own_release() -> str:
    """Return the version of the package that this process runs."""
    return importlib.metadata.version("duplane")
