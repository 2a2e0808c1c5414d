"""How the tools reach a server, and how they read and leave sound."""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import soundfile
from websockets.asyncio.client import connect

from duplane.fabric.audio import OUTPUT_RATE_HERTZ, AudioError, Samples, read_audio_file

_MAX_MESSAGE_BYTES = 16 * 1024 * 1024


def full_url(url: str, path: str) -> str:
    """Fill in what a bare server address leaves out: `path`, with its query.

    Raises ValueError for what is no WebSocket address.
    """
    parts = urlsplit(url if "://" in url else f"ws://{url}")
    if parts.scheme not in ("ws", "wss"):
        raise ValueError(f"url is {url!r}, must begin with ws:// or wss://")
    bare = urlsplit(path)
    place = parts.path if parts.path not in ("", "/") else bare.path
    return urlunsplit((parts.scheme, parts.netloc, place, parts.query or bare.query, ""))


def dial(url: str) -> connect:
    """Connect to a server; to be used in `async with`. No proxy: it would swallow localhost."""
    return connect(url, max_size=_MAX_MESSAGE_BYTES, compression=None, proxy=None)


def read_sound(file: Path | None) -> Samples | None:
    """Return a file's samples at 16 kHz; None of none. Raises ValueError naming the file."""
    try:
        return read_audio_file(file) if file else None
    except AudioError as error:
        raise ValueError(f"{file} {error}") from None


def check_out(out: Path | None) -> None:
    """Find out if `out` can be written while there is nothing to lose. Raises ValueError."""
    if out is None:
        return
    if out.suffix.lower() != ".wav":
        raise ValueError(f"out is {out}, must end in .wav")
    try:
        out.open("ab").close()
    except OSError as error:
        raise ValueError(f"out: {out} cannot be written: {error.strerror}") from None


def write_sound(out: Path | None, pieces: Sequence[Samples]) -> None:
    """Write what was heard, one piece after the other."""
    if out:
        soundfile.write(out, np.concatenate([np.zeros(0, "f4"), *pieces]), OUTPUT_RATE_HERTZ)
