"""Reference voices that operators upload: WAV files in a directory, and an index of these files.

Several edges may share the directory, so the index is read for each call and written under a lock.
All methods use the disk: call them in a thread.
"""

# soundfile has no type stubs.
from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import pybase64
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none

from duplane.edge.payload.rates import VOICE_RATE_HERTZ
from duplane.edge.settings import Limits
from duplane.fabric.audio import (
    AudioError,
    Samples,
    pcm_from_samples,
    read_audio_file,
    read_client_wav,
)
from duplane.fabric.files import replacing, write_atomically

INDEX = "registry.json"
_LOCK = ".lock"
_HEADER_BYTES = 44
_SAMPLE_BYTES = 2


@dataclass(frozen=True, slots=True)
class StoredVoice:
    """One voice, with the field names of the reference server's index."""

    id: str
    name: str
    filename: str
    source_type: str
    duration_ms: int
    sample_rate: int
    created_at: str  # ISO 8601


class VoicesFullError(Exception):
    """The directory has no room for another voice; the message names the bound."""


class VoiceStore:
    """The voices in one directory. Methods raise OSError if the disk or the index fails."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        """Open the directory. Raises ValueError if the directory cannot be used."""
        self._directory = directory
        self._limits = limits
        try:
            self.listed()
            with self._locked():
                pass
        except OSError as error:
            raise ValueError(f"ref_audio: {error}") from None

    def listed(self) -> Sequence[StoredVoice]:
        """Return all voices, the oldest first."""
        path = self._directory / INDEX
        try:
            known: Any = orjson.loads(path.read_bytes())
            names = [each.name for each in fields(StoredVoice)]
            return [StoredVoice(**{name: row[name] for name in names}) for row in known]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, KeyError) as error:
            raise OSError(f"{path} is not an index of voices: {error}") from None

    def add(self, name: str, audio_file: bytes, now: datetime) -> StoredVoice:
        """Store a WAV file as mono PCM16 at 16 kHz. Raises AudioError, VoicesFullError."""
        max_s = self._limits.ref_audio_s
        samples = read_client_wav(audio_file, rate_hertz=VOICE_RATE_HERTZ, max_s=max_s)
        if not samples.size:
            raise AudioError("is empty")
        voice_id = str(uuid.uuid4())
        duration_ms = round(samples.size / VOICE_RATE_HERTZ * 1e3)
        voice = StoredVoice(
            id=voice_id,
            name=name,
            filename=f"{voice_id}.wav",
            source_type="upload",
            duration_ms=duration_ms,
            sample_rate=VOICE_RATE_HERTZ,
            created_at=now.isoformat(),
        )
        with self._locked():
            voices = self.listed()
            self._check_bounds(voices, samples.size)
            self._write(self._path(voice), samples)
            self._write_index([*voices, voice])
        return voice

    def remove(self, voice_id: str) -> StoredVoice | None:
        """Delete a voice and return it; None if there is no voice with this id."""
        with self._locked():
            voices = self.listed()
            removed = next((each for each in voices if each.id == voice_id), None)
            if removed is not None:
                self._write_index([each for each in voices if each.id != voice_id])
                self._path(removed).unlink(missing_ok=True)
        return removed

    def read(self, voice_id: str) -> dict[str, object] | None:
        """Return a voice in the form of `/api/default_ref_audio`; None for an unknown id."""
        voice = next((each for each in self.listed() if each.id == voice_id), None)
        if voice is None:
            return None
        try:
            samples = read_audio_file(self._path(voice), rate_hertz=VOICE_RATE_HERTZ)
        except AudioError as error:
            raise OSError(f"voice {voice_id} {error}") from None
        return {
            "name": voice.name,
            "duration": samples.size / VOICE_RATE_HERTZ,
            "sample_rate": VOICE_RATE_HERTZ,
            "samples": samples.size,
            "base64": pybase64.b64encode_as_string(pcm_from_samples(samples)),
        }

    def _check_bounds(self, voices: Sequence[StoredVoice], sample_count: int) -> None:
        limits = self._limits
        if len(voices) >= limits.ref_audio_count:
            raise VoicesFullError(f"there are {limits.ref_audio_count} already")
        used = sum(self._size_bytes(each) for each in voices)
        if used + _HEADER_BYTES + sample_count * _SAMPLE_BYTES > limits.ref_audio_total_bytes:
            raise VoicesFullError(
                f"together they would be over {limits.ref_audio_total_bytes} bytes"
            )

    def _size_bytes(self, voice: StoredVoice) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self._path(voice).stat().st_size
        return 0

    def _path(self, voice: StoredVoice) -> Path:
        """Return the file of a voice. Names in the index cannot lead out of the directory."""
        return self._directory / Path(voice.filename).name

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        lock = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _write(self, path: Path, samples: Samples) -> None:
        try:
            with replacing(path) as part:
                soundfile.write(part, samples, VOICE_RATE_HERTZ, "PCM_16", format="WAV")
        except soundfile.LibsndfileError as error:
            raise OSError(error.error_string) from None

    def _write_index(self, voices: Sequence[StoredVoice]) -> None:
        rows = [asdict(voice) for voice in voices]
        write_atomically(self._directory / INDEX, orjson.dumps(rows, option=orjson.OPT_INDENT_2))
