"""Lists that are sent in pages."""

from __future__ import annotations

import pytest

from duplane.fabric.v1 import admin_pb2
from duplane.scheduler.rpc import pages as pages_module
from duplane.scheduler.rpc.pages import PAGE_LENGTH, Pages


class Tickets:
    """A list of tickets, whose ids are their keys."""

    def __init__(self, count: int) -> None:
        self.ids = {f"{number:05}" for number in range(count)}
        self.pages = Pages(lambda: self.ids, str, self._describe)

    def _describe(self, key: str) -> admin_pb2.TicketStatus | None:
        return admin_pb2.TicketStatus(ticket_id=key) if key in self.ids else None

    async def page(self, page_size: int, token: str = "") -> tuple[list[str], str]:
        found, following = await self.pages.page(page_size, token)
        return [one.ticket_id for one in found], following


@pytest.mark.parametrize("page_size", [1, 3, 7, 8])
async def test_pages_contain_each_item_once_in_order(page_size: int) -> None:
    tickets = Tickets(7)
    found, token = await tickets.page(page_size)
    while token:
        page, token = await tickets.page(page_size, token)
        assert 1 <= len(page) <= page_size
        found += page
    assert found == sorted(tickets.ids)


async def test_empty_list_is_one_page() -> None:
    assert await Tickets(0).page(0) == ([], "")


@pytest.mark.parametrize("page_size", [0, PAGE_LENGTH + 1])
async def test_page_has_a_largest_length(page_size: int) -> None:
    found, token = await Tickets(PAGE_LENGTH + 1).page(page_size)
    assert len(found) == PAGE_LENGTH
    assert token == found[-1]


async def test_items_that_end_between_two_pages_neither_hide_nor_repeat_others() -> None:
    tickets = Tickets(6)
    assert await tickets.page(2) == (["00000", "00001"], "00001")
    tickets.ids -= {"00001", "00002"}
    assert await tickets.page(2, "00001") == (["00003", "00004"], "00004")


async def test_page_that_another_scheduler_began_is_continued() -> None:
    _, token = await Tickets(6).page(4)
    assert await Tickets(6).page(4, token) == (["00004", "00005"], "")


async def test_first_page_shows_the_present_items() -> None:
    tickets = Tickets(2)
    await tickets.page(0)
    tickets.ids.add("00009")
    assert await tickets.page(0) == (["00000", "00001", "00009"], "")


async def test_page_of_large_items_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    size = admin_pb2.TicketStatus(ticket_id="00000").ByteSize()
    monkeypatch.setattr(pages_module, "PAGE_BYTES", 2 * size - 1)
    assert await Tickets(3).page(0) == (["00000", "00001"], "00001")
