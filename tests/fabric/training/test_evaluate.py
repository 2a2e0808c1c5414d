"""The conversations of `make evaluate`, through a fabric and through the model."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.edge.live_edge import live_edge
from support.edge.scripted_fabric import listened

from duplane.fabric.audio import pcm_from_samples
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.tools.talk.client import TalkError, read_sound
from duplane.tools.talk.duplex import SAMPLE
from duplane.worker.checkpoints import DEFAULT_CHECKPOINT
from duplane.worker.models.minicpm_o.model import DuplexModel
from training.evaluation.fabric_runner import FabricRunner, fabric_runner
from training.evaluation.inputs import ChatInput, SessionInput
from training.evaluation.model_runner import ModelRunner
from training.evaluation.rows import PROMPTS
from training.evaluation.scores import Answered, turns

RATE = 16_000
LISTENS = Answered(speaks=False)


@pytest.mark.slow
async def test_the_fabric_gives_the_results_of_the_model() -> None:
    sound = read_sound(SAMPLE)
    questions = sound[: 9 * RATE].copy()
    voice = sound[: 3 * RATE].copy()
    sessions = [
        SessionInput(questions, seed=1),
        SessionInput(questions, seed=2, prompt=PROMPTS[1], voice=voice),
    ]
    chats = [
        ChatInput((("user", "Hello"),), seed=1),
        ChatInput((("system", PROMPTS[0]), ("user", "good morning")), seed=2, is_spoken=True),
    ]
    model = DuplexModel.load(DEFAULT_CHECKPOINT, slot_count=2, context_capacity=1024)
    by_model = ModelRunner(model)
    outputs = await by_model.sessions(sessions)
    for units in outputs:
        assert [turn.text for turn in turns(units)] == [
            "hello how can i help you",
            "two plus three is five",
        ]
    assert await by_model.chats(chats) == ["hello how can i help you", "good morning"]
    assert all(model.is_clean(slot) for slot in range(model.slot_count))
    async with fabric_runner(DEFAULT_CHECKPOINT, slot_count=2) as by_fabric:
        assert await by_fabric.sessions(sessions) == outputs
        # Dialect D has no seed, so the texts of chats can vary.
        texts = await by_fabric.chats(chats)
        assert [bool(text.strip()) for text in texts] == [True, True]


async def test_units_are_sent_at_the_pace_and_late_ones_are_counted() -> None:
    times: list[float] = []

    def respond(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
        times.append(asyncio.get_running_loop().time())
        return list(listened(unit))

    session = SessionInput(np.zeros(3 * RATE, np.float32), seed=1)
    async with live_edge() as edge:
        edge.fabric.on_unit = respond
        address = f"ws://{edge.edge.address}"
        slow = FabricRunner(address, slot_count=1, pace_s=0.2)
        assert await slow.sessions([session]) == [[LISTENS] * 3]
        assert times[2] - times[0] > 0.19  # one pace; a late unit moves those after it
        hasty = FabricRunner(address, slot_count=1, pace_s=1e-9)
        assert await hasty.sessions([session]) == [[LISTENS] * 3]
        assert hasty.late_units == 3
        await edge.fabric.settled()


def speaks_in_unit_1(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
    """Act as the worker: answer one unit with three events of dialect B."""
    responses = listened(unit)
    if unit.sequence == 1:
        delta = responses[0].delta
        delta.speech.text = "hi"
        delta.speech.audio = bytes(4)
        delta.end_of_turn = True
    return list(responses)


async def test_everything_that_a_client_sends_reaches_the_worker() -> None:
    samples = np.random.default_rng(1).standard_normal(3 * RATE).astype(np.float32)
    sessions = [
        SessionInput(samples, seed=seed, prompt="Be brief.", voice=samples[:RATE])
        for seed in (5, 6)
    ]
    chat = ChatInput((("system", "Be brief."), ("user", "hello")), seed=1, is_spoken=True)
    async with live_edge() as edge:
        edge.fabric.on_unit = speaks_in_unit_1
        runner = FabricRunner(f"ws://{edge.edge.address}", slot_count=1)
        said = Answered(speaks=True, text="hi", ends_turn=True)
        assert await runner.sessions(sessions) == [[LISTENS, said, LISTENS]] * 2
        for seed in (5, 6):
            conversation = await edge.fabric.conversation()
            opening = (await conversation.next_request()).open
            assert (opening.seed, opening.system_prompt) == (seed, "Be brief.")
            assert opening.llm_voice == pcm_from_samples(samples[:RATE])
            units = [(await conversation.next_request()).unit for _ in range(3)]
            assert b"".join(unit.audio for unit in units) == pcm_from_samples(samples)
        assert await runner.chats([chat])
        request = (await edge.fabric.turn()).request
        assert [message.parts[0].text for message in request.messages] == ["Be brief.", "hello"]
        assert request.config.generate_audio
        await edge.fabric.settled()


@pytest.mark.parametrize("ends", [False, True], ids=["failed unit", "lost session"])
async def test_a_unit_without_a_result_ends_the_evaluation(*, ends: bool) -> None:
    def respond(unit: session_pb2.Unit) -> list[Any]:
        if unit.sequence < 1:
            return list(listened(unit))
        if ends:
            return [FabricError(Reason.ENGINE_FAILED, "scripted")]
        failed = session_pb2.Failed(sequence=1, reason="INTERNAL", message="scripted")
        return [session_pb2.ConverseResponse(failed=failed)]

    async with live_edge() as edge:
        edge.fabric.on_unit = respond
        runner = FabricRunner(f"ws://{edge.edge.address}", slot_count=1)
        with pytest.raises(ExceptionGroup) as failed:
            await runner.sessions([SessionInput(np.zeros(3 * RATE, np.float32), seed=1)])
        await edge.fabric.settled()
    (error,) = failed.value.exceptions
    assert isinstance(error, TalkError)
    assert ("after 1 of 3 units: backend_error" if ends else "scripted") in str(error)
