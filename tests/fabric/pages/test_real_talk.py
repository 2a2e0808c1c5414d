"""The talk page in Chromium, before the small model of the package."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pybase64
import pytest
import soundfile
from support.browser import chromium, microphone_file
from support.fabric.real_fabric import SLOTS, RealFabric
from support.page_rig import QUESTIONS, browser, open_page
from support.time_limits import WITHIN_S

pytestmark = pytest.mark.slow
ANSWERS = [
    "hello how can i help you",
    "two plus three is five",
    "the sky is blue",
    "you are welcome",
]
WAV_HEADER = 44
PIECE = 3_200
START_S = 4.0  # from the microphone's first sample to the conversation, on a loaded machine


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[RealFabric]:
    chromium()
    async with RealFabric.running("") as fabric:
        yield fabric


async def test_four_questions_of_the_microphone_get_their_answers(
    fabric: RealFabric, tmp_path: Path
) -> None:
    microphone = microphone_file(QUESTIONS, tmp_path, START_S, WITHIN_S)
    async with browser(tmp_path, microphone=microphone) as chrome:
        page = await open_page(chrome, fabric.edge)
        await page.leave_sound_unchanged()
        await page.talk()
        await page.until_words(len(ANSWERS))
        assert [words.strip() for words in await page.words()] == ANSWERS
        await page.end()
        assert page.tab.errors == []
        appends = [event for side, event in page.tab.frames if event["type"] == "input.append"]
    sounds = [pybase64.b64decode(each["input"]["audio"])[WAV_HEADER:] for each in appends]
    assert {len(sound) // 2 for sound in sounds} == {PIECE}
    sent = np.frombuffer(b"".join(sounds), "<i2").astype(float)
    assert correlation(sent) > 0.98


def correlation(sent: np.ndarray) -> float:
    """Return how much of the recording is in what was sent, at the best shift."""
    spoken, rate = soundfile.read(QUESTIONS)
    assert rate == 16_000
    size = 1 << int(np.ceil(np.log2(len(spoken) + len(sent))))
    both = np.fft.rfft(sent, size) * np.conj(np.fft.rfft(spoken, size))
    shift = int(np.argmax(np.fft.irfft(both, size)))
    part = sent[shift : shift + len(spoken)]
    return float(np.corrcoef(part, spoken[: len(part)])[0, 1])


async def test_two_tabs_talk_and_a_third_one_waits_for_its_turn(
    fabric: RealFabric, tmp_path: Path
) -> None:
    async with browser(tmp_path) as chrome:
        *talking, waiting = [await open_page(chrome, fabric.edge) for _ in range(SLOTS + 1)]
        for page in talking:
            await page.talk()
        await waiting.start()
        await waiting.until_state("queued")
        assert (await waiting.status()).startswith("You wait for a free place: number 1 of 1")
        await talking[0].end()
        await waiting.until_state("talking")
        for page in (*talking[1:], waiting):
            await page.end()
    await fabric.all_free()
