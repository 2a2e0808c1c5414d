"""The official client of the model, `openbmb-realtime`, unchanged, against a whole fabric.

It always asks for a model by the name that the model's own service gives it.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import soundfile
from PIL import Image
from support.fabric.real_fabric import RealFabric
from support.model.blind import blind_checkpoint
from support.paths import ROOT
from support.speech import speech_like
from support.time_limits import WITHIN_S

from duplane.worker.checkpoints import DEFAULT_CHECKPOINT

pytest.importorskip("openbmb_realtime", reason="openbmb-realtime is not installed: make setup")
from openbmb_realtime import (
    AudioDelta,
    RealtimeClient,
    RealtimeError,
    SessionClosed,
    TextDelta,
    UsageEvent,
)

pytestmark = pytest.mark.slow
NAME = "minicpm-o-4.5-realtime"
QUESTIONS = ROOT / "tools/duplane/tools/talk/samples/questions.wav"
UNIT = 16_000  # samples


INBOX = "16"  # units that wait for the device, so that none is dropped


async def until_spoken(events: Any) -> list[Any]:
    """Return the events up to the first speech. The client shows no event for listening."""
    seen: list[Any] = []
    async with asyncio.timeout(WITHIN_S):
        async for event in events:
            assert not isinstance(event, SessionClosed), seen
            seen.append(event)
            if isinstance(event, AudioDelta):
                break
    return seen


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[RealFabric]:
    checkpoint = str(DEFAULT_CHECKPOINT)
    async with RealFabric.starting(checkpoint, DUPLANE_INBOX_UNIT_COUNT=INBOX) as fabric:
        yield fabric


async def test_audio_session_of_the_default_model(fabric: RealFabric) -> None:
    sound, _ = soundfile.read(QUESTIONS, dtype="float32")
    client = RealtimeClient(api_key="a key", base_url=f"http://{fabric.edge}")
    session = await client.audio.connect(model=NAME, system_prompt="You are helpful.")
    for unit in range(6):
        await session.send_audio(sound[unit * UNIT : (unit + 1) * UNIT].tobytes())
    seen = await until_spoken(session.events())
    await session.close()
    seen += [event async for event in session.events()]
    await fabric.all_free()
    assert "hello" in "".join(event.text for event in seen if isinstance(event, TextDelta))
    assert any(isinstance(event, UsageEvent) for event in seen)
    assert seen[-1] == SessionClosed("user_stop")


async def test_video_session_of_a_model_that_sees() -> None:
    picture = io.BytesIO()
    Image.new("RGB", (64, 48), "navy").save(picture, "JPEG")
    sound = speech_like(seconds=14)
    async with RealFabric.starting("random", DUPLANE_INBOX_UNIT_COUNT=INBOX) as fabric:
        client = RealtimeClient(api_key="a key", base_url=f"http://{fabric.edge}")
        session = await client.video.connect(model=NAME)
        for unit in range(14):
            pcm = sound[unit * UNIT : (unit + 1) * UNIT].tobytes()
            await session.send_audio_video(pcm, picture.getvalue())
        seen = await until_spoken(session.events())
        await session.close()
        seen += [event async for event in session.events()]
        await fabric.all_free()
    assert session.usage
    assert session.usage.vision_input_tokens
    assert seen[-1] == SessionClosed("user_stop")


async def test_video_session_of_a_model_that_cannot_see_says_so(tmp_path: Path) -> None:
    async with RealFabric.starting(str(blind_checkpoint(tmp_path))) as fabric:
        client = RealtimeClient(api_key="a key", base_url=f"http://{fabric.edge}")
        with pytest.raises(RealtimeError, match="the model cannot see"):
            await client.video.connect(model=NAME)
