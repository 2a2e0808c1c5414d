"""The decoder process of pictures: decodes and cuts one after the other, without access to files.

Decoders of pictures have had exploitable faults, so the bytes of clients are decoded in processes
that can only compute, read their stdin and write to their stdout (`sandbox.py`). `processes.py`
starts this program:

- stdout: `READY` once the process is confined;
- stdin: for each picture one line of JSON, `{"size", "scans", "plan", "bytes"}`, and the file;
- stdout: for each picture `DECODED` and the patches of its tiles, or `REFUSED`.
"""

from __future__ import annotations

import io
import resource
import signal
import sys
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import orjson
from PIL import Image

from duplane.worker.models.minicpm_o.vision.pixels import (
    Plan,
    PlannedImage,
    decode_planned,
    read_header,
)
from duplane.worker.models.types import ImageError
from duplane.worker.sandbox import confine

READY, DECODED, REFUSED = b"R", b"D", b"F"
_MEMORY_BYTES = 2 << 30
_CPU_S = 3600  # of the process; `processes.py` replaces it long before


def _samples() -> Iterator[bytes]:
    """Yield small files of all kinds."""
    colours = Image.new("RGB", (8, 8), (200, 100, 50))
    grey = Image.fromarray(np.full((8, 8), 5000, np.uint16))
    kinds = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP")
    for picture, kind in [*((colours, kind) for kind in kinds), (grey, "PNG")]:
        file = io.BytesIO()
        more = {"save_all": True, "append_images": [colours]} if kind == "MPO" else {}
        picture.save(file, kind, **more)
        yield file.getvalue()


def _bound_process() -> None:
    for kind, most in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _import_all() -> None:
    """Decode a file of each format, because Pillow imports its modules when it needs them."""
    for file in _samples():
        size, scans = read_header(file)
        plan = Plan((14, 14), 14, (2, 1), (28, 14))
        decode_planned(PlannedImage(file, size, scans, plan))


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Decode pictures until the end of the requests."""
    while head := requests.readline():
        request = orjson.loads(head)
        width, height = request["size"]
        file = requests.read(request["bytes"])
        image = PlannedImage(file, (width, height), request["scans"], Plan(**request["plan"]))
        try:
            prepared = decode_planned(image)
        except (ImageError, MemoryError):
            answers.write(REFUSED)
        else:
            answers.write(DECODED)
            for tile in prepared.tiles:
                answers.write(np.ascontiguousarray(tile.patches).data)
        answers.flush()


def main() -> None:
    """Confine the process, and decode pictures from stdin to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides when the process ends
    _bound_process()
    _import_all()
    confine()
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    _serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
