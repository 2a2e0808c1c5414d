"""Makes video files for tests. Each picture is one shade of grey, which identifies the picture."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np


def make_video(
    seconds: float = 3.0,
    *,
    rate: int = 10,
    size: tuple[int, int] = (64, 48),
    container: str = "mp4",
    codec: str = "libx264",
    sound: str | None = "aac",
    sound_s: float | None = None,
    times_s: list[float] | None = None,
) -> bytes:
    """Make a video of this length, or with pictures at these times. Its sound is a stereo tone.

    The grey of picture `n` is about `grey(n)`.
    """
    buffer = io.BytesIO()
    unit = Fraction(1, 1000 if times_s else rate)
    times_s = times_s or [number / rate for number in range(round(seconds * rate))]
    with av.open(buffer, "w", format=container) as out:
        video: Any = out.add_stream(codec, rate=rate)
        video.width, video.height = size
        video.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        video.time_base = unit
        audio: Any = out.add_stream(sound, rate=48_000, layout="stereo") if sound else None
        for number, time_s in enumerate(times_s):
            pixels = np.full((size[1], size[0], 3), grey(number), np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = round(time_s / unit)
            frame.time_base = unit
            out.mux(video.encode(frame))
        out.mux(video.encode(None))
        if audio is not None:
            count = int((sound_s or seconds) * 48_000)
            tone = 0.3 * np.sin(np.arange(count) * 2 * np.pi * 440 / 48_000)
            block = np.stack([tone, tone]).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="stereo")
            frame.sample_rate = 48_000
            frame.pts = 0
            frame.time_base = Fraction(1, 48_000)
            fifo = av.AudioFifo()
            fifo.write(frame)
            while fifo.samples:
                piece = fifo.read(audio.codec_context.frame_size or 1024, partial=True)
                out.mux(audio.encode(piece))
            out.mux(audio.encode(None))
    return buffer.getvalue()


def grey(number: int) -> int:
    """Return the grey of a picture. Consecutive greys differ by more than the error of a codec."""
    return 20 + number * 37 % 200
