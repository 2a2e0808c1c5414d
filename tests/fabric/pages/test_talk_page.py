"""The talk page in Chromium, before an edge whose model follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.browser import Browser
from support.edge.credential_rig import KeyStore
from support.edge.live_edge import live_edge
from support.page_rig import Script, browser, check_each_sample_once, open_page, speech
from support.time_limits import WITHIN_S

from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.settings import Limits
from duplane.fabric.v1 import lease_pb2, session_pb2

pytestmark = pytest.mark.slow
TURNS = (range(1, 3), range(4, 6))
ENDS = {
    session_pb2.CLOSE_REASON_IDLE_TIMEOUT: "The time of this conversation is used up.",
    session_pb2.CLOSE_REASON_CONTEXT_FULL: "The model's memory of this conversation is full.",
    session_pb2.CLOSE_REASON_SHUTDOWN: "The server shuts down.",
    session_pb2.CLOSE_REASON_ENGINE_FAILED: "The model has failed, and the conversation is lost.",
}


@pytest.fixture(scope="module")
async def chrome(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Browser]:
    async with browser(tmp_path_factory.mktemp("chrome")) as running:
        yield running


async def test_page_plays_each_sample_of_each_turn_once(chrome: Browser) -> None:
    script = Script(TURNS)
    async with live_edge() as edge:
        edge.fabric.on_unit = script
        page = await open_page(chrome, edge.edge.address)
        await page.talk()
        await page.until_words(2)
        expected = await page.expected([[speech(unit) for unit in turn] for turn in TURNS])
        await page.until_loud(int(np.count_nonzero(expected)))
        played = await page.played()
        assert await page.words() == ["word1 word2 ", "word4 word5 "]
        await page.end()
        assert await page.status() == "The conversation is over."
        assert page.tab.errors == []
    check_each_sample_once(expected, played)


@pytest.mark.timing
async def test_escape_silences_the_model_at_once_and_the_next_turn_is_played(
    chrome: Browser,
) -> None:
    script = Script((range(1, 6), range(8, 10)))
    async with live_edge() as edge:
        edge.fabric.on_unit = script
        page = await open_page(chrome, edge.edge.address)
        await page.talk()
        await page.until_loud(1)
        await page.tab.press("Escape")
        await page.until_words(2)
        await page.tab.until("played.at(-1).frame > keyFrame + context.sampleRate")
        before = await page.tab.evaluate("loudCount")
        await page.until_loud(before + 1)  # the next turn
        played = await page.played()
        key_frame, rate, frame = await page.tab.evaluate(
            "[keyFrame, context.sampleRate, played[0].frame]"
        )
        loud_s = (np.flatnonzero(played) + frame - key_frame) / rate
        assert loud_s[loud_s < 1].max() < 0.05
        assert any(unit.force_listen for unit in script.heard)
        words = await page.words()
        assert words[0].endswith(" (interrupted)")
        assert words[1].startswith("word8 ")
        assert page.tab.errors == []
        await page.end()


async def test_page_shows_the_place_in_the_queue_and_then_talks(chrome: Browser) -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        page = await open_page(chrome, edge.edge.address)
        await page.start()
        acquisition = await edge.fabric.acquisition()
        place = lease_pb2.Queued(ticket_id="q_1", position=2, queue_length=3)
        place.estimated_wait.FromSeconds(75)
        acquisition.queued(place)
        await page.until_state("queued")
        said = "You wait for a free place: number 2 of 3, about 1:15 min."
        assert await page.status() == said
        assert await page.tab.text("start") == "Leave the queue"
        edge.fabric.is_automatic = True
        acquisition.grant()
        await page.until_state("talking")
        await page.end()


async def test_person_leaves_the_queue_and_starts_again(chrome: Browser) -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        page = await open_page(chrome, edge.edge.address)
        await page.start()
        acquisition = await edge.fabric.acquisition()
        acquisition.queued(lease_pb2.Queued(ticket_id="q_1", position=1, queue_length=1))
        await page.until_state("queued")
        await page.tab.click("start")
        await page.until_state("ended")
        assert await page.status() == "You have left the queue."
        async with asyncio.timeout(WITHIN_S):
            await acquisition.is_over.wait()
        edge.fabric.is_automatic = True
        await page.talk()
        await page.end()


async def test_each_end_has_its_sentence_and_start_works_again(chrome: Browser) -> None:
    async with live_edge(replace(Limits(), close_s=0.2)) as edge:
        page = await open_page(chrome, edge.edge.address)
        for reason, sentence in ENDS.items():
            await page.talk()
            conversation = await edge.fabric.conversation()
            closed = session_pb2.Closed(reason=reason)
            conversation.say(session_pb2.ConverseResponse(closed=closed))
            await page.until_state("ended")
            assert await page.status() == sentence
        # The browser itself notes each connection that the server has refused or closed.
        assert not [error for error in page.tab.errors if "Exception" in error]


async def test_full_server_is_said(chrome: Browser) -> None:
    async with live_edge(replace(Limits(), session_count=0)) as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.start()
        await page.until_state("ended")
        assert await page.status() == "The server has no place free now: try again later."


async def test_denied_microphone_is_said_and_takes_no_place(tmp_path: Path) -> None:
    flags = ("--deny-permission-prompts",)
    async with live_edge() as edge, browser(tmp_path, *flags, has_permission=False) as chrome:
        page = await open_page(chrome, edge.edge.address)
        await page.start()
        await page.until_state("ended")
        assert (await page.status()).startswith("The browser may not use the microphone")
        assert await page.tab.text("start") == "Start again"
        assert page.tab.frames == []


async def test_insecure_address_is_explained(tmp_path: Path) -> None:
    rule = "--host-resolver-rules=MAP talk.example 127.0.0.1"
    async with (
        live_edge(allowed_hosts=("talk.example",)) as edge,
        browser(tmp_path, rule) as chrome,
    ):
        page = await open_page(chrome, edge.edge.address, host="talk.example")
        await page.tab.until("document.getElementById('advice').textContent")
        assert await page.status() == "This address is not secure, so the page gets no microphone."
        assert "--tls-self-signed" in await page.tab.text("advice")
        assert await page.tab.evaluate("document.getElementById('start').disabled")


async def test_page_asks_for_a_key_and_keeps_it_for_the_tab_only(
    chrome: Browser, tmp_path: Path
) -> None:
    keys = KeyStore(tmp_path)
    key = keys.new()
    credentials = CredentialSettings(api_keys=keys.path)
    async with live_edge(credentials=credentials) as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.tab.until("!document.getElementById('key-row').hidden")
        assert await page.status() == "This server asks for a key."
        await page.give_key(f"{key.text[:-1]}x")
        await page.tab.until(
            "document.getElementById('status').textContent.includes('does not accept')"
        )
        await page.give_key(key.text)
        await page.talk()
        await page.end()
        assert not [address for address in page.tab.addresses if key.text in address]
        assert await page.tab.evaluate("JSON.stringify(localStorage)") == "{}"
        other = await open_page(chrome, edge.edge.address)
        await other.tab.until("!document.getElementById('key-row').hidden")
        keys.remove(key)
        await edge.edge.reload()
        await page.start()
        await page.tab.until("!document.getElementById('key-row').hidden")
        assert await page.status() == "The server does not accept this key."


async def test_page_that_loses_its_server_says_so_and_starts_again(chrome: Browser) -> None:
    async with live_edge(replace(Limits(), drain_s=0.05, close_s=0.1)) as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.talk()
        edge.drain()
        await page.until_state("ended")
        assert await page.status() == "The server shuts down."
    await page.start()
    await page.until_state("ended")
    assert await page.status() == "The server cannot be reached."
