"""The operator page in Chromium, before a real scheduler."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from support.browser import Browser
from support.edge.credential_rig import KeyStore
from support.fabric.in_process import running_edge
from support.operator_page import (
    hold,
    live_page,
    open_recording,
    opened,
    real_scheduler,
    recorded_edge,
)
from support.scheduler.large_fabric import large_fabric

from duplane.edge.credentials.settings import CredentialSettings

pytestmark = pytest.mark.slow
SOON_S = 1.0  # in which the page must show a change


@pytest.fixture(scope="module")
async def chrome(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Browser]:
    async with Browser.running(tmp_path_factory.mktemp("chrome")) as running:
        yield running


@pytest.mark.timing
async def test_page_follows_the_begin_the_move_and_the_end_of_a_session(chrome: Browser) -> None:
    async with live_page(chrome) as (scheduler, _, page):
        first = await scheduler.worker("first", 2)
        await page.until_state("first", "serving")
        slot = await hold(scheduler, first, "sess_1")
        await page.until_text("sessions", "sess_1", SOON_S)
        await page.until_text("workers", f"{slot} held", SOON_S)
        second = await scheduler.worker("second")
        moving = await scheduler.caller(session_id="sess_1", avoided_worker_ids=["first"])
        moved = await second.claim(await moving.granted())
        await page.until_text("log", "Session sess_1 moves from first to second", SOON_S)
        await first.finish(slot)
        await page.until_no_text("sessions", "first", SOON_S)
        await second.finish(moved.slot)
        await page.until_no_text("sessions", "sess_1", SOON_S)
        await page.until_text("log", "Session sess_1 ends at second", SOON_S)
        assert page.tab.errors == []


async def test_page_shows_the_queue_and_removes_a_ticket(chrome: Browser) -> None:
    async with live_page(chrome) as (scheduler, _, page):
        waiting = await scheduler.caller(session_id="sess_waits")
        await waiting.stands(1)
        await page.until_text("queue", "sess_waits")
        await page.press("#queue button")
        await page.answer(is_yes=True)
        await page.until_text("queue", "Nobody waits.")
        assert (await waiting.refused()).reason.name == "TICKET_CANCELLED"
        await page.until_text("status", "The ticket was removed from the queue.")


async def test_drain_is_asked_for_and_taken_back(chrome: Browser) -> None:
    async with live_page(chrome) as (scheduler, _, page):
        worker = await scheduler.worker("w", 2)
        await hold(scheduler, worker, "sess_1")
        await page.until_text("workers", "held")
        await page.press("[data-key=w] .drain")
        await page.tab.until("document.getElementById('confirm').open")
        # Asked again at once, before the page has noticed that it was answered.
        no = "document.querySelector('#confirm [value=no]').click()"
        drain = "document.querySelector('[data-key=w] .drain').click()"
        await page.tab.evaluate(f"{no}; {drain}")
        effect = await page.answer(is_yes=True)
        assert "1 session moves when others have free slots." in effect
        await page.until_state("w", "draining")
        await page.press("[data-key=w] .undrain")
        await page.answer(is_yes=True)
        await page.until_state("w", "serving")


async def test_page_is_used_with_the_keyboard_and_keeps_the_focus(chrome: Browser) -> None:
    async with live_page(chrome) as (scheduler, _, page):
        worker = await scheduler.worker("w", 2)
        first = await hold(scheduler, worker, "sess_1")
        await hold(scheduler, worker, "sess_2")
        await page.until_text("sessions", "sess_2")
        tab = page.tab
        await tab.evaluate("document.querySelector('[data-key=w] .drain').focus()")
        await tab.press("Enter")
        await tab.until("document.getElementById('confirm').open")
        assert await tab.evaluate("document.activeElement.textContent") == "Cancel"
        await tab.press("Escape")
        await tab.until("!document.getElementById('confirm').open")
        assert await tab.evaluate("document.activeElement.className") == "drain"
        await tab.evaluate("document.querySelector('[aria-label=\"End session sess_1\"]').focus()")
        await worker.finish(first)
        await page.until_no_text("sessions", "sess_1")
        focused = "document.activeElement.getAttribute('aria-label')"
        assert await tab.evaluate(focused) == "End session sess_2"


async def test_kind_of_session_is_refused_and_allowed_again(chrome: Browser) -> None:
    async with live_page(chrome) as (_, _, page):
        await page.press("#settings summary")
        await page.until_text("estimates", "audio_duplex")
        for verb, state in [("Refuse", "refused"), ("Allow", "allowed")]:
            await page.press(f"#apps [aria-label='{verb} new sessions of Audio Full-Duplex']")
            await page.answer(is_yes=True)
            await page.until_text("settings-status", f"Audio Full-Duplex are {state}")


async def test_page_keeps_what_it_knows_while_no_scheduler_answers(chrome: Browser) -> None:
    async with live_page(chrome) as (scheduler, _, page):
        await scheduler.worker("w")
        await page.until_state("w", "serving")
        await scheduler.stop()
        await page.until_text("status", "No scheduler answers")
        await page.until_text("workers", "w")
        await scheduler.start()
        await page.until_live()


async def test_page_asks_for_a_key_and_keeps_it_in_the_tab_only(
    chrome: Browser, tmp_path: Path
) -> None:
    operators = KeyStore(tmp_path, "operators.toml", head="")
    key = operators.add('operator = "ann"\nscopes = ["read"]').text
    credentials = CredentialSettings(operator_keys=operators.path)
    async with (
        real_scheduler() as scheduler,
        running_edge(
            scheduler.address, credentials=credentials, operator_listen="127.0.0.1:0"
        ) as edge,
        opened(chrome, edge.operator_address) as page,
    ):
        await scheduler.worker("w")
        tab = page.tab
        await page.until_text("status", "The edge demands a key")
        assert await tab.evaluate("document.activeElement.id") == "key"
        assert await tab.evaluate("document.getElementById('content').hidden")
        for text, answer in [("wrong", "The edge does not accept this key"), (key, "Live.")]:
            await tab.evaluate(f"document.getElementById('key').value = {text!r}")
            await tab.press("Enter")
            await page.until_text("status", answer)
        await page.until_state("w", "serving")
        assert await tab.evaluate("document.getElementById('key').value") == ""
        assert await tab.evaluate("localStorage.length") == 0
        assert await tab.evaluate("document.cookie") == ""
        await tab.evaluate("window.isOld = true")
        await tab.call("Page.reload")
        await tab.until("!window.isOld && document.readyState === 'complete'")
        await page.until_live()
        assert not [address for address in tab.addresses if key in address]
        await page.press("[data-key=w] .drain")
        await page.answer(is_yes=True)
        await page.until_text("status", "The edge refuses: this operator lacks the scope 'drain'")


async def test_recording_is_played_beside_its_units(chrome: Browser, tmp_path: Path) -> None:
    async with (
        recorded_edge(tmp_path / "recordings", unit_count=3) as recorded,
        opened(chrome, recorded.address) as page,
    ):
        await open_recording(page)
        await page.until_text("units", "model listens (3 answers)")
        await page.tab.until("document.getElementById('sound').duration > 2")
        await page.press("#units tr:last-of-type button")
        await page.tab.until("!!document.querySelector('#units tr[aria-current]')")


async def test_page_shows_a_fabric_of_a_thousand_sessions(chrome: Browser) -> None:
    async with (
        large_fabric(worker_count=125) as scheduler,
        running_edge(scheduler) as edge,
        opened(chrome, edge.address) as page,
    ):
        await page.until_text("fabric", "125 workers, 1000 sessions")
        await page.until_text("sessions", "1000 rows; the first 500 are shown.")
        workers = "document.querySelectorAll('#workers li.worker').length"
        assert await page.tab.evaluate(workers) == 125
        held = "document.querySelectorAll('#workers li.held').length"
        assert await page.tab.evaluate(held) == 1000
        await page.press("[data-key=worker-0124] .drain")
        assert "8 sessions move" in await page.answer(is_yes=False)
        assert page.tab.errors == []


async def test_page_fits_a_narrow_screen(chrome: Browser) -> None:
    async with live_page(chrome) as (scheduler, _, page):
        worker = await scheduler.worker("a-worker-with-a-name-that-is-quite-long", 16)
        await hold(scheduler, worker, "sess_" + 12 * "f")
        await page.until_text("sessions", "sess_f")
        await page.tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=320,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        await page.tab.until("document.documentElement.scrollWidth <= 320")
