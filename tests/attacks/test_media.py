"""Hostile pictures: small files of many pixels, and many pictures at once, in several sessions."""

from __future__ import annotations

import asyncio
import contextlib
import io
import struct
import threading
import zlib
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest
import torch
from PIL import Image, ImageFile
from support.paths import GOLDEN
from support.time_limits import WITHIN_S
from support.worker.scripted_model import ScriptedModel
from support.worker.worker_harness import Client, Rig, pcm, running_worker, unit

from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.worker.engine.preparation import FairPool
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.worker_model import WorkerModel
from duplane.worker.models.types import Unit, UnitFailure

ATTACKERS, HONEST = range(3), 3
CONFIG = session_pb2.DuplexConfig(decode_mode=session_pb2.DECODE_MODE_GREEDY, generate_audio=False)


class TinyModel(ScriptedModel):
    """The scripted device of the tests, but with a real tiny model of four slots."""

    def __init__(self) -> None:
        super().__init__(slot_count=4)

    def load(self) -> Any:
        torch.set_num_threads(1)
        model = DuplexModel.load(GOLDEN / "checkpoint", slot_count=4, context_capacity=512)
        return model.preparer, WorkerModel(model)

    def memory_used_bytes(self) -> int:
        return 0


def chunk(name: bytes, content: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + check


def png(width: int, height: int) -> bytes:
    """Build a PNG of 69 bytes or less: the header states its size, the pixels are missing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0")), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def siblings() -> list[bytes]:
    """Return 16 files of 2^23 or 2^24 pixels: strips of 1, 2, 4 and 8 pixels, upright or flat."""
    strips = [(1 << n, 1 << (total - n)) for total in (24, 23) for n in range(4)]
    return [png(*size) for size in strips] + [png(*reversed(size)) for size in strips]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets the size of each picture whose pixels Pillow begins to decode."""
    sizes: list[tuple[int, int]] = []
    load = ImageFile.ImageFile.load

    def count(image: ImageFile.ImageFile) -> Any:
        sizes.append(image.size)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", count)
    return sizes


@contextlib.asynccontextmanager
async def sessions(rig: Rig, count: int) -> AsyncGenerator[list[Client]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                rig.opened(
                    rig.grant(slot, kind=lease_pb2.SESSION_KIND_OMNI_DUPLEX),
                    session_pb2.Open(seed=1, config=CONFIG),
                )
            )
            for slot in range(count)
        ]


async def attack(client: Client, sequence: int, pictures: list[bytes]) -> session_pb2.Failed:
    await client.send(unit(sequence, audio=pcm(0.1), video_frames=pictures))
    return await client.failed()


async def test_bombs_are_refused_without_decoding_a_pixel(decoded: list[tuple[int, int]]) -> None:
    written = io.BytesIO()
    Image.new("RGB", (320, 240), (10, 200, 90)).save(written, "JPEG")
    strips, large = siblings(), [png(2896, 2896)] * 16
    assert max(map(len, strips)) <= 69
    async with running_worker(TinyModel()) as rig, sessions(rig, 4) as clients:
        decoded.clear()  # the worker's warm-up has decoded pictures
        for sequence, (bombs, index, fault) in enumerate(
            [(strips, 0, "pixels"), (large, 2, "pictures of the unit to more than")]
        ):
            told = await asyncio.gather(
                *(
                    attack(clients[slot], sequence, bombs[slot:] + bombs[:slot])
                    for slot in ATTACKERS
                )
            )
            for failed in told:
                assert (failed.reason, failed.field) == ("INVALID_FIELD", f"video_frames[{index}]")
                assert fault in failed.message
        assert decoded == []
        await clients[HONEST].send(unit(0, audio=pcm(0.1), video_frames=[written.getvalue()]))
        assert (await clients[HONEST].delta()).sequence == 0
        assert set(decoded) == {(320, 240)}


def padded(kind: str) -> bytes:
    """Return a file with many empty parts before its pixels, which Pillow reads in Python."""
    written = io.BytesIO()
    Image.new("P" if kind == "GIF" else "RGB", (64, 64)).save(written, kind)
    file = written.getvalue()
    if kind == "JPEG":
        return file[:2] + b"\xff\xe1\x00\x02" * 100_000 + file[2:]
    image = file.index(b",")
    return file[:image] + b"!\xfe\x00" * 100_000 + file[image:]


@pytest.mark.parametrize("kind", ["JPEG", "GIF"])
async def test_headers_of_many_parts_are_refused_after_a_few(kind: str) -> None:
    """Reading them all takes seconds in which no other thread of the worker runs."""
    async with running_worker(TinyModel()) as rig, sessions(rig, 1) as clients:
        failed = await attack(clients[0], 0, [padded(kind)] * 2)
        assert failed.field == "video_frames[0]"
        assert "too many parts" in failed.message


async def test_jpegs_of_many_scans_are_refused_without_decoding_a_pixel(
    decoded: list[tuple[int, int]],
) -> None:
    """Each of these pictures alone is accepted; together they would cost many seconds."""
    side = 1000
    written = io.BytesIO()
    Image.new("RGB", (side, side)).save(written, "JPEG", progressive=True)
    picture = written.getvalue()[:-2] + b"\xff\xda\x00\x02" * 90 + b"\xff\xd9"
    async with running_worker(TinyModel()) as rig, sessions(rig, 1) as clients:
        decoded.clear()
        failed = await attack(clients[0], 0, [picture] * 16)
        assert (failed.field, decoded) == ("video_frames[2]", [])
        assert "scans" in failed.message


class Slow(ScriptedModel):
    """Prepares each picture as long as the test wants, and notes the slots in their order."""

    def __init__(self) -> None:
        super().__init__(slot_count=8)
        self.begun: list[int] = []
        self.may_go_on = threading.Event()

    def unit_steps(self, unit: Unit) -> Generator[None, None, Unit | UnitFailure]:
        for _ in unit.frames:
            self.begun.append(unit.slot)
            assert self.may_go_on.wait(WITHIN_S)
            yield
        return self.unit(unit)


async def test_many_pictures_of_some_sessions_delay_another_by_one_turn_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, last, submitted = Slow(), 6, asyncio.Semaphore(0)
    submit = FairPool.submit

    def count(pool: FairPool, work: Any) -> Any:
        submitted.release()
        return submit(pool, work)

    async with running_worker(model) as rig, sessions(rig, last + 1) as clients:
        monkeypatch.setattr(FairPool, "submit", count)
        for number, client in enumerate(clients):
            # The last session sends one picture, when all others have begun to wait.
            frames = [b"x"] * (1 if number == last else 16)
            await client.send(unit(0, video_frames=frames))
            async with asyncio.timeout(WITHIN_S):
                await submitted.acquire()
        model.may_go_on.set()
        for client in reversed(clients):
            assert (await client.delta()).sequence == 0
        # Four threads had work and two sessions waited already. While the last session's picture
        # begins, each other thread may begin one more.
        assert model.begun.index(last) <= 4 + 2 + 4
