"""A session with the small default model, whose worker is killed in the middle of a sentence.

The next worker computes the state of the model from the audio and the ids of all units. Its speech
must be the speech that the killed worker would have made, to the last sample.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import orjson
import psutil
import pybase64
import pytest
from support.fabric.real_fabric import RealFabric
from support.paths import ROOT
from support.time_limits import until
from websockets.asyncio.client import ClientConnection, connect

from duplane.fabric.audio import read_audio_file

pytest.importorskip("torch")

CHECKPOINT = ROOT / "worker/duplane/worker/checkpoints/default"
QUESTION = CHECKPOINT / "samples" / "sum.wav"
UNITS = 8
WAIT_S = 60.0
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[RealFabric]:
    environment = {
        "DUPLANE_WORKERS": "2",
        "DUPLANE_CONTINUITY": "worker",
        "DUPLANE_FAILOVER_S": str(WAIT_S),
        "DUPLANE_HOLD_S": "0.5",
        "DUPLANE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    async with RealFabric.starting(str(CHECKPOINT), **environment) as fabric:
        yield fabric


async def worker_in_use(fabric: RealFabric) -> psutil.Process:
    rows = (await fabric.get("/workers"))[1]["workers"]
    (worker_id,) = [row["worker_id"] for row in rows if row["sessions"]]
    return psutil.Process(int(worker_id.split("-")[-2]))


async def answers(
    fabric: RealFabric, killed_at: int = -1, requested: str = ""
) -> list[tuple[Any, ...]]:
    """Return the outputs of a session in dialect B.

    Its worker is killed before unit `killed_at`. The client sends the text `requested`, which the
    model must speak, before its first audio.
    """
    await until(lambda: has_two_workers(fabric), WAIT_S)
    question = read_audio_file(QUESTION)
    samples = np.zeros(UNITS * 16_000, np.float32)
    samples[: question.size] = question[: samples.size]
    path = f"ws://{fabric.edge}/v1/realtime?mode=audio"
    outputs: list[tuple[Any, ...]] = []
    unit = 0
    async with asyncio.timeout(2 * WAIT_S), connect(path, proxy=None, max_size=None) as client:
        payload = {"system_prompt": "You are a helpful assistant.", "seed": 11}
        await client.send(orjson.dumps({"type": "session.init", "payload": payload}), text=True)
        while orjson.loads(await client.recv())["type"] != "session.created":
            pass
        if requested:
            event = {"type": "speech.request", "text": requested, "input_id": "mine"}
            await client.send(orjson.dumps(event), text=True)
        for number in range(UNITS):
            if number == killed_at:
                (await worker_in_use(fabric)).kill()
            pcm = samples[number * 16_000 : (number + 1) * 16_000].tobytes()
            audio = pybase64.b64encode(pcm).decode()
            event = {"type": "input.append", "input": {"audio": audio}}
            await client.send(orjson.dumps(event), text=True)
            while True:
                told = orjson.loads(await client.recv())
                if told["type"] == "session.moving":
                    assert number == killed_at
                    continue
                unit = told.get("chunk_index", unit)  # later events of a unit do not repeat it
                outputs.append((unit, *output_of(told)))
                if told.get("chunk_index") == number:
                    break
        await client.send(orjson.dumps({"type": "session.close", "reason": "x"}), text=True)
        while (told := orjson.loads(await client.recv()))["type"] != "session.closed":
            outputs.append((unit, *output_of(told)))
    return outputs


async def has_two_workers(fabric: RealFabric) -> bool:
    status = await fabric.status()
    return status.get("free_slot_count") == 4 and status["lease_count"] == 0


def output_of(event: dict[str, Any]) -> tuple[Any, ...]:
    """Return the model's output without times and ids."""
    if event["type"] == "speech.done":
        return event["type"], event["status"], event["input_id"]
    assert event["type"] == "response.output.delta", event
    length = event["metrics"]["kv_cache_length"]
    return event["kind"], event.get("text"), event.get("audio"), length


@pytest.fixture(scope="module")
async def undisturbed(fabric: RealFabric) -> list[tuple[Any, ...]]:
    return await answers(fabric)


