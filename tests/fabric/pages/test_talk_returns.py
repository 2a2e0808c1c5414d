"""The talk page loses its connection or its edge, and returns to its conversation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import numpy as np
import orjson
import pytest
from support.browser import Browser
from support.edge.live_edge import HandSetClock, LiveEdge, live_edge
from support.edge.returning_client import detached, resumes
from support.fabric.fault_proxy import FaultProxy
from support.fabric.mixed_fabric import MixedFabric
from support.fabric.returning_callers import Fabric
from support.page_rig import Page, Script, browser, check_each_sample_once, open_page, speech
from support.time_limits import WITHIN_S

from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

pytestmark = pytest.mark.slow
TURNS = (range(1, 3), range(5, 7))
AWAY = "The connection to the server is lost: the page connects again."
NOT_RESUMED = {
    "lost": "The connection was lost, and the server does not have the conversation any more.",
    "expired": "The connection was lost for too long: the server has ended the conversation.",
    "refused": "The connection was lost, and the server refuses to continue the conversation.",
    "stale": "The connection was lost, and the server lacks the last part of the conversation.",
}
UNIT_COUNT = "document.querySelectorAll('#units li').length"
LOST_SAMPLES = 24_000
FORGET = """
import("/pages/client/resuming.js").then(({ SentInput }) => {
  const { add } = SentInput.prototype;
  window.spoken = 0;
  SentInput.prototype.add = function (samples, more) {
    add.call(this, samples, more);
    window.spoken += samples.length;
  };
  Object.defineProperty(SentInput.prototype, "firstSample", { get: () => window.spoken });
})
"""
KEPT = replace(Limits(), hold_s=600, resume_s=600, close_s=0.2)
"""A session whose client does not say that it has left stays for longer than a test runs."""


@pytest.fixture(scope="module")
async def chrome(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Browser]:
    async with browser(tmp_path_factory.mktemp("chrome")) as running:
        yield running


@contextlib.asynccontextmanager
async def speaking_edge(
    script: Script, *, limits: Limits = KEPT, clock: HandSetClock | None = None
) -> AsyncGenerator[LiveEdge]:
    """Run an edge whose sessions can move, with a worker that follows a script."""
    async with live_edge(limits, continuity="worker", clock=clock) as edge:
        edge.fabric.model_digest = "m"
        edge.fabric.on_unit = script
        yield edge


async def lose(proxy: FaultProxy, page: Page) -> None:
    """Reset the connections, refuse others, and wait until the page says so."""
    await proxy.refuse()
    await proxy.reset()
    await page.tab.until(f"document.getElementById('status').textContent === '{AWAY}'")
    assert await page.state() == "talking"


async def until_back(page: Page) -> None:
    await page.tab.until("document.getElementById('status').textContent === 'Speak now.'")


async def test_conversation_goes_on_after_its_connection_is_reset(chrome: Browser) -> None:
    """Each word and each sample of both turns comes once, and all sound is sent."""
    script = Script(TURNS)
    async with speaking_edge(script) as edge, FaultProxy(edge.edge.address) as proxy:
        page = await open_page(chrome, proxy.address)
        await page.talk()
        await page.until_words(1)
        await lose(proxy, page)
        await proxy.listen()
        await until_back(page)
        await page.until_words(2)
        expected = await page.expected([[speech(unit) for unit in turn] for turn in TURNS])
        await page.until_loud(int(np.count_nonzero(expected)))
        played = await page.played()
        assert await page.words() == ["word1 word2 ", "word5 word6 "]
        assert "dropped" not in await page.tab.text("summary")
        await page.end()
        assert await page.status() == "The conversation is over."
        units = orjson.loads(await page.offered(-1))["units"]
        assert resumes(edge, "same_edge") == 1
    check_each_sample_once(expected, played)
    assert [unit["index"] for unit in units] == list(range(len(units)))
    assert all(unit["latencyMs"] is not None for unit in units)


@pytest.mark.parametrize(("gap_s", "is_played"), [(1.0, True), (4.0, False)])
async def test_sound_that_was_missed_is_played_only_after_a_short_gap(
    chrome: Browser, gap_s: float, *, is_played: bool
) -> None:
    """The answer to unit 2 comes while the page has no connection; its words are shown."""
    script = Script(TURNS)
    has_unit = asyncio.Event()
    answers: list[session_pb2.ConverseResponse] = []

    def hold_unit_2(unit: session_pb2.Unit) -> Sequence[session_pb2.ConverseResponse]:
        if unit.sequence != TURNS[0][-1]:
            return script(unit)
        answers.extend(script(unit))
        has_unit.set()
        return []

    clock = HandSetClock()
    async with (
        speaking_edge(script, clock=clock) as edge,
        FaultProxy(edge.edge.address) as proxy,
    ):
        edge.fabric.on_unit = hold_unit_2
        page = await open_page(chrome, proxy.address)
        await page.talk()
        conversation = await edge.fabric.conversation()
        async with asyncio.timeout(WITHIN_S):
            await has_unit.wait()
        await page.until_words(1)
        await lose(proxy, page)
        await detached(edge)
        clock.advance(gap_s)
        conversation.say(*answers)
        await proxy.listen()
        await until_back(page)
        await page.until_words(2)
        heard = [list(TURNS[0]) if is_played else [TURNS[0][0]], list(TURNS[1])]
        expected = await page.expected([[speech(unit) for unit in turn] for turn in heard])
        await page.until_loud(int(np.count_nonzero(expected)))
        played = await page.played()
        assert await page.words() == ["word1 word2 ", "word5 word6 "]
        await page.end()
    check_each_sample_once(expected, played)


async def test_lost_input_counts_as_dropped_units(chrome: Browser) -> None:
    """The page keeps no input here, so the server never gets what was said meanwhile."""
    async with speaking_edge(Script(TURNS)) as edge, FaultProxy(edge.edge.address) as proxy:
        page = await open_page(chrome, proxy.address)
        await page.tab.evaluate(FORGET)
        await page.talk()
        await page.tab.until(f"{UNIT_COUNT} >= 2")
        await lose(proxy, page)
        spoken = await page.tab.evaluate("window.spoken")
        await page.tab.until(f"window.spoken >= {spoken + LOST_SAMPLES}")
        before = await page.tab.evaluate(UNIT_COUNT)
        await proxy.listen()
        await until_back(page)
        await page.tab.until(f"{UNIT_COUNT} >= {before + 4}")
        assert "dropped units" in await page.tab.text("summary")
        await page.end()
        units = orjson.loads(await page.offered(-1))["units"]
    (lossy,) = [at for at, unit in enumerate(units) if unit["droppedUnits"]]
    assert units[lossy]["droppedUnits"] >= 2
    # Each unit would seem to be late for as long as sound was lost.
    assert min(unit["latencyMs"] for unit in units[lossy + 1 :]) < 1_000


async def test_conversation_that_has_ended_meanwhile_is_said(chrome: Browser) -> None:
    clock = HandSetClock()
    async with (
        speaking_edge(Script(TURNS), clock=clock) as edge,
        FaultProxy(edge.edge.address) as proxy,
    ):
        page = await open_page(chrome, proxy.address)
        await page.talk()
        await page.tab.until(f"{UNIT_COUNT} >= 1")
        await lose(proxy, page)
        await detached(edge)
        clock.advance(KEPT.resume_s)
        await edge.until_session_count(0)
        await proxy.listen()
        await page.until_state("ended")
        assert await page.status() == NOT_RESUMED["expired"]
        assert not await page.tab.evaluate("document.getElementById('after').hidden")
        await page.talk()
        await page.end()


@pytest.mark.parametrize("code", NOT_RESUMED)
async def test_each_refused_return_has_its_sentence(chrome: Browser, code: str) -> None:
    async with live_edge() as edge:
        page = await open_page(chrome, edge.edge.address)
        sentence = await page.tab.evaluate(
            f"""(async () => {{
              const {{ sentenceOf }} = await import("/pages/talk/view.js");
              const {{ ConnectionLostError }} = await import("/pages/client/errors.js");
              const error = new ConnectionLostError("detail", {{ code: "resume_{code}" }});
              return sentenceOf(error, "talking");
            }})()"""
        )
    assert sentence == NOT_RESUMED[code]


async def test_closed_tab_ends_its_session_at_once(chrome: Browser) -> None:
    async with speaking_edge(Script(TURNS)) as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.talk()
        await page.tab.until(f"{UNIT_COUNT} >= 1")
        await page.tab.close()
        await edge.until_session_count(0)


async def test_page_that_is_left_ends_its_session_at_once(chrome: Browser) -> None:
    async with speaking_edge(Script(TURNS)) as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.talk()
        await page.tab.until(f"{UNIT_COUNT} >= 1")
        await page.tab.open("about:blank")
        await edge.until_session_count(0)


@pytest.mark.parametrize("is_away", [False, True], ids=["connected", "away"])
async def test_end_ends_the_session_at_once(chrome: Browser, *, is_away: bool) -> None:
    async with speaking_edge(Script(TURNS)) as edge, FaultProxy(edge.edge.address) as proxy:
        page = await open_page(chrome, proxy.address)
        await page.talk()
        await page.tab.until(f"{UNIT_COUNT} >= 1")
        if is_away:
            await lose(proxy, page)
            await proxy.listen()
        await page.end()
        await edge.until_session_count(0)
        assert await page.status() == "The conversation is over."


async def test_conversation_goes_on_at_another_edge_when_its_edge_is_killed(
    chrome: Browser,
) -> None:
    async with MixedFabric.starting({}) as processes:
        fabric = Fabric(processes, await processes.start("scheduler", is_former=False))
        await asyncio.gather(fabric.add_worker(), fabric.add_edge(), fabric.add_edge())
        former, other = fabric.edges
        async with FaultProxy(former.address) as proxy:
            page = await open_page(chrome, proxy.address)
            await page.talk()
            await page.tab.until(f"{UNIT_COUNT} >= 2")
            await proxy.refuse()
            await former.kill()
            await page.tab.until(f"document.getElementById('status').textContent === '{AWAY}'")
            before = await page.tab.evaluate(UNIT_COUNT)
            proxy.target = other.address
            await proxy.listen()
            await until_back(page)
            await page.tab.until(f"{UNIT_COUNT} >= {before + 3}")
            created = [event for _, event in page.tab.frames if event["type"] == "session.created"]
            assert len(created) == 1
            await page.end()
            units = orjson.loads(await page.offered(-1))["units"]
            assert [unit["index"] for unit in units] == list(range(len(units)))
            await fabric.all_free(other)
