"""Video files of chats: each decoded in a process of its own, bounded, and killed with its chat.

Decides what becomes of a file that is broken, too large or too slow; what of it is shown is
`video_layout`'s. A request's pictures are cut for the model as they come, so that none is held
at its full size. The processes are started and read by threads: this starts them without a copy
of the worker, which asyncio's own way may not.
"""

from __future__ import annotations

import asyncio
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import BinaryIO, cast

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

_HEAD_BYTES = 1000
_LAST_WAIT_S = 1.0  # for the exit status of one that fell silent
_JOINT_BYTES = 1 << 20  # of the lines between pictures side by side

Prepare = Callable[[Image.Image, int | None], PreparedImage]


class Videos:
    """Decodes the videos of all chats of one worker, a few at a time."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.video_decoder_count, "video")

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
                    async with asyncio.timeout_at(deadline_s):
                        video, room = await self._decode(given, wanted, prepare, room)
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

    async def _decode(
        self, given: session_pb2.ChatPart, wanted: ChatRequest, prepare: Prepare, room: int
    ) -> tuple[ChatVideo, int]:
        """What a file shows, and how many pieces of pictures may be shown after it."""
        bounds = VideoBounds(
            stack_frames=given.video_stack_frame_count or 1,
            duration_s=self._limits.max_video_s,
            frame_pixels=self._limits.max_video_frame_pixels,
            memory_bytes=self._limits.video_memory_bytes,
            cpu_s=math.ceil(self._limits.video_timeout_s) + 1,
        )
        decoder = _Decoder(given.video, bounds)

        def show() -> tuple[ChatVideo, int]:
            return self._show(decoder, wanted.options.max_slices, prepare, room)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, show)
        finally:
            decoder.stop()

    def _show(
        self, decoder: _Decoder, max_slices: int | None, prepare: Prepare, room: int
    ) -> tuple[ChatVideo, int]:
        shown: list[ChatImage | ChatAudio] = []
        for piece in decoder.run():
            if isinstance(piece, np.ndarray):
                shown.append(ChatAudio(piece))
                continue
            cut = prepare(piece, max_slices)
            room -= len(cut.pieces)
            if room < 0:
                most = self._limits.max_video_pieces
                raise VideoError(f"brings the pictures of all videos to more than {most}")
            shown.append(ChatImage(cut))
        return ChatVideo(tuple(shown)), room


class _Decoder:
    """One process. `run` blocks; `stop` may come from another thread, at any time."""

    def __init__(self, file: bytes, bounds: VideoBounds) -> None:
        self._file, self._bounds = file, bounds
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def run(self) -> Iterator[Image.Image | np.ndarray]:
        """Decode; what is shown, as it comes. Raises VideoError, also when it was stopped."""
        with self._lock:
            if self._is_stopped:
                raise VideoError("was not decoded")
            pipe = subprocess.PIPE
            command = (*DECODER, self._bounds.to_json())
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
            )
        with self._process as process:
            try:
                feed(process, self._file)
                yield from self._read(process)
            finally:
                process.kill()

    def stop(self) -> None:
        """End the process, or see to it that it never begins."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def _read(self, process: subprocess.Popen[bytes]) -> Iterator[Image.Image | np.ndarray]:
        """Read what it says, and believe none of it: a file may have taken it over."""
        out = cast("BinaryIO", process.stdout)
        while True:
            try:
                head = orjson.loads(out.readline(_HEAD_BYTES))
                fault, picture, sound = (head.get(key) for key in ("fault", "picture", "sound"))
                if not (fault or picture or sound):
                    return
                if fault:
                    raise VideoError(str(fault))
                size = int(picture[0]) * int(picture[1]) * 3 if picture else int(sound) * 4
            except (ValueError, TypeError, LookupError, AttributeError):
                break
            if not 0 < size <= self._bounds.piece_bytes + _JOINT_BYTES:
                break
            content = out.read(size)
            if len(content) < size:
                break
            if picture:
                yield Image.frombytes("RGB", (int(picture[0]), int(picture[1])), content)
            else:
                yield np.frombuffer(bytearray(content), "<f4")
        if not self._is_stopped:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WAIT_S)
            _log.warning("a decoder of a video failed: %s", process.returncode)
        raise VideoError("cannot be decoded")


def feed(process: subprocess.Popen[bytes], file: bytes) -> None:
    """Write the file to a process that decodes it, which reads all of it before it writes."""
    stdin = cast("BinaryIO", process.stdin)
    with suppress(BrokenPipeError):  # what it wrote says why it left
        stdin.write(file)
    with suppress(BrokenPipeError):
        stdin.close()
