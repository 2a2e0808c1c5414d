"""What the process that decodes a video is told, and what its file may be at fault with."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson


@dataclass(frozen=True)
class VideoBounds:
    """What one file may ask for; above it, it is refused.

    `frame_pixels` are those of one picture, `memory_bytes` and `cpu_s` are the process's.
    """

    stack_frames: int
    duration_s: float
    frame_pixels: int
    memory_bytes: int
    cpu_s: int

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: str) -> VideoBounds:
        """Read the bounds."""
        return cls(**orjson.loads(text))


class VideoError(Exception):
    """A file that cannot be shown; the message says what is wrong with it."""
