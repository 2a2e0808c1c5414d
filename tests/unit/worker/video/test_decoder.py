"""Video files of every supported kind: the right pictures, the right sound, clear errors."""

from __future__ import annotations

import io
import struct
from dataclasses import replace
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.model.video_files import grey, make_video

from duplane.worker.video.bounds import VideoBounds, VideoError
from duplane.worker.video.decoder import decode_video

BOUNDS = VideoBounds(
    stack_frames=1, duration_s=600, frame_pixels=1 << 22, memory_bytes=1 << 32, cpu_s=60
)


def shown(file: bytes, **bounds: object) -> list[Image.Image | np.ndarray]:
    return list(decode_video(io.BytesIO(file), replace(BOUNDS, **bounds)))


def pictures(pieces: list[Image.Image | np.ndarray]) -> list[Image.Image]:
    return [piece for piece in pieces if isinstance(piece, Image.Image)]


def sounds(pieces: list[Image.Image | np.ndarray]) -> list[np.ndarray]:
    return [piece for piece in pieces if isinstance(piece, np.ndarray)]


def greys(pieces: list[Image.Image | np.ndarray]) -> list[float]:
    return [float(np.asarray(picture).mean()) for picture in pictures(pieces)]


KINDS = {
    "mp4": {"container": "mp4", "codec": "libx264", "sound": "aac"},
    "mp4 of mpeg4": {"container": "mp4", "codec": "mpeg4", "sound": "aac"},
    "webm of vp8": {"container": "webm", "codec": "libvpx", "sound": "libopus"},
    "webm of vp9": {"container": "webm", "codec": "libvpx-vp9", "sound": "libopus"},
    "matroska": {"container": "matroska", "codec": "libx264", "sound": "libmp3lame"},
    "avi": {"container": "avi", "codec": "mjpeg", "sound": "pcm_s16le", "rate": 25},
    "mpegts": {"container": "mpegts", "codec": "libx264", "sound": "aac"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_second_is_a_picture_and_its_sound(kind: str) -> None:
    rate = KINDS[kind].get("rate", 10)
    pieces = shown(make_video(2.6, **{"rate": rate, **KINDS[kind]}))
    assert [isinstance(piece, np.ndarray) for piece in pieces] == [False, True] * 3
    expected = [grey(0), grey(rate), grey(2 * rate)]
    assert greys(pieces) == pytest.approx(expected, abs=6)
    samples = sounds(pieces)
    assert [len(sound) for sound in samples] == [16_000, 16_000, 9_600]
    assert all(sound.dtype == np.float32 for sound in samples)
    # The sound is a tone of 440 Hz, as loud as in each channel of the file.
    spectrum = np.abs(np.fft.rfft(samples[1]))
    assert spectrum.argmax() == 440
    assert np.abs(samples[1]).max() == pytest.approx(0.3, abs=0.05)


def test_a_video_without_sound_is_pictures_alone() -> None:
    pieces = shown(make_video(2.0, sound=None))
    assert [type(piece) for piece in pieces] == [Image.Image] * 2


def test_sound_that_ends_early_is_missing_where_it_is_and_the_end_is_filled_up() -> None:
    pieces = shown(make_video(3.0, sound="libopus", container="matroska", sound_s=0.5))
    assert len(pictures(pieces)) == 3
    first, last = sounds(pieces)
    assert len(first) < 10_000
    assert len(last) == 1600


def test_stacked_pictures_come_after_the_sound_of_their_second() -> None:
    pieces = shown(make_video(2.0), stack_frames=3)
    assert [isinstance(piece, np.ndarray) for piece in pieces] == [False, True, False] * 2
    stacked = pictures(pieces)[1]
    assert stacked.size == (64, 48 * 2 + 6)
    assert np.asarray(stacked)[:48].mean() == pytest.approx(grey(3), abs=6)
    assert np.asarray(stacked)[-48:].mean() == pytest.approx(grey(6), abs=6)


@pytest.mark.parametrize("container", ["mp4", "webm", "mpegts"])
def test_a_long_video_is_shown_in_a_bounded_number_of_pictures(container: str) -> None:
    codec = "libvpx" if container == "webm" else "libx264"
    pieces = shown(make_video(80.0, rate=5, container=container, codec=codec, sound=None))
    times = np.linspace(0, 799, 64, dtype=int) / 10
    assert greys(pieces) == pytest.approx([grey(int(time * 5 + 1e-6)) for time in times], abs=6)


def test_pictures_at_odd_times_are_those_shown_at_each_second() -> None:
    times = [0.0, 0.4, 0.9, 1.7, 1.8, 2.1, 3.4]
    pieces = shown(make_video(times_s=times, container="webm", codec="libvpx", sound=None))
    assert greys(pieces)[:4] == pytest.approx([grey(0), grey(2), grey(4), grey(5)], abs=6)


# Clockwise rotation of a track's pictures in degrees -> the matrix in the track's header.
TURNS = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}


@pytest.mark.parametrize("degrees", TURNS)
def test_a_video_filmed_sideways_is_shown_upright(degrees: int) -> None:
    upright = pictures(shown(halves()))[0]
    pieces = pictures(shown(turned(halves(), degrees)))
    assert pieces[0].size == ((48, 64) if degrees != 180 else (64, 48))
    assert pieces[0].tobytes() == upright.rotate(-degrees, expand=True).tobytes()


def halves() -> bytes:
    """Return a video of one picture whose left half is dark."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        video: Any = out.add_stream("libx264", rate=1)
        video.width = 64
        video.height = 48
        video.pix_fmt = "yuv420p"
        pixels = np.full((48, 64, 3), 200, np.uint8)
        pixels[:, :32] = 20
        out.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(video.encode(None))
    return buffer.getvalue()


def turned(file: bytes, degrees: int) -> bytes:
    """Return the file with the matrix of a rotation in the header of its track."""
    start = file.index(b"tkhd") + 44
    a, b, c, d = (number << 16 for number in TURNS[degrees])
    matrix = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return file[:start] + matrix + file[start + len(matrix) :]


def test_a_file_that_was_cut_off_is_shown_as_far_as_it_goes() -> None:
    whole = make_video(20.0, container="webm", codec="libvpx", sound=None)
    pieces = shown(whole[: len(whole) // 2])
    assert 1 <= len(pieces) < 20


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        (b"", "no video file"),
        (b"no video at all", "no video file"),
        (make_video(1.0)[:1500], "no video file"),
        (b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n", "no video file"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "no video file"),
        (
            b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x80\x3e\0\0\0\x7d\0\0\2\0\x10\0data\0\0\0\0",
            "no video file",
        ),
    ],
    ids=["empty", "text", "half an mp4", "a playlist", "a list of files", "a wav"],
)
def test_what_is_no_video_is_refused(file: bytes, fault: str) -> None:
    with pytest.raises(VideoError, match=fault):
        shown(file)


def test_a_file_that_asks_for_too_much_is_refused() -> None:
    with pytest.raises(VideoError, match="64 x 48 pixels, more than 3000"):
        shown(make_video(1.0), frame_pixels=3000)
    with pytest.raises(VideoError, match="lasts 3 s, more than 2 s"):
        shown(make_video(3.0), duration_s=2)


def test_more_pixels_side_by_side_than_may_be_are_refused() -> None:
    video = make_video(1.0)
    assert pictures(shown(video, stack_frames=5, frame_pixels=64 * 48))
    with pytest.raises(VideoError, match="has 5 pictures to stack"):
        shown(video, stack_frames=6, frame_pixels=64 * 48)


def test_sound_alone_is_no_video() -> None:
    with pytest.raises(VideoError, match="has no pictures"):
        shown(_sound_alone())


def _sound_alone() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = 16_000
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return buffer.getvalue()


WHOLE = make_video(1.0, container="webm", codec="libvpx", sound="libopus")


def test_sound_of_an_unknown_codec_is_left_out() -> None:
    unknown = WHOLE.replace(b"A_OPUS", b"A_0PUS")
    assert unknown != WHOLE
    pieces = shown(unknown)
    assert pictures(pieces)
    assert not sounds(pieces)


@given(st.data())
@settings(max_examples=40)
def test_a_damaged_file_is_shown_or_refused_and_nothing_else(data: st.DataObject) -> None:
    damaged = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        pieces = shown(bytes(damaged), duration_s=60)
    except VideoError:
        return
    assert pictures(pieces)
    assert all(np.isfinite(sound).all() for sound in sounds(pieces))
