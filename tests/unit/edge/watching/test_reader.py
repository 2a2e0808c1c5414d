"""A page that does not read gets a snapshot in place of what it missed."""

from __future__ import annotations

from duplane.edge.access import ANONYMOUS
from duplane.edge.watching.reader import MAX_UNREAD_BYTES, Reader


async def test_page_that_does_not_read_gets_a_snapshot_in_place_of_the_changes() -> None:
    reader = Reader(ANONYMOUS, lambda: b"snapshot")
    reader.push(b"before")
    assert await reader.read() == b"snapshot"
    reader.push(b"one")
    reader.push(b"two")
    assert await reader.read() == b"onetwo"
    for _ in range(10):
        reader.push(bytes(MAX_UNREAD_BYTES // 4))
    reader.push(b"after")
    assert await reader.read() == b"snapshot"
    reader.push(b"three")
    assert await reader.read() == b"three"


async def test_ended_stream_stays_ended() -> None:
    reader = Reader(ANONYMOUS, lambda: b"snapshot")
    reader.end()
    assert await reader.read() == b""
    reader.push(b"one")
    assert await reader.read() == b""
