"""The bounds that the decoder process of a video gets, and the error of a file it refuses."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson

STACKED_FRAMES = 4
"""Pictures joined side by side have at most the pixels of this many of the largest pictures."""


@dataclass(frozen=True)
class VideoBounds:
    """Bounds of one file and of the process that decodes it. A file above them is refused.

    `frame_pixels` bounds one picture; `memory_bytes` and `cpu_s` bound the process.
    """

    stack_frames: int
    duration_s: float
    frame_pixels: int
    memory_bytes: int
    cpu_s: int

    @property
    def output_bytes(self) -> int:
        """Upper bound of one output: pictures joined side by side, or all the sound."""
        return max(STACKED_FRAMES * self.frame_pixels * 3, int(self.duration_s + 1) * 16_000 * 4)

    def to_json(self) -> str:
        """Return the bounds as JSON, for `from_json`."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: str) -> VideoBounds:
        """Read the bounds from JSON."""
        return cls(**orjson.loads(text))


class VideoError(Exception):
    """A file that cannot be decoded; the message names the fault."""
