"""Decodes the video files of chats, each in its own process. The end of a chat kills its process.

The process is confined: it has no access to files, network, other processes or the worker's
environment. Where the system cannot confine it, videos are refused unless the operator allows them.

Files that are broken, too large or too slow to decode are refused. `video_layout` chooses pictures
and sounds. Each picture is sliced for the model when it arrives, so no picture is kept at full
size. Threads start the processes and read their output, because `subprocess` always starts a
process without copying the worker's memory, while asyncio sometimes copies it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np
import orjson

from duplane.fabric.v1 import session_pb2
from duplane.worker import sandbox
from duplane.worker.models.chat import ChatAudio, ChatImage, ChatRequest, ChatVideo
from duplane.worker.models.types import ImageError, PreparedPicture
from duplane.worker.session.fields import invalid
from duplane.worker.settings import SessionLimits
from duplane.worker.video.bounds import VideoBounds, VideoError

if TYPE_CHECKING:  # a base install has no Pillow
    from PIL.Image import Image

_log = logging.getLogger(__name__)

# With -P the process imports no modules from the working directory.
DECODER = (sys.executable, "-P", "-m", "duplane.worker.video.decoder")

_ADVICE = "--video-unconfined decodes videos without a sandbox"

# Nothing of the worker's environment, which may have secrets. One thread of the linear algebra,
# which the decoder does not use, saves its memory.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}

_HEAD_BYTES = 1000
_LAST_WAIT_S = 1.0  # wait for the exit status after the end of the output
_JOINT_BYTES = 1 << 20  # allowance for the lines between joined pictures

Prepare = Callable[["Image", int | None], PreparedPicture]


class Videos:
    """Decodes the videos of all chats of one worker, a few at a time."""

    def __init__(self, limits: SessionLimits, *, may_be_unconfined: bool = False) -> None:
        """With `may_be_unconfined`, decode videos even if the system cannot confine a decoder."""
        self._limits = limits
        self._is_confined = not may_be_unconfined or sandbox.is_supported()
        if not sandbox.is_supported():
            verb = "refused" if self._is_confined else "decoded without a sandbox"
            _log.warning("videos are %s: this system has no seccomp (%s)", verb, _ADVICE)
        self._threads = ThreadPoolExecutor(limits.video_decoder_count, "video")

    async def fill(
        self, chat: ChatRequest, request: session_pb2.ChatRequest, prepare: Prepare
    ) -> ChatRequest:
        """Decode the videos of `request`. Return `chat` with the videos; `prepare` slices pictures.

        Raises FabricError INVALID_FIELD that names the video.
        """
        tiles_left = self._limits.max_video_pieces
        messages = list(chat.messages)
        deadline_s = asyncio.get_running_loop().time() + self._limits.video_timeout_s
        for index, message in enumerate(messages):
            parts = list(message.parts)
            for number, part in enumerate(parts):
                if not isinstance(part, ChatVideo):
                    continue
                path = f"messages[{index}].parts[{number}].video"
                file = request.messages[index].parts[number]
                try:
                    async with asyncio.timeout_at(deadline_s):
                        decoded = self._decode(file, chat, prepare, tiles_left)
                        video, tiles_left = await decoded
                except VideoError as error:
                    raise invalid(path, str(error)) from None
                except ImageError as error:
                    raise invalid(path, f"cannot be used: {error}") from None
                except TimeoutError:
                    fault = f"is not decoded within {self._limits.video_timeout_s:g} s"
                    raise invalid(path, fault) from None
                parts[number] = video
            messages[index] = replace(message, parts=tuple(parts))
        return replace(chat, messages=tuple(messages))

    async def _decode(
        self, file: session_pb2.ChatPart, chat: ChatRequest, prepare: Prepare, tiles_left: int
    ) -> tuple[ChatVideo, int]:
        """Decode a file. Return the video, and the number of tiles that later videos may have."""
        bounds = VideoBounds(
            stack_frames=file.video_stack_frame_count or 1,
            duration_s=self._limits.max_video_s,
            frame_pixels=self._limits.max_video_frame_pixels,
            memory_bytes=self._limits.video_memory_bytes,
            cpu_s=math.ceil(self._limits.video_timeout_s) + 1,
            is_confined=self._is_confined,
        )
        decoder = _Decoder(file.video, bounds)

        def read() -> tuple[ChatVideo, int]:
            return self._read(decoder, chat.options.max_slices, prepare, tiles_left)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        finally:
            decoder.stop()

    def _read(
        self, decoder: _Decoder, max_slices: int | None, prepare: Prepare, tiles_left: int
    ) -> tuple[ChatVideo, int]:
        pieces: list[ChatImage | ChatAudio] = []
        for output in decoder.run():
            if isinstance(output, np.ndarray):
                pieces.append(ChatAudio(output))
                continue
            picture = prepare(output, max_slices)
            tiles_left -= picture.piece_count
            if tiles_left < 0:
                most = self._limits.max_video_pieces
                raise VideoError(f"brings the pictures of all videos to more than {most}")
            pieces.append(ChatImage(picture))
        return ChatVideo(tuple(pieces)), tiles_left


class _Decoder:
    """One decoder process. `run` blocks; `stop` may be called in any thread at any time."""

    def __init__(self, file: bytes, bounds: VideoBounds) -> None:
        self._file, self._bounds = file, bounds
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def run(self) -> Iterator[Image | np.ndarray]:
        """Yield pictures and sounds as they are decoded. Raises VideoError, also after `stop`."""
        if importlib.util.find_spec("av") is None:
            raise VideoError("cannot be decoded: the worker has no video decoder (duplane[worker])")
        if self._bounds.is_confined and not sandbox.is_supported():
            raise VideoError(f"cannot be decoded: the worker's system has no seccomp ({_ADVICE})")
        with self._lock:
            if self._is_stopped:
                raise VideoError("was not decoded")
            pipe = subprocess.PIPE
            command = (*DECODER, self._bounds.to_json())
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                close_fds=True,
                env=_ENVIRONMENT,
            )
        with self._process as process:
            try:
                feed(process, self._file)
                yield from self._read(process)
            finally:
                process.kill()

    def stop(self) -> None:
        """Kill the process. If the process has not started yet, it never starts."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def _read(self, process: subprocess.Popen[bytes]) -> Iterator[Image | np.ndarray]:
        """Read the output and check all of it, because a hostile file may control the process."""
        from PIL.Image import frombytes

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
            if not 0 < size <= self._bounds.output_bytes + _JOINT_BYTES:
                break
            content = out.read(size)
            if len(content) < size:
                break
            if picture:
                yield frombytes("RGB", (int(picture[0]), int(picture[1])), content)
            else:
                yield np.frombuffer(bytearray(content), "<f4")
        if not self._is_stopped:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WAIT_S)
            _log.warning("a video decoder failed with status %s", process.returncode)
        raise VideoError("cannot be decoded")


def feed(process: subprocess.Popen[bytes], file: bytes) -> None:
    """Write the file to the decoder process, which reads the whole file before it writes."""
    stdin = cast("BinaryIO", process.stdin)
    with suppress(BrokenPipeError):  # the process has ended; its output says why
        stdin.write(file)
    with suppress(BrokenPipeError):
        stdin.close()
