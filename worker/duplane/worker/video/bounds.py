"""The bounds of a video's decoder process, and the error for a refused file."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson

STACKED_FRAMES = 4
"""Maximum number of pixels of pictures joined side by side, as a multiple of
`VideoBounds.frame_pixels`."""


@dataclass(frozen=True)
class VideoBounds:
    """Bounds of one file and of the process that decodes it. Files that exceed a bound are refused.

    `frame_pixels` bounds one picture; `memory_bytes` and `cpu_s` bound the process. If it
    `is_confined`, the process has no access to files, network and other processes.
    """

    stack_frames: int
    duration_s: float
    frame_pixels: int
    memory_bytes: int
    cpu_s: int
    is_confined: bool = True

    @property
    def output_bytes(self) -> int:
        """Upper bound of one output in bytes: pictures joined side by side, or the whole sound."""
        return max(STACKED_FRAMES * self.frame_pixels * 3, int(self.duration_s + 1) * 16_000 * 4)

    def to_json(self) -> str:
        """Return the bounds as JSON, for `from_json`."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: str) -> VideoBounds:
        """Read the bounds from JSON."""
        return cls(**orjson.loads(text))


class VideoError(Exception):
    """A file that cannot be decoded, with the reason as message."""
