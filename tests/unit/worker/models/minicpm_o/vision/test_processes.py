"""Decoder processes: results equal to those of the worker, and every way in which they fail."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from duplane.worker import sandbox
from duplane.worker.models.minicpm_o.types import PreparedImage
from duplane.worker.models.minicpm_o.vision import processes
from duplane.worker.models.minicpm_o.vision.layout import ImageMarks
from duplane.worker.models.minicpm_o.vision.pixels import decode_planned
from duplane.worker.models.minicpm_o.vision.preprocessing import ImageRules, Pictures, plan_image
from duplane.worker.models.minicpm_o.vision.processes import Decoders, confined
from duplane.worker.models.types import ImageError

pytestmark = [
    pytest.mark.skipif(not sandbox.is_supported(), reason="the system has no seccomp"),
    pytest.mark.slow,
]

RULES = ImageRules()
PICTURES = Pictures(RULES, ImageMarks(), 64)
NOISE = np.random.default_rng(0).integers(0, 256, (300, 500, 3), np.uint8)


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(width: int = 500, height: int = 300, mode: str = "RGB") -> Image.Image:
    return Image.fromarray(NOISE).resize((width, height)).convert(mode)


def same(one: PreparedImage, other: PreparedImage) -> bool:
    return (one.grid, one.size) == (other.grid, other.size) and all(
        (a.rows, a.columns) == (b.rows, b.columns) and np.array_equal(a.patches, b.patches)
        for a, b in zip(one.tiles, other.tiles, strict=True)
    )


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    """One process for the tests that do not end it."""
    patch = pytest.MonkeyPatch()
    patch.setenv("DUPLANE_ADMIN_TOKEN", "canary")
    made = Decoders(1)
    patch.undo()
    yield made
    made.stop()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that starts a process of a program; without one, the decoder."""
    started: list[Decoders] = []

    def start(program: str = "") -> Decoders:
        if program:
            monkeypatch.setattr(processes, "DECODER", (sys.executable, "-c", program))
        started.append(Decoders(1))
        return started[-1]

    yield start
    for made in started:
        made.stop()


