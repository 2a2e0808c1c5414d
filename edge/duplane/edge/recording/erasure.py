"""Deletes one recording, or all recordings of one person, when an operator asks for it.

All functions use the disk: call them in a thread. They raise OSError if files cannot be deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from duplane.edge.recording.queries import find_recording
from duplane.edge.recording.storage import delete_recording, read_meta, recordings


class AmbiguousSubjectError(ValueError):
    """Several tenants have a user with this id, and the operator has named no tenant."""


def erase_recording(root: Path, name: str) -> bool:
    """Delete one recording, also a running one; return False if there is no such recording."""
    directory = find_recording(root, name)
    if directory is None:
        return False
    delete_recording(directory)
    return True


def erase_subject(root: Path, subject: str, tenant: str | None) -> Sequence[str]:
    """Delete all recordings of one user of a tenant, also running ones; return their names.

    `tenant` is empty for sessions without a tenant. None means the only tenant that has recordings
    of such a user. Raises AmbiguousSubjectError if there are several.
    """
    found = {
        directory: meta.identity.get("tenant", "")
        for directory in recordings(root)
        if (meta := read_meta(directory)) and meta.identity.get("subject") == subject
    }
    if tenant is None and len(set(found.values())) > 1:
        raise AmbiguousSubjectError
    erased = [path for path, owner in found.items() if tenant is None or owner == tenant]
    for directory in erased:
        with contextlib.suppress(FileNotFoundError):  # somebody else has just deleted it
            delete_recording(directory)
    return [directory.name for directory in erased]
