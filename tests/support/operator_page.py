"""The operator page in a real browser, before a real scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from support.browser import Browser, Tab
from support.edge.live_edge import begin, end, exchange, live_edge
from support.fabric.in_process import running_edge
from support.scheduler.scheduler_harness import FakeWorker, SchedulerHarness
from support.time_limits import WITHIN_S, until

from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.server import Edge


class OperatorPage:
    """The operator page in one tab."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab

    async def until_live(self) -> None:
        await self.tab.until("document.getElementById('status').textContent.startsWith('Live.')")

    async def until_text(self, element: str, text: str, within_s: float = WITHIN_S) -> None:
        script = f"document.getElementById({element!r}).textContent.includes({text!r})"
        await self.tab.until(script, within_s)

    async def until_no_text(self, element: str, text: str, within_s: float = WITHIN_S) -> None:
        script = f"!document.getElementById({element!r}).textContent.includes({text!r})"
        await self.tab.until(script, within_s)

    async def until_state(self, worker: str, state: str, within_s: float = WITHIN_S) -> None:
        script = f"document.querySelector('[data-key={worker}]')?.dataset.state === {state!r}"
        await self.tab.until(script, within_s)

    async def press(self, selector: str) -> None:
        await self.tab.until(f"!!document.querySelector({selector!r})")
        await self.tab.evaluate(f"document.querySelector({selector!r}).click()")

    async def answer(self, is_yes: bool) -> str:
        """Answer the dialog; return its text."""
        await self.tab.until("document.getElementById('confirm').open")
        text = await self.tab.text("confirm-text")
        await self.press("#confirm-yes" if is_yes else "#confirm [value=no]")
        await self.tab.until("!document.getElementById('confirm').open")
        return text


@contextlib.asynccontextmanager
async def opened(chrome: Browser, address: str) -> AsyncGenerator[OperatorPage]:
    """Open the page of an edge in a tab of its own."""
    tab = await chrome.tab()
    await tab.open(f"http://{address}/operator")
    yield OperatorPage(tab)
    await tab.call("Page.close")


def real_scheduler() -> contextlib.AbstractAsyncContextManager[SchedulerHarness]:
    """Return a scheduler that calls no worker of a test silent: they send no regular reports."""
    return SchedulerHarness.running(report_interval_s=WITHIN_S)


@contextlib.asynccontextmanager
async def live_page(
    chrome: Browser, **settings: Any
) -> AsyncGenerator[tuple[SchedulerHarness, Edge, OperatorPage]]:
    """Run a scheduler and an edge, and open the page."""
    async with (
        real_scheduler() as scheduler,
        running_edge(scheduler.address, **settings) as edge,
        opened(chrome, edge.address) as page,
    ):
        await page.until_live()
        yield scheduler, edge, page


async def hold(scheduler: SchedulerHarness, worker: FakeWorker, session_id: str) -> int:
    """Begin a session on the only worker; return its slot."""
    caller = await scheduler.caller(session_id=session_id)
    return (await worker.claim(await caller.granted())).slot


@contextlib.asynccontextmanager
async def recorded_edge(directory: Path, unit_count: int) -> AsyncGenerator[Edge]:
    """Run an edge that has recorded one session of some units, with its mixed sound."""
    recording = RecordingSettings(directory=directory, consent=Consent.ALWAYS)
    async with live_edge(recording=recording) as live:
        async with live.connect() as client:
            await begin(client)
            await live.fabric.conversation()
            for _ in range(unit_count):
                await exchange(client)
            await end(client)

        async def is_mixed() -> bool:
            return any(recording.directory.glob("*/replay.wav"))

        await until(is_mixed, WITHIN_S)
        yield live.edge


async def open_recording(page: OperatorPage) -> None:
    """Let the page show the only recording."""
    await page.tab.until("!document.getElementById('content').hidden")
    await page.press("#load-recordings")
    await page.press("#recordings button")
    await page.tab.until("!document.getElementById('player').hidden")
