"""The rules of accessibility that every state of a web page keeps, in the browser that shows it."""

from __future__ import annotations

from typing import Any

from support.browser import Tab
from support.client_packages import SCRIPTS

NARROW = 320
LONGEST_TABS = 60
_AXE = SCRIPTS / "node_modules/axe-core/axe.min.js"
_RULES = """
axe.run().then(({ violations }) => violations.map(({ id, nodes }) => [
  id, nodes.map(({ html, failureSummary }) => `${html} ${failureSummary}`),
]))
"""
_SMALL = """
[...document.querySelectorAll(
  "button, input:not([type=checkbox]), label:has([type=checkbox]), select, textarea, summary, a",
)]
  .filter((each) => each.checkVisibility())
  .filter((each) => {
    const { width, height } = each.getBoundingClientRect();
    return width < 44 || height < 44;
  })
  .map((each) => each.outerHTML)
"""


async def load_rules(tab: Tab) -> None:
    """Load axe into the page. Needs the clients for Node."""
    await tab.evaluate(f"{_AXE.read_text()}; true")


async def faults(tab: Tab) -> list[Any]:
    """Return what the page as it is now does against the rules."""
    return await tab.evaluate(_RULES)


async def small_targets(tab: Tab) -> list[str]:
    """Return what is too small for a finger."""
    return await tab.evaluate(_SMALL)


async def set_width(tab: Tab, width: int, height: int = 640) -> None:
    """Give the page the screen of a phone."""
    await tab.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=height,
        deviceScaleFactor=1,
        mobile=True,
    )


async def overflow(tab: Tab) -> int:
    """Return by how many pixels the page is wider than its screen."""
    return await tab.evaluate("document.documentElement.scrollWidth - innerWidth")


async def reach(tab: Tab, selector: str) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(LONGEST_TABS):
        if await tab.evaluate(f"document.activeElement.matches({selector!r})"):
            return
        await tab.press("Tab")
    raise AssertionError(f"{selector} cannot be reached with the keyboard")
