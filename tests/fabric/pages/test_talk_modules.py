"""Parts of the talk page that need no conversation, in the browser that runs them."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from support.edge.live_edge import live_edge
from support.page_rig import Page, browser, open_page

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
async def page(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Page]:
    async with live_edge() as edge, browser(tmp_path_factory.mktemp("chrome")) as chrome:
        yield await open_page(chrome, edge.edge.address)


async def delay(page: Page, latencies: str, fixed: str = "null", count: int = 40) -> float:
    """Return the delay of playback after turns with these latencies; the first takes 100 ms."""
    return await page.tab.evaluate(
        f"""import("/pages/talk/sound.js").then(({{ Delay }}) => {{
          const delay = new Delay(200, {fixed});
          for (let at = 0; at < {count}; at += 1) {{
            delay.add({latencies}, 100);
            delay.update();
          }}
          return delay.ms;
        }})"""
    )


async def test_delay_of_playback_follows_the_network_within_bounds(page: Page) -> None:
    assert await delay(page, "100 + 10 * (at % 10)") == 90 + 40
    assert await delay(page, "100") == 80
    assert await delay(page, "100 + 1000 * (at % 10)") == 600


async def test_delay_of_playback_stays_while_little_is_known(page: Page) -> None:
    assert await delay(page, "100", count=29) == 200


async def test_delay_of_playback_that_a_person_chose_stays(page: Page) -> None:
    assert await delay(page, "100 + 1000 * (at % 10)", fixed="350") == 350


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00 min"), (59.2, "1:00 min"), (600, "10:00 min")]
)
async def test_times_are_shown_in_minutes(page: Page, seconds: float, text: str) -> None:
    script = f'import("/pages/talk/view.js").then(({{ duration }}) => duration({seconds}))'
    assert await page.tab.evaluate(script) == text
