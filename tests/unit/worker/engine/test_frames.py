"""Frames arrive as they were sent, in any pieces; those that are too large do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.worker.engine import frames
from duplane.worker.engine.frames import Frames, encode


class Transport:
    """Keeps what is written, and has `unsent` bytes in its buffer.

    It calls `pause` after each write.
    """

    def __init__(self, unsent: int = 0) -> None:
        self.written: list[bytes] = []
        self.unsent = unsent
        self.is_over = False
        self.pause: Callable[[], None] = lambda: None

    def writelines(self, parts: Iterable[bytes | memoryview]) -> None:
        self.written.append(b"".join(parts))
        self.pause()

    def set_write_buffer_limits(self, high: int) -> None:
        assert high

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.is_over

    def abort(self) -> None:
        self.is_over = True


class End:
    """One end of a connection, and what it has received."""

    def __init__(self, unsent: int = 0) -> None:
        self.messages: list[object] = []
        self.transport = Transport(unsent)
        self.frames = Frames(self.messages.append, lambda: None)
        self.frames.connection_made(cast("asyncio.BaseTransport", self.transport))

    def receive(self, content: bytes, most: int) -> None:
        """Receive the content in pieces of at most `most` bytes."""
        while content:
            buffer = self.frames.get_buffer(-1)
            count = min(len(buffer), len(content), most)
            assert count, "an empty buffer"
            buffer[:count] = content[:count]
            self.frames.buffer_updated(count)
            content = content[count:]


def content_of(*messages: object) -> bytes:
    """Return what is sent for messages of one slot."""
    end = End()
    for message in messages:
        end.frames.send(message, 3)
    return b"".join(end.transport.written)


@given(st.lists(st.integers(0, 300), max_size=5), st.integers(1, 1000), st.integers(1, 2000))
def test_messages_arrive_in_order_in_pieces_of_any_size(
    sizes: list[int], most: int, piece_bytes: int
) -> None:
    sent = [np.arange(size, dtype=np.float32) for size in sizes]
    end = End()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "_PIECE_BYTES", piece_bytes)
        content = content_of(("all", sent), *((each,) for each in sent))
    end.receive(content, most)
    (kind, together), *alone = cast("list[tuple[str, list[np.ndarray]]]", end.messages)
    assert kind == "all"
    for arrays in (together, [each for (each,) in cast("list[tuple[np.ndarray]]", alone)]):
        assert len(arrays) == len(sent)
        assert all(map(np.array_equal, arrays, sent))
        assert all(array.dtype == np.float32 for array in arrays)


def test_large_array_is_not_copied_into_the_pickle() -> None:
    array = np.zeros(1 << 16, np.float32)
    head, buffer = encode(array)
    assert len(head) < 1000
    assert np.shares_memory(np.frombuffer(buffer, np.float32), array)


def test_small_messages_of_other_slots_come_between_the_pieces_of_a_large_one() -> None:
    sender, receiver = End(), End()
    sender.transport.pause = sender.frames.pause_writing
    sender.frames.send(("large", np.zeros(1 << 20, np.uint8)), 1)
    sender.frames.send(("small",), 2)
    sender.frames.send(("behind",), 1)
    sender.frames.send(("large, too", np.zeros(1 << 20, np.uint8)), 4)
    assert len(sender.transport.written) == 2, "the transport does not take more"
    while sender.frames._waiting:
        sender.frames.resume_writing()
    receiver.receive(b"".join(sender.transport.written), 1 << 20)
    names = [message[0] for message in cast("list[tuple[str]]", receiver.messages)]
    assert names == ["small", "large", "behind", "large, too"]


def test_frame_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1000)
    end = End()
    end.frames.send(b"x" * 500)
    for message in (b"x" * 1001, np.zeros(1001, np.uint8), [np.zeros(63), np.zeros(63)]):
        with pytest.raises(ValueError, match="more than 1000 bytes"):
            end.frames.send(message)
    assert len(end.transport.written) == 1


@pytest.mark.parametrize(
    "message",
    [b"x" * 1001, np.zeros(1001, np.uint8), np.zeros(1 << 20, np.uint8)],
    ids=["body", "buffer", "large"],
)
def test_frame_that_is_too_large_is_refused(
    message: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = content_of(message)
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1000)
    end = End()
    with pytest.raises(ValueError, match=r"body of \d+ bytes|have \d+ bytes"):
        end.receive(content, len(content))
    assert not end.messages


def test_head_with_more_buffers_than_its_body_has_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="4 buffers"):
        End().receive(frames._PIECE.pack(0, 12) + frames._HEAD.pack(4, 31), 20)


def test_connection_whose_other_end_does_not_read_is_given_up() -> None:
    end = End(unsent=frames._MAX_UNSENT_BYTES)
    end.frames.send("fits")
    assert not end.transport.is_over
    end.transport.unsent += 1
    end.frames.send("does not fit")
    assert end.transport.is_over
    end.frames.send("without effect")
    assert len(end.transport.written) == 2
