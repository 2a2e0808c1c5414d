"""The decoder process of one video file: reads the file on stdin, writes pictures and sound.

Video decoders are large and have had exploitable faults, so each file is decoded in a process of
its own. `decoding.py` starts this program with bounds and reads its output:

Before it decodes the file, the process confines itself (`sandbox.py`): from then on it can open no
file or socket and start no process.

- argv: the bounds as JSON; see `VideoBounds`;
- stdin: the file;
- stdout: one line of JSON for each output, `{"picture": [width, height]}` or `{"sound": samples}`,
  followed by its bytes (RGB; float32 at 16 kHz). The last line is `{}`, or `{"fault": text}`.
"""

from __future__ import annotations

import errno
import io
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import av
import av.container
import av.error
import av.logging
import numpy as np
import orjson
import soxr  # pyright: ignore[reportMissingTypeStubs]  it ships none
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from duplane.fabric.audio import INPUT_RATE_HERTZ
from duplane.worker.models.minicpm_o.vision.video_layout import Scene, plan_scenes, side_by_side
from duplane.worker.sandbox import SandboxError, confine
from duplane.worker.video.bounds import STACKED_FRAMES, VideoBounds, VideoError
from duplane.worker.video.sample import SAMPLE

# No other formats are allowed, because FFmpeg also reads playlists, which can name other files.
_FORMATS = "mov,mp4,matroska,webm,avi,mpegts"
_CODECS = (
    "h264,hevc,vp8,vp9,libdav1d,av1,mpeg4,mpeg2video,mjpeg,ffv1,rawvideo,"
    "aac,mp3,mp3float,opus,libopus,vorbis,flac,ac3,eac3,"
    "pcm_s16le,pcm_s16be,pcm_s24le,pcm_s32le,pcm_f32le,pcm_u8,pcm_mulaw,pcm_alaw"
)
# Maps the angle in degrees, counter-clockwise, to the operation of Pillow.
_ROTATIONS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}
_THREADS = 2
_ON_TIME_S = 0.0015  # tolerance for files that store times in milliseconds
_MAX_RATE_HERTZ = 192_000


@dataclass(frozen=True)
class _Timeline:
    """The pictures' times in seconds after the first one, and their timestamps in stream units.

    `keys` are the timestamps (pts) of pictures at which decoding can begin; `seeks` are the
    timestamps with which to seek to these pictures.
    """

    times_s: np.ndarray
    pts: np.ndarray
    keys: np.ndarray
    seeks: np.ndarray
    duration_s: float

    def at(self, time_s: float) -> int:
        """Return the timestamp (pts) of the picture that is shown at a time."""
        index = int(np.searchsorted(self.times_s, time_s + _ON_TIME_S, side="right")) - 1
        return int(self.pts[max(index, 0)])


def decode_video(file: BinaryIO, bounds: VideoBounds) -> Iterator[Image.Image | np.ndarray]:
    """Yield the pictures, and the sounds as float32 [samples], in the order of the model's input.

    Raises VideoError.
    """
    with _open(file) as container:
        timeline = _timeline(container, _video_of(container, bounds))
    if timeline.duration_s > bounds.duration_s:
        fault = f"lasts {timeline.duration_s:.0f} s, more than {bounds.duration_s:g} s"
        raise VideoError(fault)
    scenes = plan_scenes(timeline.duration_s, bounds.stack_frames)
    with _open(file) as container:
        sound = _sound(container, timeline.duration_s)
    with _open(file) as container:
        pictures = _Pictures(container, timeline, bounds)
        for scene in scenes:
            yield from _show(scene, pictures, sound, is_last=scene is scenes[-1])


def _show(
    scene: Scene, pictures: _Pictures, sound: np.ndarray | None, *, is_last: bool
) -> Iterator[Image.Image | np.ndarray]:
    yield pictures.at(scene.time_s)
    if sound is not None:
        samples = scene.cut(sound, INPUT_RATE_HERTZ, is_last=is_last)
        if samples.size:
            yield samples
    if scene.stacked_s:
        yield pictures.stacked(scene.stacked_s)


def _open(file: BinaryIO) -> av.container.InputContainer:
    file.seek(0)
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "", "codec_whitelist": _CODECS}
    try:
        return av.open(file, "r", options=options, metadata_errors="ignore")
    except av.error.FFmpegError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError from None
        raise VideoError("is no video file that can be read here") from None


