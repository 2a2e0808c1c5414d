"""Videos in chats on a real worker: the model's input, and every kind of failure."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from PIL import Image
from support.model.video_files import make_video
from support.time_limits import WITHIN_S
from support.worker.scripted_model import ScriptedModel, ScriptedPicture
from support.worker.worker_harness import Rig, running_worker

from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.worker.models.chat import ChatAudio, ChatImage, ChatVideo
from duplane.worker.models.types import ImageError
from duplane.worker.settings import SessionLimits
from duplane.worker.video import decoding as videos

VIDEO = make_video(2.0)
DECODER_NAME = videos.DECODER[-1]


def asks(*files: bytes, **fields: Any) -> session_pb2.ChatRequest:
    parts = [session_pb2.ChatPart(video=file, **fields) for file in files]
    text = session_pb2.ChatPart(text="one two")
    message = session_pb2.ChatMessage(role=session_pb2.CHAT_ROLE_USER, parts=[*parts, text])
    return session_pb2.ChatRequest(messages=[message])


async def answer(rig: Rig, request: session_pb2.ChatRequest) -> list[session_pb2.ChatResponse]:
    granted = rig.grant(0, kind=lease_pb2.SESSION_KIND_CHAT)
    async with (
        asyncio.timeout(WITHIN_S),
        FabricClient([rig.scheduler.address]) as client,
        client.chat(granted, request) as responses,
    ):
        return [response async for response in responses]


async def refusal(rig: Rig, request: session_pb2.ChatRequest) -> FabricError:
    with pytest.raises(FabricError) as refused:
        await answer(rig, request)
    await rig.all_free()
    return refused.value


def decoders() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            if DECODER_NAME in child.cmdline():
                found.append(child)
    return found


async def decoders_ended() -> None:
    """Wait for the end of all decoders: a process runs on for a moment after it is killed."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, decoders(), WITHIN_S)
    assert not alive


async def test_the_model_is_shown_pictures_and_the_sound_between_them() -> None:
    async with running_worker() as rig:
        await answer(rig, asks(VIDEO, VIDEO, video_stack_frame_count=2))
        first, second, text = rig.model.chats[0].messages[0].parts
        assert text == "one two"
        for video in (first, second):
            assert isinstance(video, ChatVideo)
            kinds = [type(piece) for piece in video.pieces]
            assert kinds == [ChatImage, ChatAudio, ChatImage] * 2
            sizes = [p.encoded.size for p in video.pieces if isinstance(p, ChatImage)]  # pyright: ignore[reportAttributeAccessIssue]  the test's own
            assert sizes == [(64, 48)] * 4
            sound = video.pieces[1]
            assert isinstance(sound, ChatAudio)
            assert sound.samples.flags.writeable
            assert (sound.samples.dtype, sound.samples.shape) == (np.float32, (16_000,))
        await decoders_ended()
        await rig.all_free()


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        (b"no video", "is no video file that can be read here"),
        (make_video(4.0), "lasts 4 s, more than 3 s"),
        (make_video(1.0, size=(128, 64)), "has pictures of 128 x 64 pixels, more than 4000"),
    ],
    ids=["broken", "long", "large"],
)
async def test_a_file_that_cannot_be_shown_is_named_and_the_slot_is_free_again(
    file: bytes, fault: str
) -> None:
    limits = SessionLimits(max_video_s=3.0, max_video_frame_pixels=4000)
    async with running_worker(limits=limits) as rig:
        error = await refusal(rig, asks(VIDEO, file))
        path = "messages[0].parts[1].video"
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, path)
        assert error.message == f"{path} {fault}"
        await decoders_ended()


async def test_more_stacked_pictures_than_the_model_knows_are_refused() -> None:
    async with running_worker() as rig:
        error = await refusal(rig, asks(VIDEO, video_stack_frame_count=11))
        assert error.field == "messages[0].parts[0].video_stack_frame_count"


async def test_the_pictures_of_all_videos_are_bounded_together() -> None:
    class Cutter(ScriptedModel):
        def picture(self, picture: Image.Image, max_slices: int | None) -> ScriptedPicture:
            return replace(super().picture(picture, max_slices), piece_count=2)

    async with running_worker(Cutter(), limits=SessionLimits(max_video_pieces=7)) as rig:
        error = await refusal(rig, asks(VIDEO, VIDEO))
        assert error.field == "messages[0].parts[1].video"
        assert "to more than 7" in str(error)
        await decoders_ended()


# Reads the file and then hangs. Its arguments contain the file's name, like those of the decoder.
STUCK = "import sys, time; sys.stdin.buffer.read(); time.sleep(600)"


