"""The sound and the pictures that a client of dialect E sends for turns of chat. Pure."""

from __future__ import annotations

from typing import cast

from duplane.edge.dialects.e_history import MEDIA_PARTS, Media
from duplane.edge.dialects.openai_sound import decode_append
from duplane.edge.payload.fields import Fields, invalid
from duplane.edge.payload.pictures import decode_data_uri
from duplane.edge.payload.rates import INPUT_RATE_HERTZ
from duplane.edge.payload.sound_format import SoundFormat
from duplane.edge.settings import Limits
from duplane.fabric.audio import SAMPLE_BYTES
from duplane.fabric.resampler import Resampler, resampler

_MAX_PARTS = 128  # of a message


class InputBuffer:
    """The sound since the last commit, at the rate of the dialects.

    Each piece is resampled when it comes: a commit must not take time for the whole sound.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._pcm = bytearray()  # and no list: a client may send one sample at a time
        self._rate_hertz = INPUT_RATE_HERTZ
        self._stream: Resampler | None = None  # None if the rates are equal

    def add(self, pcm: bytes, rate_hertz: int) -> None:
        """Add sound with this rate."""
        if rate_hertz != self._rate_hertz:
            self._end()
            self._rate_hertz = rate_hertz
            self._stream = resampler(rate_hertz, INPUT_RATE_HERTZ)
        self.seconds += len(pcm) / (SAMPLE_BYTES * rate_hertz)
        self._pcm += self._stream.add(pcm) if self._stream else pcm

    def take(self) -> bytes:
        """Return the sound, and begin with the next one."""
        self._end()
        sound = bytes(self._pcm)
        self.clear()
        return sound

    def clear(self) -> None:
        """Drop the sound."""
        if self._stream:
            self._stream.end()
        self._pcm.clear()
        self.seconds = 0.0

    def _end(self) -> None:
        if self._stream:
            self._pcm += self._stream.end()


class UnheardSound:
    """The newest sound that came while the model could not hear it, with the rate of the client."""

    def __init__(self, max_s: float) -> None:
        self.rate_hertz = 0
        self._pcm = b""
        self._max_s = max_s

    def add(self, pcm: bytes, rate_hertz: int) -> None:
        """Add sound. The oldest sound above the bound is dropped."""
        if rate_hertz != self.rate_hertz:
            self.rate_hertz, self._pcm = rate_hertz, b""
        size = int(self._max_s * rate_hertz) * SAMPLE_BYTES
        whole = self._pcm + pcm
        self._pcm = whole[max(0, len(whole) - size) :]

    @property
    def byte_count(self) -> int:
        """The bytes of the sound."""
        return len(self._pcm)

    def take(self) -> bytes:
        """Return the sound, and keep none of it."""
        pcm, self._pcm = self._pcm, b""
        return pcm


def read_media(item: Fields, sound: SoundFormat, limits: Limits) -> Media:
    """Return the sounds and pictures of a message, which is otherwise valid. Raises ClientError.

    Sounds have the format of the session; pictures are data URIs, since the edge fetches nothing.
    """
    media: list[bytes] = []
    left_bytes = limits.chat_media_bytes
    for number, content in enumerate(item.items("content", _MAX_PARTS) or ()):
        if not isinstance(content, dict):
            continue
        part = Fields(cast("dict[str, object]", content), f"{item.path('content')}[{number}]")
        if part.get("type", object) not in MEDIA_PARTS:
            continue
        media.append(_read_content(part, sound, limits))
        left_bytes -= len(media[-1])
        if left_bytes < 0:
            fault = f"brings the media of the message to more than {limits.chat_media_bytes} bytes"
            raise invalid(part.path("audio" if part.first("audio") else "image_url"), fault)
    return media


def _read_content(part: Fields, sound: SoundFormat, limits: Limits) -> bytes:
    if part.whole.get("audio"):
        pcm, _ = decode_append(part, sound, b"", limits.chat_audio_s)
        buffer = InputBuffer()
        buffer.add(pcm, sound.rate_hertz)
        return buffer.take()
    url = part.get("image_url", str)
    return decode_data_uri(url, part.path("image_url"), limits) if url else b""
