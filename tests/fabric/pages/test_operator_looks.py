"""The operator page for people who use a keyboard, a screen reader or a small screen."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from support.browser import Browser
from support.client_packages import needs_node_clients
from support.edge.credential_rig import KeyStore
from support.fabric.in_process import running_edge
from support.operator_page import (
    OperatorPage,
    hold,
    live_page,
    open_recording,
    opened,
    recorded_edge,
)
from support.page_rules import (
    NARROW,
    faults,
    load_rules,
    overflow,
    reach,
    set_width,
    small_targets,
)
from support.scheduler.scheduler_harness import BROKEN, FREE, SchedulerHarness, slot_reports

from duplane.edge.clock import LoopClock
from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.server import Edge
from duplane.edge.watching.unit_figures import LateUnit, Move

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
async def chrome(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Browser]:
    async with Browser.running(tmp_path_factory.mktemp("chrome")) as running:
        yield running


async def check(page: OperatorPage, state: str) -> None:
    """Check the page as it is now, at the width of small phones, in light and in dark colours."""
    tab = page.tab
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await tab.call("Emulation.setEmulatedMedia", features=[feature])
        found = await faults(tab)
        assert found == [], (state, scheme, found)
    assert await overflow(tab) <= 0, state
    assert await small_targets(tab) == [], state
    await tab.picture(f"operator-{state}-small")


async def fill(scheduler: SchedulerHarness, edge: Edge, page: OperatorPage) -> None:
    """Let the fabric have something of everything that the page shows."""
    slots, labels = slot_reports(FREE, FREE, BROKEN, FREE), {"gpu": "h100"}
    worker = await scheduler.worker("a-worker-with-a-long-name", 4, slots=slots, labels=labels)
    await hold(scheduler, worker, "sess_one")
    slot = await hold(scheduler, worker, "sess_two")
    worker.slots[slot].is_paused = True
    await worker.report()
    await (await scheduler.caller(session_id="sess_granted")).granted()
    await page.until_text("workers", "granted")
    await page.until_text("workers", "paused")
    waiting = await scheduler.caller(session_id="sess_waits", needs=labels)
    await waiting.stands(1)
    other = await scheduler.worker("other", release="1.2.3")
    await page.until_state("other", "serving")
    await page.until_text("workers", "release 1.2.3")
    await other.vanish()
    await page.until_state("other", "lost")
    figures, now_s = edge.metrics.figures, LoopClock().now().wall_s
    for back in range(60, 2, -2):
        figures.answered(0.05 + 0.002 * back, now_s - back, is_late=back == 20)
    figures.late(LateUnit("sess_one", "other", 7, now_s - 20, 1200.0, "decode", 900.0))
    figures.moved(Move("sess_one", now_s - 10, "other", "w", "drain", "moved", 120.0))
    await page.until_text("late", "took 1200 ms")
    await page.until_text("queue", "gpu=h100")


@needs_node_clients
async def test_each_state_keeps_the_rules_of_accessibility_on_a_small_screen(
    chrome: Browser,
) -> None:
    async with live_page(chrome) as (scheduler, edge, page):
        tab = page.tab
        await load_rules(tab)
        await set_width(tab, NARROW)
        await check(page, "empty")
        await fill(scheduler, edge, page)
        await check(page, "fabric")
        await page.press("[data-key^=a-worker] .drain")
        await tab.until("document.getElementById('confirm').open")
        await check(page, "question")
        await page.answer(is_yes=False)
        await page.press("#settings summary")
        await page.until_text("apps", "allowed")
        await check(page, "settings")
        await scheduler.stop()
        await page.until_text("status", "No scheduler answers")
        await check(page, "unavailable")
        assert tab.errors == []


@needs_node_clients
async def test_key_and_recording_keep_the_rules_of_accessibility_on_a_small_screen(
    chrome: Browser, tmp_path: Path
) -> None:
    operators = KeyStore(tmp_path, "operators.toml", head="")
    operators.add('operator = "ann"\nscopes = ["read"]')
    credentials = CredentialSettings(operator_keys=operators.path)
    async with (
        running_edge("127.0.0.1:9", credentials=credentials) as edge,
        opened(chrome, edge.address) as page,
    ):
        await page.until_text("status", "The edge demands a key")
        await load_rules(page.tab)
        await set_width(page.tab, NARROW)
        await check(page, "key")
    async with (
        recorded_edge(tmp_path / "recordings", unit_count=1) as recorded,
        opened(chrome, recorded.address) as page,
    ):
        await open_recording(page)
        await load_rules(page.tab)
        await set_width(page.tab, NARROW)
        await page.press("#units button")
        await check(page, "recording")


async def test_worker_is_drained_with_the_keyboard_only(chrome: Browser) -> None:
    async with live_page(chrome) as (scheduler, _, page):
        await scheduler.worker("w")
        await page.until_state("w", "serving")
        tab = page.tab
        await reach(tab, "[data-key=w] .drain")
        await tab.press("Enter")
        await reach(tab, "#confirm-yes")
        await tab.press("Enter")
        await page.until_state("w", "draining")
        await reach(tab, "[data-key=w] .undrain")
        await tab.press("Enter")
        await reach(tab, "#confirm-yes")
        await tab.press("Enter")
        await page.until_state("w", "serving")
        await reach(tab, "#settings summary")
        await tab.press("Enter")
        await page.until_text("apps", "allowed")