FILES = {
    "jpeg": encode(picture()),
    "progressive": encode(picture(), progressive=True),
    "cmyk": encode(picture(mode="CMYK")),
    "grey": encode(picture(mode="L")),
    "several": encode(picture(), "MPO", save_all=True, append_images=[picture()]),
    "png": encode(picture(), "PNG"),
    "alpha": encode(picture(mode="RGBA"), "PNG"),
    "palette": encode(picture(mode="P"), "PNG", transparency=3),
    "16 bits": encode(Image.fromarray(NOISE[..., 0].astype(np.uint16) << 7), "PNG"),
    "webp": encode(picture(), "WEBP"),
    "lossless": encode(picture(mode="RGBA"), "WEBP", lossless=True),
    "gif": encode(picture(), "GIF", save_all=True, append_images=[picture(30, 20)]),
    "bmp": encode(picture(), "BMP"),
    "sliced": encode(picture(1200, 900)),
    "narrow": encode(picture(2000, 9)),
    "profile": encode(picture(), "PNG", icc_profile=bytes(500), dpi=(72, 72)),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_process_decodes_as_the_worker_does(kind: str, decoders: Decoders) -> None:
    for slices in (1, 9):
        planned = plan_image(RULES, FILES[kind], slices)
        assert same(decoders.decode(planned), decode_planned(planned))


def test_an_image_that_is_not_scaled_is_cropped_as_in_the_worker(decoders: Decoders) -> None:
    planned = plan_image(ImageRules(is_scaled=False), FILES["png"], 1)
    assert same(decoders.decode(planned), decode_planned(planned))


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "gif"])
def test_a_broken_image_is_refused_and_the_process_goes_on(kind: str, decoders: Decoders) -> None:
    before = decoders.process_ids
    file = FILES[kind]
    with pytest.raises(ImageError, match="cannot be decoded"):
        decoders.decode(plan_image(RULES, file[: len(file) // 3]))
    assert decoders.decode(plan_image(RULES, FILES["jpeg"])).size == (500, 300)
    assert decoders.process_ids == before


def test_a_process_is_confined_and_knows_nothing_of_the_worker(decoders: Decoders) -> None:
    (process_id,) = decoders.process_ids
    folder = Path("/proc", str(process_id))
    status = (folder / "status").read_text().split("\n")
    assert "Seccomp:\t2" in status
    assert "NoNewPrivs:\t1" in status
    assert "canary" not in (folder / "environ").read_text()
    assert "torch" not in (folder / "maps").read_text()
    files = [str(file.readlink()) for file in (folder / "fd").iterdir()]
    assert sorted(file.partition(":")[0] for file in files) == ["/dev/null", "pipe", "pipe"]


def test_a_process_that_dies_is_replaced(own: Any, caplog: pytest.LogCaptureFixture) -> None:
    decoders = own()
    planned = plan_image(RULES, FILES["jpeg"])
    (first,) = decoders.process_ids
    process = psutil.Process(first)
    process.kill()
    process.wait()
    assert decoders.decode(planned).size == (500, 300)
    assert decoders.process_ids != [first]
    assert caplog.text == ""  # no picture was lost


READY_THEN = "import sys; sys.stdout.buffer.write(b'R'); sys.stdout.flush(); "


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("sys.stdin.buffer.readline(); sys.exit(3)", "it has ended"),
        ("sys.stdin.buffer.read()", "it takes too long"),
        ("import time; time.sleep(600)", "it takes too long"),
        (
            "sys.stdin.buffer.readline(); sys.stdout.buffer.write(b'D' + bytes(100));"
            "sys.stdout.flush()",
            "it has ended",
        ),
    ],
    ids=["dies", "hangs", "reads nothing", "answers in part"],
)
def test_a_picture_that_a_process_does_not_survive_is_refused(
    program: str,
    fault: str,
    own: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoders = own(READY_THEN + program)
    (before,) = decoders.process_ids
    monkeypatch.undo()  # the next process is a good one
    monkeypatch.setattr(processes, "_PICTURE_S", 0.2)
    file = encode(picture(1500, 1000), "BMP")  # more than a pipe holds
    with pytest.raises(ImageError, match="cannot be decoded"):
        decoders.decode(plan_image(RULES, file))
    assert fault in caplog.text
    monkeypatch.undo()
    assert not psutil.pid_exists(before)
    assert decoders.decode(plan_image(RULES, FILES["jpeg"])).size == (500, 300)


def test_an_answer_without_a_request_ends_the_process(
    own: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoders = own("import sys; sys.stdout.buffer.write(b'RDD'); sys.stdout.flush(); input()")
    monkeypatch.undo()
    with pytest.raises(ImageError):
        decoders.decode(plan_image(RULES, FILES["jpeg"]))
    assert "answered without a request" in caplog.text
    assert decoders.decode(plan_image(RULES, FILES["jpeg"])).size == (500, 300)


def test_a_process_is_replaced_after_many_pictures(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_PICTURE_COUNT", 2)
    decoders, used = own(), list[int]()
    for _ in range(3):
        used += decoders.process_ids
        assert decoders.decode(plan_image(RULES, FILES["jpeg"])).size == (500, 300)
    assert used[0] == used[1] != used[2]


def test_processes_end_with_their_owner(own: Any) -> None:
    decoders = own()
    (process_id,) = decoders.process_ids
    decoders.stop()
    assert not psutil.pid_exists(process_id)
    with pytest.raises(ImageError):
        decoders.decode(plan_image(RULES, FILES["jpeg"]))
    assert decoders.process_ids == [0]


@pytest.mark.parametrize("program", ["", "raise SystemExit(1)"], ids=["no seccomp", "no start"])
def test_where_no_process_can_be_confined_the_worker_decodes(
    program: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if program:
        monkeypatch.setattr(processes, "DECODER", (sys.executable, "-c", program))
    else:
        monkeypatch.setattr(processes.sandbox, "is_supported", lambda: False)
    assert confined(PICTURES, 1) is PICTURES
    assert "pictures are decoded in the worker's own process" in caplog.text


def test_pictures_of_units_and_chats_have_processes_of_their_own() -> None:
    pictures = confined(PICTURES, 1)
    planned = pictures.plan(FILES["sliced"], 4)
    assert same(pictures.decode_frame(planned), decode_planned(planned))
    assert same(pictures.prepare(FILES["sliced"], 4), decode_planned(planned))
