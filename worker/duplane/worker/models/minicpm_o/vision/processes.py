"""Decodes pictures in a few confined processes, which `decoder.py` describes.

A process lives for many pictures. If it ends, or takes too long for a picture, this picture is
refused and another process takes its place. What a process answers is not believed: the plan of a
picture decides how many bytes are read, and how they are cut. A process that a picture has taken
over could still see and change later pictures, until it is replaced.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import select
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, replace
from queue import SimpleQueue
from typing import IO

import numpy as np
import orjson

from duplane.worker import sandbox
from duplane.worker.models.minicpm_o.types import ImageTile, PreparedImage
from duplane.worker.models.minicpm_o.vision.decoder import DECODED, READY
from duplane.worker.models.minicpm_o.vision.pixels import Plan, PlannedImage
from duplane.worker.models.minicpm_o.vision.preprocessing import Pictures
from duplane.worker.models.types import ImageError

_log = logging.getLogger(__name__)

# With -P the process imports no modules from the working directory.
DECODER = (sys.executable, "-P", "-m", "duplane.worker.models.minicpm_o.vision.decoder")
# Nothing of the worker's environment, which may have secrets.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}

_START_S = 60.0  # longest start of a process
_PICTURE_S = 20.0  # longest time for a picture; the largest takes a few seconds
_PICTURE_COUNT = 10_000  # pictures of one process; then another takes its place
_PIPE_BYTES = 1 << 20  # the most that Linux allows to everybody


class _DecoderError(Exception):
    """The process has ended, or does not answer in time."""


def confined(pictures: Pictures, frame_count: int) -> Pictures:
    """Return `pictures` that are decoded in confined processes.

    `frame_count` processes decode the pictures of units, and another one those of chats, so that
    no chat delays a unit. If the system cannot confine a process, `pictures` are returned as they
    are, and this is logged.
    """
    fault = "this system has no seccomp"
    if sandbox.is_supported():
        try:
            frames, chats = Decoders(frame_count), Decoders(1)
            return replace(pictures, decode=chats.decode, decode_frame=frames.decode)
        except (OSError, _DecoderError) as error:
            fault = str(error)
    _log.warning("pictures are decoded in the worker's own process: %s", fault)
    return pictures


class Decoders:
    """A fixed number of decoder processes. A picture waits until one of them is free."""

    def __init__(self, count: int) -> None:
        """Start the processes. Raises OSError or _DecoderError if they cannot be confined."""
        self._all = [_Decoder() for _ in range(count)]
        self._free: SimpleQueue[_Decoder] = SimpleQueue()
        # Runs when the decoders are not used any more, and at the end of the interpreter.
        self._finalize = weakref.finalize(self, _stop_all, self._all)
        for decoder in self._all:
            decoder.start()
        for decoder in self._all:
            decoder.await_ready()
            self._free.put(decoder)

    @property
    def process_ids(self) -> list[int]:
        """The ids of the processes."""
        return [decoder.process_id for decoder in self._all]

    def decode(self, image: PlannedImage) -> PreparedImage:
        """Decode and cut an image. Raises ImageError."""
        decoder = self._free.get()
        try:
            return decoder.decode(image)
        finally:
            self._free.put(decoder)

    def stop(self) -> None:
        """End the processes. Later pictures are refused."""
        self._finalize()


def _stop_all(decoders: list[_Decoder]) -> None:
    for decoder in decoders:
        decoder.stop()


class _Decoder:
    """One decoder process and its successors. One thread at a time uses it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._is_stopped = False
        self._picture_count = 0

    @property
    def process_id(self) -> int:
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start a process in place of the one before. Raises OSError, _DecoderError."""
        self._end()
        if self._is_stopped:
            raise _DecoderError("the worker ends")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            DECODER,
            bufsize=0,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            close_fds=True,
            env=_ENVIRONMENT,
        )
        for end in self._ends:
            os.set_blocking(end.fileno(), False)
            with suppress(OSError):  # the user has too many pipes; smaller ones do, too
                fcntl.fcntl(end.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._is_ready, self._picture_count = False, 0

    def await_ready(self) -> None:
        """Wait until the process is confined. Raises _DecoderError."""
        if self._is_ready:
            return
        answer = bytearray(len(READY))
        self._read(memoryview(answer), time.monotonic() + _START_S)
        if bytes(answer) != READY:
            raise _DecoderError("it does not start")
        self._is_ready = True

    def decode(self, image: PlannedImage) -> PreparedImage:
        try:
            if self._process is None or self._process.poll() is not None:
                self.start()
            self.await_ready()
            prepared = self._exchange(image)
        except (OSError, _DecoderError) as error:
            if not self._is_stopped:
                _log.warning("a decoder process of pictures failed: %s", error)
            self._replace()
            raise ImageError("the image cannot be decoded") from None
        if self._picture_count >= _PICTURE_COUNT:
            self._replace()
        if prepared is None:
            raise ImageError("the image cannot be decoded")
        return prepared

    def stop(self) -> None:
        """End the process for good."""
        self._is_stopped = True
        self._end()

    def _replace(self) -> None:
        """Start another process now, so that it is ready when a picture comes."""
        try:
            self.start()
        except (OSError, _DecoderError) as error:
            if not self._is_stopped:
                _log.error("a decoder process of pictures cannot be started: %s", error)

    def _exchange(self, image: PlannedImage) -> PreparedImage | None:
        """Let the process decode an image. Return None if it refuses the image."""
        _, stdout = self._ends
        if _is_usable(stdout, select.POLLIN, 0.0):
            raise _DecoderError("it has answered without a request")
        deadline_s = time.monotonic() + _PICTURE_S
        self._picture_count += 1
        request = {
            "size": image.size,
            "scans": image.scans,
            "plan": asdict(image.plan),
            "bytes": len(image.data),
        }
        self._write(orjson.dumps(request) + b"\n", deadline_s)
        self._write(image.data, deadline_s)
        kind = bytearray(1)
        self._read(memoryview(kind), deadline_s)
        if bytes(kind) != DECODED:
            return None
        sizes = image.plan.tile_sizes
        content = np.empty(sum(map(math.prod, sizes)) * 3, np.uint8)
        self._read(content.data, deadline_s)
        return PreparedImage(_tiles(image.plan, content), image.plan.grid, image.size)

    def _write(self, content: bytes, deadline_s: float) -> None:
        stdin, _ = self._ends
        rest = memoryview(content)
        while rest:
            _wait(stdin, select.POLLOUT, deadline_s)
            try:
                written = stdin.write(rest)
            except BrokenPipeError:
                raise _DecoderError("it has ended") from None
            rest = rest[written or 0 :]

    def _read(self, target: memoryview, deadline_s: float) -> None:
        """Fill `target` with the next bytes. Raises _DecoderError."""
        _, stdout = self._ends
        rest = target
        while rest:
            _wait(stdout, select.POLLIN, deadline_s)
            count = os.readv(stdout.fileno(), [rest])
            if not count:
                raise _DecoderError("it has ended")
            rest = rest[count:]

    @property
    def _ends(self) -> tuple[IO[bytes], IO[bytes]]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise _DecoderError("it was ended")
        return process.stdin, process.stdout

    def _end(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes the pipes and waits for the end
                pass


def _wait(end: IO[bytes], event: int, deadline_s: float) -> None:
    """Wait until an end of a pipe can be used. Raises _DecoderError at the deadline."""
    if not _is_usable(end, event, max(0.0, deadline_s - time.monotonic())):
        raise _DecoderError("it takes too long")


def _is_usable(end: IO[bytes], event: int, within_s: float) -> bool:
    """Return whether an end of a pipe can be used, or the other end is closed, within a time."""
    poll = select.poll()
    poll.register(end, event)
    return bool(poll.poll(within_s * 1000))


def _tiles(plan: Plan, content: np.ndarray) -> tuple[ImageTile, ...]:
    tiles: list[ImageTile] = []
    at = 0
    for width, height in plan.tile_sizes:
        size = width * height * 3
        rows, columns = height // plan.patch, width // plan.patch
        patches = content[at : at + size].reshape(rows * columns, 3 * plan.patch**2)
        tiles.append(ImageTile(patches, rows, columns))
        at += size
    return tuple(tiles)
