"""What the talk page keeps and offers: settings, consent, replay, files."""

from __future__ import annotations

import io
import math
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import orjson
import pybase64
import pytest
import soundfile
from aiohttp import web
from google.protobuf.duration_pb2 import Duration
from support.browser import Browser
from support.edge.live_edge import live_edge
from support.page_rig import Script, browser, open_page, speech
from support.time_limits import WITHIN_S, until

from duplane.edge.access import Caller, CallerKind
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.fabric.v1 import model_pb2

pytestmark = pytest.mark.slow
TURN = range(1, 3)


@pytest.fixture(scope="module")
async def chrome(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Browser]:
    async with browser(tmp_path_factory.mktemp("chrome")) as running:
        yield running


async def test_replay_has_both_sides_and_the_units(chrome: Browser) -> None:
    async with live_edge() as edge:
        edge.fabric.on_unit = Script([TURN])
        page = await open_page(chrome, edge.edge.address)
        await page.leave_sound_unchanged()
        await page.talk()
        await page.until_loud(40_000 * len(TURN))
        await page.end()
        sound, rate = soundfile.read(io.BytesIO(await page.offered(-2)), dtype="float32")
        told = orjson.loads(await page.offered(-1))
        await page.tab.until("document.getElementById('replay').duration > 3")
        assert page.tab.errors == []
    assert rate == 24_000
    person, model = sound.T
    assert 0.005 < np.std(person[24_000:72_000]) < 0.02  # the noise of the microphone
    said = np.concatenate([np.frombuffer(speech(unit), "<f4") for unit in TURN])
    begin = np.flatnonzero(model)[0]
    assert np.abs(model[begin : begin + len(said)] - said).max() < 1e-4
    assert not model[begin + len(said) :].any()
    units = {unit["index"]: unit for unit in told["units"]}
    assert [units[index]["speaks"] for index in range(3)] == [False, True, True]
    assert begin / rate == pytest.approx(units[1]["heardMs"] / 1e3 + 2, abs=0.3)
    assert all(unit["latencyMs"] is not None for unit in told["units"][:3])
    assert told["session"]


async def test_latencies_are_those_of_units_of_another_duration(chrome: Browser) -> None:
    async with live_edge() as edge:
        edge.fabric.model = model_pb2.Model(name="m", unit_duration=Duration(nanos=500_000_000))
        page = await open_page(chrome, edge.edge.address)
        await page.talk()
        await page.tab.until("document.querySelectorAll('#units li').length >= 4")
        await page.end()
        units = orjson.loads(await page.offered(-1))["units"]
    assert all(unit["latencyMs"] is not None for unit in units[:4])


@pytest.mark.parametrize("consent", Consent)
async def test_server_that_records_asks_first(
    chrome: Browser, tmp_path: Path, consent: Consent
) -> None:
    recording = RecordingSettings(tmp_path, consent, max_age_s=math.inf)
    async with live_edge(recording=recording) as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.tab.until("!document.getElementById('consent-row').hidden")
        if consent is Consent.ALWAYS:
            await page.start()
            assert (await page.status()).startswith("This server records each conversation")
            assert await page.state() == "idle"
        else:
            await page.talk()
            await page.end()
            assert await page.tab.evaluate("document.getElementById('recorded').hidden")
        await page.tab.click("consent")
        await page.talk()
        await page.tab.until("document.querySelectorAll('#units li').length > 0")
        await page.end()
        said = await page.tab.text("recorded")
        assert said.startswith("The server has recorded this conversation as ")
        assert recorded_count(tmp_path) == 1


class RecordedTenant:
    """Takes each request for that of a tenant whose sessions must be recorded."""

    async def authenticate(self, request: web.Request) -> Caller:
        return Caller(CallerKind.TENANT, tenant="acme", credential="k1", may_record=True)


async def test_nothing_is_recorded_against_the_will_of_the_person(
    chrome: Browser, tmp_path: Path
) -> None:
    """The key demands recording, and the person has not agreed."""
    recording = RecordingSettings(tmp_path, max_age_s=math.inf)
    async with live_edge(recording=recording, authenticator=RecordedTenant()) as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.start()
        await page.until_state("ended")
        assert (await page.status()).startswith("With this key, the server records")
        assert not [event for _, event in page.tab.frames if event["type"] == "input.append"]
        await page.tab.click("consent")
        await page.talk()
        assert await page.tab.text("advice") == "The server records this conversation."
        await page.end()


async def test_settings_reach_the_model_and_stay_until_the_next_visit(chrome: Browser) -> None:
    async with live_edge() as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.tab.evaluate(
            """for (const [id, value] of [["prompt", "Be brief."], ["penalty", "1.3"]]) {
              document.getElementById(id).value = value;
              document.getElementById(id).dispatchEvent(new Event("change", { bubbles: true }));
            }"""
        )
        await page.talk()
        await page.end()
        (init,) = [event for _, event in page.tab.frames if event["type"] == "session.init"]
        assert init["payload"]["system_prompt"] == "Be brief."
        assert init["payload"]["config"] == {"length_penalty": 1.3}
        again = await open_page(chrome, edge.edge.address)
        await again.until_state("idle")
        assert await again.tab.evaluate("document.getElementById('prompt').value") == "Be brief."


async def test_voice_of_a_file_is_sent_at_the_rate_of_the_model(
    chrome: Browser, tmp_path: Path
) -> None:
    voice = tmp_path / "voice.wav"
    tone = np.sin(np.arange(48_000 * 2) * 2 * np.pi * 300 / 48_000) / 2
    soundfile.write(voice, np.stack([tone, tone], axis=1), 48_000)
    async with live_edge() as edge:
        page = await open_page(chrome, edge.edge.address)
        await page.until_state("idle")
        await page.tab.choose_file("voice-file", voice)
        await page.talk()
        await page.end()
        (init,) = [event for _, event in page.tab.frames if event["type"] == "session.init"]
    sent = np.frombuffer(pybase64.b64decode(init["payload"]["voice"]["ref_audio_base64"]), "<f4")
    assert len(sent) == pytest.approx(32_000, abs=2)
    exact = np.sin(np.arange(len(sent)) * 2 * np.pi * 300 / 16_000) / 2
    assert np.abs(sent - exact)[200:-200].max() < 0.02


async def test_camera_sends_at_most_one_picture_with_each_unit(chrome: Browser) -> None:
    script = Script([TURN])

    async def has_seen() -> bool:  # a slow machine leaves pictures out
        return len([unit for unit in script.heard if unit.video_frames]) >= 2

    async with live_edge() as edge:
        edge.fabric.on_unit = script
        page = await open_page(chrome, edge.edge.address)
        await page.until_state("idle")
        await page.tab.click("camera")
        await page.talk()
        await until(has_seen, WITHIN_S)
        await page.end()
    pictures = [list(unit.video_frames) for unit in script.heard]
    assert all(len(each) <= 1 for each in pictures)
    assert all(each[0].startswith(b"\xff\xd8") for each in pictures if each)


def recorded_count(directory: Path) -> int:
    return len([path for path in directory.iterdir() if path.is_dir()])
