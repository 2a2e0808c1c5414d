"""Recordings of rooms: which of them training may use, and how they are read."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from duplane.worker.models.types import FloatArray
from training.corpus.clips import joined, read_clip
from training.sources.catalogue import Purpose
from training.sources.fetching import find_source

HELD_OUT_ROOMS = ("crowded-room", "office-ambience")
"""Rooms that training must not use."""
TRAINED_ROOMS = (
    *("city-ambience", "forest-ambience", "hold_music", "keyboard-typing", "keyboard-typing2"),
)
ROOMS = (*HELD_OUT_ROOMS, *TRAINED_ROOMS)
_FOLDER = Path("livekit/agents/resources")


def rooms_of(cache_folder: Path, purpose: Purpose) -> dict[str, Path]:
    """Return the file of each room for a purpose; none if the source is not fetched.

    A room that judges is no room of training. Rooms of training may judge too: the table shows
    them apart.
    """
    folder = find_source("rooms", cache_folder, purpose)
    if folder is None:
        return {}
    names = TRAINED_ROOMS if purpose == "training" else ROOMS
    return {name: folder / _FOLDER / f"{name}.ogg" for name in names}


@cache
def read_room(path: Path) -> FloatArray:
    """Return the recording of a room, with an RMS of 0.1."""
    return joined([read_clip(path)], [])