def _video_of(container: av.container.InputContainer, bounds: VideoBounds) -> VideoStream:
    if not container.streams.video:
        raise VideoError("has no pictures")
    stream = container.streams.video[0]
    # The codec may be unknown, although the library's stubs do not declare that.
    if getattr(stream, "codec_context", None) is None:
        raise VideoError("has a video codec that is not supported")
    _check_pixels(stream.width, stream.height, bounds)
    context = stream.codec_context
    context.options = {"max_pixels": str(bounds.frame_pixels), "threads": str(_THREADS)}
    return stream


def _check_pixels(width: int, height: int, bounds: VideoBounds) -> None:
    if not 0 < width * height <= bounds.frame_pixels:
        fault = f"has pictures of {width} x {height} pixels, more than {bounds.frame_pixels}"
        raise VideoError(fault if width * height else "has pictures without a size")


def _timeline(container: av.container.InputContainer, stream: VideoStream) -> _Timeline:
    """Read the times of the pictures without decoding them."""
    pts: list[int] = []
    keys: dict[int, int] = {}
    last_span = 0
    try:
        for packet in container.demux(stream):
            shown = packet.pts if packet.pts is not None else packet.dts
            if shown is None or packet.size == 0:
                continue
            pts.append(shown)
            if packet.is_keyframe:
                keys[shown] = shown if packet.dts is None else min(shown, packet.dts)
            last_span = packet.duration or last_span
    except av.error.FFmpegError:
        pass  # the file is truncated; the beginning is used
    if not pts or stream.time_base is None:
        raise VideoError("has no pictures")
    ordered = np.unique(np.array(pts))
    unit_s = float(stream.time_base)
    times_s = (ordered - ordered[0]) * unit_s
    rate = float(stream.average_rate or 0)
    span_s = float(times_s[-1]) + last_span * unit_s
    counted_s = len(ordered) / rate if rate else 0.0
    # At a constant rate the number of pictures gives a more exact duration than the timestamps.
    is_even = abs(counted_s - span_s) * rate < 2
    return _Timeline(
        times_s,
        ordered,
        np.array(sorted(keys)),
        np.array([keys[key] for key in sorted(keys)]),
        counted_s if is_even else span_s,
    )


class _Pictures:
    """Decodes the pictures of a file at ascending times."""

    def __init__(
        self, container: av.container.InputContainer, timeline: _Timeline, bounds: VideoBounds
    ) -> None:
        self._container = container
        self._timeline = timeline
        self._bounds = bounds
        self._stream = _video_of(container, bounds)
        self._frames = self._decoded()
        self._shown: VideoFrame | None = None  # the latest decoded frame
        self._picture: Image.Image | None = None
        self._picture_pts = -1

    def at(self, time_s: float) -> Image.Image:
        """Return the picture shown at a time, or the latest good picture if that one is broken."""
        wanted = self._timeline.at(time_s)
        if self._picture is not None and self._picture_pts == wanted:
            return self._picture
        self._skip_to(wanted)
        while self._shown is None or _time_of(self._shown) < wanted:
            frame = next(self._frames, None)
            if frame is None:
                break
            self._shown = frame
        if self._shown is None:
            raise VideoError("has no picture that can be decoded")
        _check_pixels(self._shown.width, self._shown.height, self._bounds)
        self._picture = _upright(self._shown)
        self._picture_pts = wanted
        return self._picture

    def stacked(self, times_s: Sequence[float]) -> Image.Image:
        """Return the pictures of several times, joined side by side."""
        stacked = [self.at(time_s) for time_s in times_s]
        pixels = sum(picture.width * picture.height for picture in stacked)
        most = STACKED_FRAMES * self._bounds.frame_pixels
        if pixels > most:
            raise VideoError(f"has {len(stacked)} pictures to stack, together over {most} pixels")
        return side_by_side(stacked)

    def _skip_to(self, wanted: int) -> None:
        """Seek to a key picture, if there is one between the current picture and the wanted one."""
        keys = self._timeline.keys
        at = int(np.searchsorted(keys, wanted, side="right")) - 1
        if at <= 0 or self._shown is None or int(keys[at]) <= _time_of(self._shown):
            return
        try:
            target = int(self._timeline.seeks[at])
            self._container.seek(target, stream=self._stream, backward=True)
        except av.error.FFmpegError:
            return  # all pictures in between are decoded
        self._frames = self._decoded()

    def _decoded(self) -> Iterator[VideoFrame]:
        """Decode from the current position; skip broken packets."""
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets, None)
            except av.error.FFmpegError:
                return
            if packet is None:
                return
            try:
                frames = packet.decode()
            except av.error.FFmpegError:
                continue
            yield from frames


