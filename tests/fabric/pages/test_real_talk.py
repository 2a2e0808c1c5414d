"""The talk page in Chromium, before the small model of the package."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

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
LOUD = 0.01
SLOW_S = 0.3  # between two pieces of 0.2 s
START_S = 4  # from the microphone's first sample to the conversation, on a loaded machine


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[RealFabric]:
    chromium()
    async with RealFabric.running("") as fabric:
        yield fabric


@pytest.mark.timing
async def test_four_questions_of_the_microphone_get_their_answers(
    fabric: RealFabric, tmp_path: Path
) -> None:
    microphone = microphone_file(QUESTIONS, tmp_path, START_S, WITHIN_S)
    async with browser(tmp_path, microphone=microphone) as chrome:
        page = await open_page(chrome, fabric.edge)
        await page.leave_sound_unchanged()
        await page.talk()
        with contextlib.suppress(TimeoutError):  # the words say more
            await page.until_words(len(ANSWERS))
        await page.tab.picture("talk-talking")
        words = [words.strip() for words in await page.words()]
        await page.end()
        assert page.tab.errors == []
    appends = [event for _, event in page.tab.frames if event["type"] == "input.append"]
    sounds = [pybase64.b64decode(each["input"]["audio"])[WAV_HEADER:] for each in appends]
    assert {len(sound) // 2 for sound in sounds} == {PIECE}
    pace_s = np.diff(page.tab.sent_s[1:-1])  # without the first event and the last one
    if pace_s.max() > SLOW_S:
        pytest.skip(f"a piece came after {pace_s.max():.3f} s: the machine is too slow to judge")
    assert words == ANSWERS
    sent = np.frombuffer(b"".join(sounds), "<i2").astype(float)
    assert correlation(sent) > 0.95


def correlation(sent: np.ndarray[Any, Any]) -> float:
    """Return the median over the loud seconds of the recording, each at its best shift.

    A loaded machine may lose single pieces of the microphone's sound.
    """
    spoken, rate = soundfile.read(QUESTIONS)
    assert rate == 16_000
    seconds = spoken[: len(spoken) // rate * rate].reshape(-1, rate)
    size = 1 << int(np.ceil(np.log2(len(sent) + rate)))
    spectrum = np.fft.rfft(sent, size)
    found: list[float] = []
    for second in seconds[np.std(seconds, axis=1) > LOUD]:
        both = spectrum * np.conj(np.fft.rfft(second, size))
        shift = int(np.argmax(np.fft.irfft(both, size)[: len(sent) - rate]))
        found.append(float(np.corrcoef(sent[shift : shift + rate], second)[0, 1]))
    return float(np.median(found))


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
