"""The talk page while the network, the worker or the microphone fails."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.browser import Browser
from support.edge.live_edge import live_edge
from support.fabric.fault_proxy import FaultProxy
from support.page_rig import (
    Page,
    Script,
    Sound,
    browser,
    check_each_sample_once,
    open_page,
    speech,
)

from duplane.edge.settings import Limits
from duplane.fabric.errors import Reason
from duplane.fabric.v1 import session_pb2

pytestmark = pytest.mark.slow
TURNS = (range(1, 5), range(6, 9))
SEED = 7
MEANT_LATE_S = 0.18  # what the delay of playback hides, 0.2 s, less what the measurement may miss


@pytest.fixture(scope="module")
async def chrome(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Browser]:
    async with browser(tmp_path_factory.mktemp("chrome")) as running:
        yield running


async def hear_all(page: Page) -> tuple[Sound, Sound]:
    """Wait until both turns are played; return what was expected and what was played."""
    await page.until_words(2)
    expected = await page.expected([[speech(unit) for unit in turn] for turn in TURNS])
    await page.until_loud(int(np.count_nonzero(expected)))
    return expected, await page.played()


@pytest.mark.timing
async def test_uneven_network_makes_no_gap(chrome: Browser) -> None:
    """Each unit comes up to 150 ms late; the delay of playback hides this."""
    uneven = random.Random(SEED)
    script = Script(TURNS)
    async with live_edge() as edge, FaultProxy(edge.edge.address) as proxy:

        def speak_late(unit: session_pb2.Unit) -> Sequence[session_pb2.ConverseResponse]:
            proxy.down.delay_s = uneven.uniform(0, 0.15)
            return script(unit)

        edge.fabric.on_unit = speak_late
        page = await open_page(chrome, proxy.address)
        await page.talk()
        expected, played = await hear_all(page)
        late_s = await page.tab.evaluate("window.lateS")
        summary = await page.tab.text("summary")
        await page.end()
        assert page.tab.errors == []
    check_each_sample_once(expected, played)
    if late_s > MEANT_LATE_S:
        pytest.skip(f"sound came {late_s:.3f} s late: the machine is too slow to judge gaps")
    assert "gaps in the sound" not in summary


async def test_gap_of_a_bad_network_is_counted_and_loses_nothing(chrome: Browser) -> None:
    script = Script(TURNS)
    async with live_edge() as edge, FaultProxy(edge.edge.address) as proxy:

        def speak_late(unit: session_pb2.Unit) -> Sequence[session_pb2.ConverseResponse]:
            proxy.down.delay_s = 0.7 if unit.sequence == 2 else 0.0
            return script(unit)

        edge.fabric.on_unit = speak_late
        page = await open_page(chrome, proxy.address)
        await page.talk()
        expected, played = await hear_all(page)
        assert "gaps in the sound" in await page.tab.text("summary")
        await page.end()
    check_each_sample_once(expected, played)


async def test_conversation_that_moves_is_marked_and_goes_on(chrome: Browser) -> None:
    script = Script((range(4, 5),))
    async with live_edge(slot_count=2, continuity="worker") as edge:
        edge.fabric.model_digest = "m"
        edge.fabric.on_unit = script
        page = await open_page(chrome, edge.edge.address)
        await page.talk()
        first = await edge.fabric.conversation()
        await page.tab.until("document.querySelectorAll('#units li').length >= 1")
        first.fail(Reason.UNAVAILABLE)
        await page.tab.until("document.querySelector('#units li.moved')")
        await page.until_words(1)
        assert await page.words() == ["word4 "]
        assert await page.status() == "Speak now."
        await page.end()


async def test_lost_microphone_ends_the_conversation_with_a_sentence(chrome: Browser) -> None:
    async with live_edge() as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.talk()
        await page.tab.evaluate(
            "microphones.at(-1).getTracks()[0].dispatchEvent(new Event('ended'))"
        )
        await page.until_state("ended")
        assert (await page.status()).startswith("The microphone is gone")
        await page.talk()
        await page.end()


async def test_lost_connection_is_said(chrome: Browser) -> None:
    async with live_edge(replace(Limits(), close_s=0.1, resume_s=0)) as edge:
        async with FaultProxy(edge.edge.address) as proxy:
            page = await open_page(chrome, proxy.address)
            await page.talk()
            await proxy.reset()
            await page.until_state("ended")
        said = "The connection to the server is lost, and the conversation with it."
        assert await page.status() == said


async def test_start_works_again_after_the_browser_has_failed_at_the_end(chrome: Browser) -> None:
    async with live_edge() as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.tab.evaluate(
            """
            AudioContext.prototype.close = () => new Promise(() => {});
            URL.createObjectURL = () => { throw new Error("no memory"); };
            """
        )
        for _ in range(2):
            await page.talk()
            await page.tab.until("document.querySelectorAll('#units li').length >= 1")
            await page.end()
            assert await page.status() == "The conversation is over."
            assert "no memory" in await page.tab.text("advice")


async def test_person_leaves_while_the_server_does_not_answer(chrome: Browser) -> None:
    async with live_edge() as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.until_state("idle")
        await page.tab.evaluate(
            """
            document.getElementById("voice").value = "default";
            window.fetch = () => new Promise(() => { window.isAsked = true; });
            """
        )
        await page.start()
        await page.tab.until("window.isAsked")
        await page.tab.click("start")
        await page.until_state("ended")
        assert await page.status() == "The conversation is over."
        await page.tab.evaluate("document.getElementById('voice').value = ''")
        await page.talk()
        await page.end()