@pytest.mark.parametrize("index", [0, 1], ids=["after the question", "in the answer"])
async def test_next_worker_says_what_the_killed_one_would_have_said(
    fabric: RealFabric, undisturbed: list[tuple[Any, ...]], index: int
) -> None:
    spoken = sorted({unit for unit, kind, *_ in undisturbed if kind == "audio"})
    assert len(spoken) > 1, "the model has not spoken for more than a unit"
    assert await answers(fabric, killed_at=spoken[index]) == undisturbed


async def test_next_worker_speaks_the_rest_of_a_requested_text(fabric: RealFabric) -> None:
    text = "one two three four five six seven eight"
    wanted = await answers(fabric, requested=text)
    (end,) = [unit for unit, *output in wanted if output == ["speech.done", "spoken", "mine"]]
    assert end > 1, "the text has too few units"
    said = [output for output in wanted if output[0] <= end]
    assert said[0][:2] == (0, "text"), "the model does not speak in the first unit"
    assert "".join(output[2] for output in said if output[1] == "text") == text
    assert {unit for unit, kind, *_ in said if kind == "audio"} == {*range(end + 1)}
    assert await answers(fabric, killed_at=1, requested=text) == wanted


@pytest.mark.parametrize("is_parked", [False, True], ids=["at once", "after its slot is gone"])
async def test_model_says_to_a_client_that_returns_what_it_would_have_said(
    fabric: RealFabric, undisturbed: list[tuple[Any, ...]], *, is_parked: bool
) -> None:
    """The socket is reset after each unit of speech, before the client reads the answer."""
    spoken = sorted({unit for unit, kind, *_ in undisturbed if kind == "audio"})
    lost_at = spoken[:1] if is_parked else spoken[:2]
    assert await resumed_answers(fabric, lost_at, is_parked=is_parked) == undisturbed


async def resumed_answers(
    fabric: RealFabric, lost_at: list[int], *, is_parked: bool
) -> list[tuple[Any, ...]]:
    """Return the outputs of a session whose socket is lost right after some units were sent."""
    await until(lambda: has_two_workers(fabric), WAIT_S)
    question = read_audio_file(QUESTION)
    samples = np.zeros(UNITS * 16_000, np.float32)
    samples[: question.size] = question[: samples.size]
    outputs: list[tuple[Any, ...]] = []
    async with asyncio.timeout(2 * WAIT_S), contextlib.AsyncExitStack() as sockets:
        path = f"ws://{fabric.edge}/v1/realtime?mode=audio"

        async def opened() -> ClientConnection:
            return await sockets.enter_async_context(connect(path, proxy=None, max_size=None))

        client = await opened()
        payload = {"system_prompt": "You are a helpful assistant.", "seed": 11, "resumable": True}
        await client.send(orjson.dumps({"type": "session.init", "payload": payload}), text=True)
        while (told := orjson.loads(await client.recv()))["type"] != "session.created":
            pass
        token, cursor = told["resume"]["token"], {}
        sent, heard, number = 0, -1, -1
        while heard < UNITS - 1:
            if heard == number:
                number += 1
                sent = number * 16_000
            if sent == number * 16_000:
                audio = pybase64.b64encode(samples[sent : sent + 16_000].tobytes()).decode()
                event = {"type": "input.append", "input": {"audio": audio}}
                await client.send(orjson.dumps(event), text=True)
                sent += 16_000
            if lost_at and number == lost_at[0]:
                del lost_at[0]
                client.transport.abort()
                if is_parked:
                    await until(lambda: has_two_workers(fabric), WAIT_S)
                client = await opened()
                event = {"type": "session.resume", "token": token, **cursor}
                await client.send(orjson.dumps(event), text=True)
                while (told := orjson.loads(await client.recv()))["type"] != "session.resumed":
                    pass
                sent = told["next_sample"]
                continue
            told = orjson.loads(await client.recv())
            cursor = {key: told[key] for key in ("unit", "part")}
            heard = told["unit"]
            outputs.append((heard, *output_of(told)))
        await client.send(orjson.dumps({"type": "session.close", "reason": "x"}), text=True)
        while (told := orjson.loads(await client.recv()))["type"] != "session.closed":
            outputs.append((told["unit"], *output_of(told)))
    return outputs
