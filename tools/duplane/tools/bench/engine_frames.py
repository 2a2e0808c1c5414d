"""The cost of the messages between a worker and its engine process, for `duplane bench codec`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

import numpy as np

from duplane.fabric.audio import INPUT_RATE_HERTZ, OUTPUT_RATE_HERTZ
from duplane.tools.bench.report import show
from duplane.worker.engine.events import AnsweredUnit
from duplane.worker.engine.frames import Frames
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.types import FloatArray, Unit, UnitOutput

_STAGES = ("audio", "prefill", "decode", "talker", "flow", "hift", "settle")


class _Transport:
    """Takes the pieces of frames in place of a socket."""

    def __init__(self) -> None:
        self.taken: list[bytes | memoryview] = []

    def writelines(self, parts: Iterable[bytes | memoryview]) -> None:
        self.taken.extend(parts)

    def set_write_buffer_limits(self, high: int) -> None:
        del high

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False


def _frames(transport: _Transport) -> Frames:
    frames = Frames(lambda _: None, lambda: None)
    frames.connection_made(cast("asyncio.BaseTransport", transport))
    return frames


def _receive(frames: Frames, content: bytes) -> None:
    """Copy the content into the buffers of `frames`, as a socket does."""
    rest = memoryview(content)
    while rest:
        buffer = frames.get_buffer(-1)
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        frames.buffer_updated(count)
        rest = rest[count:]


def _unit(sample_count: int) -> Unit:
    return Unit(0, np.ones(sample_count, np.float32), sequence=1, rows=12)


def _answer(audio: FloatArray, *, is_listen: bool) -> object:
    output = UnitOutput(
        slot=0,
        context_length=100,
        text="" if is_listen else "Hello there",
        audio=audio,
        token_ids=(1,) if is_listen else tuple(range(10)),
        is_listen=is_listen,
        end_of_turn=False,
        text_token_count=0 if is_listen else 8,
        stage_s=dict.fromkeys(_STAGES, 0.01),
        state=bytes(64),
    )
    return "event", 0, AnsweredUnit(UnitRecord(_unit(0), batch_size=1), output)


def bench_engine_frames(best_us: Callable[[Callable[[], object]], float]) -> None:
    """Measure and print. `best_us` returns the microseconds of a call."""
    speech = np.ones(OUTPUT_RATE_HERTZ, np.float32)
    rows: list[tuple[str, ...]] = []
    for name, message in (
        ("unit", ("tell", 0, "put", {"entry": UnitRecord(_unit(INPUT_RATE_HERTZ))})),
        ("answer: listens", _answer(speech[:0], is_listen=True)),
        ("answer: speaks", _answer(speech, is_listen=False)),
    ):
        transport = _Transport()
        sender, receiver = _frames(transport), _frames(_Transport())
        sender.send(message)
        content = b"".join(transport.taken)

        def send(sender: Frames = sender, message: object = message) -> None:
            sender.send(message)

        def receive(receiver: Frames = receiver, content: bytes = content) -> None:
            _receive(receiver, content)

        times_us = best_us(send), best_us(receive)
        rows.append((name, *(f"{each:.1f}" for each in times_us), f"{len(content) / 1e3:.0f}"))
    show(
        "one message between a worker and its engine process, us of one core without the socket",
        ("", "send", "receive", "KB"),
        rows,
    )
