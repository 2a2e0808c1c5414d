"""The talk page for people who use a keyboard, a screen reader or a small screen."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from support.browser import Browser
from support.client_packages import needs_node_clients
from support.edge.live_edge import live_edge
from support.page_rig import Page, Script, browser, open_page
from support.page_rules import (
    NARROW,
    faults,
    load_rules,
    overflow,
    reach,
    set_width,
    small_targets,
)

from duplane.fabric.v1 import lease_pb2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
async def chrome(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Browser]:
    async with browser(tmp_path_factory.mktemp("chrome")) as running:
        yield running


async def check(page: Page, state: str) -> None:
    """Check the page as it is now, at the width of small phones."""
    assert await faults(page.tab) == []
    assert await overflow(page.tab) <= 0
    assert await small_targets(page.tab) == []
    await page.tab.picture(f"talk-{state}-small")


@needs_node_clients
async def test_each_state_keeps_the_rules_of_accessibility_on_a_small_screen(
    chrome: Browser,
) -> None:
    async with live_edge() as edge:
        edge.fabric.on_unit = Script([range(1, 3)])
        page = await open_page(chrome, edge.edge.address)
        await set_width(page.tab, NARROW)
        await load_rules(page.tab)
        await page.until_state("idle")
        await check(page, "idle")
        await page.tab.evaluate("document.querySelector('details').open = true")
        await check(page, "settings")
        await page.tab.evaluate("document.querySelector('details').open = false")
        edge.fabric.is_automatic = False
        await page.start()
        acquisition = await edge.fabric.acquisition()
        acquisition.queued(lease_pb2.Queued(ticket_id="q_1", position=1, queue_length=1))
        await page.until_state("queued")
        await check(page, "queued")
        edge.fabric.is_automatic = True
        acquisition.grant()
        await page.until_words(1)
        await check(page, "talking")
        await page.tab.evaluate("document.getElementById('mute').click()")
        await check(page, "muted")
        await page.end()
        await check(page, "ended")


async def test_conversation_needs_only_the_keyboard(chrome: Browser) -> None:
    async with live_edge() as edge:
        edge.fabric.on_unit = Script([range(1, 30)])
        page = await open_page(chrome, edge.edge.address)
        await page.until_state("idle")
        await page.tab.press("Enter")  # nothing has the focus yet
        await page.until_state("talking")
        await page.until_words(1)
        await reach(page.tab, "#interrupt")
        await page.tab.press("Enter")
        await page.tab.until("document.querySelector('#text p.cut')")
        await reach(page.tab, "#start")
        await page.tab.press("Enter")
        await page.until_state("ended")
        assert await focused(page) == "start"


async def test_focus_stays_on_the_page_when_its_button_disappears(chrome: Browser) -> None:
    async with live_edge() as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.talk()
        await page.tab.evaluate("document.getElementById('mute').focus()")
        await page.end()
        assert await focused(page) == "start"


async def focused(page: Page) -> str:
    return await page.tab.evaluate("document.activeElement.id")
