"""Chats that end early, and the steps of chats beside the units of a duplex session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.time_limits import WITHIN_S
from support.worker.scripted_model import PROMPT_TOKENS, ScriptedModel, echo
from support.worker.worker_harness import (
    asks,
    chat,
    chat_answer,
    chat_failure,
    chat_refusal,
    running_worker,
    unit,
)

from duplane.fabric.errors import Reason
from duplane.fabric.v1 import registry_pb2
from duplane.worker.models.chat import (
    ChatOutput,
    ChatRequest,
)
from duplane.worker.models.types import UnitFailure
from duplane.worker.settings import SessionLimits


def endless(slot: int, request: ChatRequest) -> Iterator[ChatOutput | UnitFailure]:
    while True:
        yield ChatOutput(slot, PROMPT_TOKENS, text="more ", token_ids=(1,))


async def test_a_client_that_leaves_stops_its_answer_and_frees_the_slot() -> None:
    async with running_worker() as rig:
        rig.model.on_chat = endless
        async with asyncio.timeout(WITHIN_S), chat(rig, asks()) as responses:
            async for response in responses:
                if response.HasField("delta"):
                    break
            await rig.scheduler.until_slot(0, registry_pb2.SLOT_STATE_OCCUPIED)
        await rig.all_free()
        steps = len(rig.model.chat_rounds)
        rig.model.on_chat = echo
        await chat_answer(rig, asks("one"))
        assert len(rig.model.chat_rounds) == steps + 3, "the abandoned chat went on"


@pytest.mark.timing
async def test_a_client_that_does_not_read_costs_the_device_nothing() -> None:
    limits = SessionLimits(outbox_message_count=4, stall_timeout_s=0.2)
    big = "x" * 100_000

    def shout(slot: int, request: ChatRequest) -> Iterator[ChatOutput | UnitFailure]:
        for output in endless(slot, request):
            assert isinstance(output, ChatOutput)
            yield replace(output, text=big)

    async with running_worker(limits=limits) as rig:
        rig.model.on_chat = shout
        async with chat(rig, asks()) as responses:
            await rig.scheduler.until_slot(0, registry_pb2.SLOT_STATE_OCCUPIED)
            # Nobody reads, so gRPC's windows fill and the worker's write stalls. Then the worker
            # ends the chat.
            await rig.all_free()
            steps = len(rig.model.chat_rounds)
            assert (await chat_failure(responses)).reason is Reason.SLOW_CLIENT
        assert len(rig.model.chat_rounds) == steps


@pytest.mark.parametrize("way", ["raises", "fails"])
async def test_a_chat_that_the_model_loses_ends_with_engine_failed(way: str) -> None:
    def lose(slot: int, request: ChatRequest) -> Iterator[ChatOutput | UnitFailure]:
        yield ChatOutput(slot, PROMPT_TOKENS)
        if way == "raises":
            raise RuntimeError("no")
        yield UnitFailure(slot, "NOT_FINITE", "no", is_fatal=True)

    async with running_worker() as rig:
        rig.model.on_chat = lose
        assert (await chat_refusal(rig, asks())).reason is Reason.ENGINE_FAILED
        await rig.all_free()


async def test_a_revoked_chat_ends() -> None:
    async with running_worker() as rig:
        rig.model.on_chat = endless
        async with asyncio.timeout(WITHIN_S), chat(rig, asks()) as responses:
            await anext(responses)
            number = rig.last_number(0)
            revoke = registry_pb2.Revoke(slot=0, fencing_number=number, lease_id=f"lease-{number}")
            await rig.scheduler.tell(revoke=revoke)
            assert (await chat_failure(responses)).reason is Reason.LEASE_STALE


@pytest.mark.timing
async def test_a_chat_on_a_worker_that_stops_ends() -> None:
    async with running_worker(drain_timeout_s=0.01) as rig:
        rig.model.on_chat = endless
        async with asyncio.timeout(WITHIN_S), chat(rig, asks()) as responses:
            await anext(responses)
            rig.shutdown.drain()
            assert (await chat_failure(responses)).reason is Reason.DRAINING


async def test_units_of_a_duplex_session_run_between_the_steps_of_a_chat() -> None:
    """Units of the duplex session that have arrived run before the next step of the chat."""
    model = ScriptedModel(slot_count=2)
    async with running_worker(model) as rig, rig.opened(rig.grant(1)) as duplex:
        model.on_chat = endless
        async with chat(rig, asks()) as responses:
            await anext(responses)
            model.hold()
            await model.held()
            before = len(model.order)
            await duplex.send(unit(0))
            await duplex.send(unit(1))
            await rig.received(2)
            model.let_go()
            await duplex.delta()
            await duplex.delta()
            assert model.order[before : before + 2] == ["units", "units"]