@pytest_asyncio.fixture
async def stuck(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let decoders hang; return an event that is set when one of them has read its file."""
    has_begun = asyncio.Event()

    feed, loop = videos.feed, asyncio.get_running_loop()

    def feed_and_report(process: subprocess.Popen[bytes], file: bytes) -> None:
        feed(process, file)
        loop.call_soon_threadsafe(has_begun.set)

    monkeypatch.setattr(videos, "DECODER", (sys.executable, "-c", STUCK, DECODER_NAME))
    monkeypatch.setattr(videos, "feed", feed_and_report)
    return has_begun


@pytest.mark.timing
async def test_a_file_that_takes_too_long_is_refused_and_its_process_ended(
    stuck: asyncio.Event,
) -> None:
    limits = SessionLimits(video_timeout_s=0.3)
    async with running_worker(limits=limits) as rig:
        error = await refusal(rig, asks(VIDEO))
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, "messages[0].parts[0].video")
        assert "is not decoded within 0.3 s" in error.message
        await decoders_ended()


async def test_a_client_that_leaves_ends_the_process_that_decodes_its_file(
    stuck: asyncio.Event,
) -> None:
    async with running_worker() as rig:
        granted = rig.grant(0, kind=lease_pb2.SESSION_KIND_CHAT)
        async with (
            asyncio.timeout(WITHIN_S),
            FabricClient([rig.scheduler.address]) as client,
            client.chat(granted, asks(VIDEO)),
        ):
            await stuck.wait()
            assert len(decoders()) == 1
        await rig.all_free()
    await decoders_ended()


@pytest.mark.parametrize("size", [10, 4_000_000], ids=["small", "more than a pipe holds"])
async def test_a_decoder_that_dies_takes_nothing_along(
    size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crash = (sys.executable, "-c", "import os; os.abort()")
    monkeypatch.setattr(videos, "DECODER", crash)
    async with running_worker() as rig:
        error = await refusal(rig, asks(bytes(size)))
        assert "cannot be decoded" in str(error)
        assert "a video decoder failed with status -6" in caplog.text


@pytest.mark.parametrize(
    "said",
    [
        '{"picture": [1000000000, 1000000000]}',
        '{"picture": [-3, -4]}',
        '{"picture": 5}',
        '{"sound": 1e30}',
        "[]",
        "no JSON",
        "x" * 100_000,
    ],
    ids=["huge", "negative", "a number", "long", "a list", "text", "endless"],
)
async def test_what_a_decoder_says_is_not_believed(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie = f"import sys; sys.stdin.buffer.read(); print({said!r}, flush=True); sys.stdin.read()"
    monkeypatch.setattr(videos, "DECODER", (sys.executable, "-c", lie))
    async with running_worker() as rig:
        error = await refusal(rig, asks(VIDEO))
        assert "cannot be decoded" in error.message


# A decoder whose file has taken it over: after the sample, it tries what it should not reach.
TAKEN_OVER = """
import io, os, socket, sys
from duplane.worker.video import decoder
from duplane.worker.video.bounds import VideoError

decode, decoded = decoder.decode_video, []

def attempt(call):
    try:
        call()
    except PermissionError:
        return "refused"
    return "allowed"

def take_over(file, bounds):
    if not decoded:
        decoded.append(file)
        yield from decode(file, bounds)
        return
    tried = [lambda: open("/etc/hostname"), socket.socket, os.fork, lambda: os.kill(1, 0)]
    found = [attempt(call) for call in tried]
    raise VideoError(f"tried {found} with {sorted(os.environ)}")

decoder.decode_video = take_over
decoder.main()
"""


async def test_a_decoder_that_a_file_has_taken_over_reaches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DUPLANE_ADMIN_TOKEN", "canary")
    monkeypatch.setattr(videos, "DECODER", (sys.executable, "-c", TAKEN_OVER))
    async with running_worker() as rig:
        error = await refusal(rig, asks(VIDEO))
        names = error.message.partition(" with ")[2]
        assert f"tried {['refused'] * 4} with" in error.message
        # `LC_CTYPE` is what Python itself sets if the environment has no locale.
        assert set(ast.literal_eval(names)) <= {"OPENBLAS_NUM_THREADS", "LC_CTYPE"}


async def test_videos_are_refused_where_no_decoder_can_be_confined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(videos.sandbox, "is_supported", lambda: False)
    async with running_worker() as rig:
        assert "videos are refused: this system has no seccomp" in caplog.text
        error = await refusal(rig, asks(VIDEO))
        assert "the worker's system has no seccomp (--video-unconfined" in error.message
    async with running_worker(video_unconfined=True) as rig:
        assert "videos are decoded without a sandbox" in caplog.text
        await answer(rig, asks(VIDEO))
        assert isinstance(rig.model.chats[0].messages[0].parts[0], ChatVideo)


async def test_memory_is_bounded() -> None:
    limits = SessionLimits(video_memory_bytes=1 << 20)
    async with running_worker(limits=limits) as rig:
        error = await refusal(rig, asks(make_video(1.0, size=(1920, 1080))))
        assert error.field == "messages[0].parts[0].video"
        assert "decode" in str(error)


async def test_a_picture_that_the_model_cannot_see_is_named() -> None:
    class Blind(ScriptedModel):
        def picture(self, picture: Image.Image, max_slices: int | None) -> ScriptedPicture:
            raise ImageError("this checkpoint does not see")

    async with running_worker(Blind()) as rig:
        error = await refusal(rig, asks(VIDEO))
        assert "cannot be used: this checkpoint does not see" in str(error)