def _upright(frame: VideoFrame) -> Image.Image:
    """Rotate a picture by the angle in the file: phones record sideways and store the angle."""
    picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
    rotation = _ROTATIONS.get(frame.rotation % 360)
    return picture if rotation is None else picture.transpose(rotation)


def _time_of(frame: VideoFrame) -> int:
    """Return the frame's presentation time, else its decoding time, in units of the stream."""
    return frame.pts if frame.pts is not None else frame.dts or 0


def _sound(container: av.container.InputContainer, duration_s: float) -> np.ndarray | None:
    """Return the first `duration_s` of sound, mono at 16 kHz, or None if decoding fails."""
    if not container.streams.audio:
        return None
    stream = container.streams.audio[0]
    context = getattr(stream, "codec_context", None)  # None: FFmpeg does not know the codec
    if context is None or not 0 < context.sample_rate <= _MAX_RATE_HERTZ:
        return None
    to_float = av.AudioResampler(format="fltp")
    to_rate: soxr.ResampleStream | None = None
    resampled: list[np.ndarray] = []
    wanted = int(duration_s * INPUT_RATE_HERTZ)
    sample_count = 0
    try:
        for decoded in container.decode(stream):
            for frame in to_float.resample(decoded):
                mono = frame.to_ndarray().mean(axis=0, dtype=np.float32)
                to_rate = to_rate or soxr.ResampleStream(frame.sample_rate, INPUT_RATE_HERTZ, 1)
                resampled.append(to_rate.resample_chunk(mono))
                sample_count += len(resampled[-1])
            if sample_count >= wanted:
                break
    except (av.error.FFmpegError, ValueError):
        pass  # the format changes, or a packet is broken; the beginning is used
    if to_rate is None:
        return None
    resampled.append(to_rate.resample_chunk(np.zeros(0, np.float32), last=True))
    samples = np.concatenate(resampled)[:wanted]
    return np.nan_to_num(samples, posinf=0.0, neginf=0.0).astype("<f4")


def _bound_process(bounds: VideoBounds) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, bounds.memory_bytes),
        (resource.RLIMIT_CPU, bounds.cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def main() -> None:
    """Decode the file on stdin and write its pictures and sound to stdout."""
    bounds = VideoBounds.from_json(sys.argv[1])
    _bound_process(bounds)
    av.logging.set_level(None)
    out = sys.stdout.buffer
    fault: dict[str, str] = {}
    try:
        for output in decode_video(_read_confined(bounds), bounds):
            if isinstance(output, Image.Image):
                _write(out, {"picture": [output.width, output.height]}, output.tobytes())
            else:
                _write(out, {"sound": len(output)}, output.tobytes())
    except VideoError as error:
        fault = {"fault": str(error)}
    except SandboxError as error:
        fault = {"fault": f"cannot be decoded: {error}"}
    except MemoryError:
        fault = {"fault": "takes too much memory to decode"}
    _write(out, fault, b"")


def _read_confined(bounds: VideoBounds) -> BinaryIO:
    """Read the file, and confine the process. Raises SandboxError, MemoryError."""
    if bounds.is_confined:
        # PyAV and Pillow import some modules at their first use, which needs files.
        own = replace(bounds, stack_frames=2, duration_s=60, frame_pixels=1 << 20)
        for output in decode_video(io.BytesIO(SAMPLE), own):
            output.tobytes()
    file = io.BytesIO(sys.stdin.buffer.read())
    if bounds.is_confined:
        confine()
    return file


def _write(out: BinaryIO, head: dict[str, object] | dict[str, str], content: bytes) -> None:
    out.write(orjson.dumps(head) + b"\n")
    out.write(content)
    out.flush()


if __name__ == "__main__":
    main()
