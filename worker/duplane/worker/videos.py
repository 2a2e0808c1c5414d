"""Video files of chats: each decoded in a process of its own, bounded, and killed with its chat.

Decides what becomes of a file that is broken, too large or too slow; what of it is shown is
`video_layout`'s. A request's pictures are cut for the model as they come, so that none is held
at its full size.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace

import numpy as np
import orjson
from PIL import Image

from duplane.fabric.v1 import session_pb2
from duplane.worker.model.chat_types import ChatAudio, ChatImage, ChatRequest, ChatVideo
from duplane.worker.model.images import ImageError, PreparedImage
from duplane.worker.options import invalid
from duplane.worker.settings import SessionLimits
from duplane.worker.video_bounds import VideoBounds, VideoError

_log = logging.getLogger(__name__)

# -P: what lies in the working directory is not ours.
DECODER = (sys.executable, "-P", "-m", "duplane.worker.video_decoder")

Prepare = Callable[[Image.Image, int | None], Awaitable[PreparedImage]]


class Videos:
    """Decodes the videos of all chats of one worker, a few at a time."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(limits.video_decoder_count)

    async def fill(
        self, wanted: ChatRequest, wish: session_pb2.ChatRequest, prepare: Prepare
    ) -> ChatRequest:
        """Return `wanted`, made from `wish`, with what its videos show; `prepare` cuts pictures.

        Raises FabricError INVALID_FIELD that names the video.
        """
        room = self._limits.max_video_pieces
        messages = list(wanted.messages)
        deadline_s = asyncio.get_running_loop().time() + self._limits.video_timeout_s
        for index, message in enumerate(messages):
            parts = list(message.parts)
            for number, part in enumerate(parts):
                if not isinstance(part, ChatVideo):
                    continue
                path = f"messages[{index}].parts[{number}].video"
                given = wish.messages[index].parts[number]
                try:
                    async with asyncio.timeout_at(deadline_s), self._places:
                        video, room = await self._show(given, wanted, prepare, room)
                except VideoError as error:
                    raise invalid(path, str(error)) from None
                except ImageError as error:
                    raise invalid(path, f"cannot be used: {error}") from None
                except TimeoutError:
                    fault = f"is not decoded within {self._limits.video_timeout_s:g} s"
                    raise invalid(path, fault) from None
                parts[number] = video
            messages[index] = replace(message, parts=tuple(parts))
        return replace(wanted, messages=tuple(messages))

    async def _show(
        self, given: session_pb2.ChatPart, wanted: ChatRequest, prepare: Prepare, room: int
    ) -> tuple[ChatVideo, int]:
        """What a file shows, and how many pieces of pictures may be shown after it."""
        shown: list[ChatImage | ChatAudio] = []
        async with aclosing(self._decoded(given)) as pieces:
            async for piece in pieces:
                if isinstance(piece, np.ndarray):
                    shown.append(ChatAudio(piece))
                    continue
                cut = await prepare(piece, wanted.options.max_slices)
                room -= len(cut.pieces)
                if room < 0:
                    most = self._limits.max_video_pieces
                    raise VideoError(f"brings the pictures of all videos to more than {most}")
                shown.append(ChatImage(cut))
        return ChatVideo(tuple(shown)), room

    async def _decoded(
        self, given: session_pb2.ChatPart
    ) -> AsyncGenerator[Image.Image | np.ndarray]:
        """Run the process; what it shows, as it comes."""
        bounds = VideoBounds(
            stack_frames=given.video_stack_frame_count or 1,
            duration_s=self._limits.max_video_s,
            frame_pixels=self._limits.max_video_frame_pixels,
            memory_bytes=self._limits.video_memory_bytes,
            cpu_s=math.ceil(self._limits.video_timeout_s) + 1,
        )
        process = await asyncio.create_subprocess_exec(
            *DECODER, bounds.to_json(), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
        )
        try:
            await feed(process, given.video)
            async for piece in _pieces(process):
                yield piece
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def feed(process: Process, file: bytes) -> None:
    """Write the file to a process that decodes it."""
    assert process.stdin, "it was asked for"
    with suppress(BrokenPipeError, ConnectionResetError):  # what it wrote says why it left
        process.stdin.write(file)
        await process.stdin.drain()
    process.stdin.close()


async def _pieces(process: Process) -> AsyncGenerator[Image.Image | np.ndarray]:
    """Read what the process writes; raises VideoError for what it says, or if it fell silent."""
    out = process.stdout
    assert out, "it was asked for"
    try:
        while True:
            head = orjson.loads(await out.readuntil(b"\n"))
            if "fault" in head:
                raise VideoError(head["fault"])
            if "picture" in head:
                width, height = head["picture"]
                pixels = await out.readexactly(width * height * 3)
                yield Image.frombytes("RGB", (width, height), pixels)
            elif "sound" in head:
                pcm = await out.readexactly(head["sound"] * 4)
                yield np.frombuffer(bytearray(pcm), "<f4")
            else:
                return
    except asyncio.IncompleteReadError:
        _log.warning("a decoder of a video ended early: %s", await process.wait())
        raise VideoError("cannot be decoded") from None
