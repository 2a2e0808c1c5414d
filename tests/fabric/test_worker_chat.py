"""Chats on a real worker with a scripted model: answers, refusals, and every way to end early."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scripted_model import PROMPT_TOKENS, ScriptedModel, echo
from worker_rig import WITHIN_S, Rig, running_worker, unit

from duplane.fabric.client import FabricClient
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, registry_pb2, session_pb2
from duplane.tools.tiny.build import build_tiny
from duplane.worker.model.chat_types import (
    ChatAudio,
    ChatImage,
    ChatOutput,
    ChatRequest,
    ChatRole,
    Finish,
)
from duplane.worker.model.model import DuplexModel
from duplane.worker.model.types import DecodeMode, OptionError, UnitFailure
from duplane.worker.settings import SessionLimits

Responses = AsyncIterator[session_pb2.ChatResponse]


def says(*parts: str | session_pb2.ChatPart) -> session_pb2.ChatMessage:
    return session_pb2.ChatMessage(
        role=session_pb2.CHAT_ROLE_USER,
        parts=[session_pb2.ChatPart(text=p) if isinstance(p, str) else p for p in parts],
    )


def asks(text: str = "one two three", **fields: Any) -> session_pb2.ChatRequest:
    return session_pb2.ChatRequest(**{"messages": [says(text)], **fields})


@contextlib.asynccontextmanager
async def chat(
    rig: Rig, request: session_pb2.ChatRequest, slot: int = 0, **claims: Any
) -> AsyncGenerator[Responses]:
    granted = rig.grant(slot, **{"kind": lease_pb2.SESSION_KIND_CHAT, **claims})
    async with (
        FabricClient([rig.scheduler.address]) as client,
        client.chat(granted, request) as responses,
    ):
        yield responses


async def answer(
    rig: Rig, request: session_pb2.ChatRequest, slot: int = 0
) -> list[session_pb2.ChatResponse]:
    async with asyncio.timeout(WITHIN_S), chat(rig, request, slot) as responses:
        return [response async for response in responses]


async def refusal(rig: Rig, request: session_pb2.ChatRequest, **claims: Any) -> FabricError:
    async with asyncio.timeout(WITHIN_S), chat(rig, request, **claims) as responses:
        return await failure(responses)


async def failure(responses: Responses) -> FabricError:
    """Read to the failure that ends the call."""
    try:
        async for _ in responses:
            pass
    except FabricError as error:
        return error
    raise AssertionError("the call ended well")


async def test_a_chat_is_prefilled_answered_and_done() -> None:
    async with running_worker() as rig:
        told = await answer(rig, asks())
        assert [response.WhichOneof("event") for response in told] == [
            "prefilled",
            *["delta"] * 3,
            "done",
        ]
        assert told[0].prefilled.prompt_token_count == len("one two three")
        deltas = [response.delta for response in told[1:-1]]
        assert "".join(delta.text for delta in deltas) == "one two three "
        assert [delta.sequence for delta in deltas] == [0, 1, 2]
        assert [list(delta.token_ids) for delta in deltas] == [[0], [1], [2]]
        assert deltas[0].stage_times.decode.nanos == 2_000_000
        assert deltas[0].stage_times.prefill.nanos == 2_000_000  # of the steps before it
        assert not deltas[1].stage_times.HasField("prefill")
        assert all(delta.stage_times.total.ToNanoseconds() > 0 for delta in deltas)
        assert [delta.context_token_count for delta in deltas] == [
            PROMPT_TOKENS + count for count in (1, 2, 3)
        ]
        done = told[-1].done
        assert done.reason == session_pb2.FINISH_REASON_STOP
        assert done.token_counts.output_text_token_count == 3
        assert done.token_counts.input_text_token_count == len("one two three")
        await rig.all_free()


async def test_a_chat_that_speaks_sends_samples() -> None:
    async with running_worker() as rig:
        told = await answer(rig, asks(config=session_pb2.ChatConfig(generate_audio=True)))
        audio = np.frombuffer(told[1].delta.audio, "<f4")
        assert audio.size == 240
        assert (audio == 0.25).all()


async def test_the_model_gets_what_the_client_asked_for() -> None:
    config = session_pb2.ChatConfig(
        max_new_token_count=2,
        decode_mode=session_pb2.DECODE_MODE_GREEDY,
        is_thinking=True,
        is_omni=True,
        max_slice_count=4,
        use_image_id=False,
        use_tts_template=True,
    )
    sound = session_pb2.ChatPart(audio=np.full(8, 0.5, "<f4").tobytes())
    picture = session_pb2.ChatPart(image=b"a picture")
    system = session_pb2.ChatMessage(
        role=session_pb2.CHAT_ROLE_SYSTEM, parts=[session_pb2.ChatPart(text="Be brief.")]
    )
    messages = [system, says(sound, picture, "one two three")]
    async with running_worker() as rig:
        told = await answer(rig, session_pb2.ChatRequest(messages=messages, config=config, seed=7))
        assert told[-1].done.token_counts.output_text_token_count == 2
        request = rig.model.chats[0]
        options = request.options
        assert (options.max_new_tokens, options.max_slices, options.seed) == (2, 4, 7)
        assert options.decode_mode is DecodeMode.GREEDY
        assert options.is_thinking
        assert options.is_omni
        assert options.use_image_id is False
        assert options.answers_as_speech
        assert not options.generate_audio
        assert [message.role for message in request.messages] == [ChatRole.SYSTEM, ChatRole.USER]
        heard, seen, text = request.messages[1].parts
        assert isinstance(heard, ChatAudio)
        assert heard.samples.tolist() == [0.5] * 8
        assert seen == ChatImage(b"a picture")
        assert text == "one two three"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (asks(config=session_pb2.ChatConfig(temperature=3)), "config.temperature"),
        (asks(config=session_pb2.ChatConfig(max_new_token_count=0)), "config.max_new_token_count"),
        (asks(seed=-1), "seed"),
        (
            session_pb2.ChatRequest(messages=[session_pb2.ChatMessage(parts=says("a").parts)]),
            "messages[0].role",
        ),
        (
            session_pb2.ChatRequest(
                messages=[says("a"), says("b", session_pb2.ChatPart(audio=b"abc"))]
            ),
            "messages[1].parts[1].audio",
        ),
        (
            session_pb2.ChatRequest(messages=[says(session_pb2.ChatPart(video=b"mp4"))]),
            "messages[0].parts[0].video",
        ),
        (
            session_pb2.ChatRequest(messages=[says(session_pb2.ChatPart())]),
            "messages[0].parts[0]",
        ),
        (asks("x" * 101), "messages[0].parts[0].text"),
        (
            session_pb2.ChatRequest(messages=[says(session_pb2.ChatPart(image=b"x" * 101))]),
            "messages[0].parts[0].image",
        ),
        (
            session_pb2.ChatRequest(messages=[says(session_pb2.ChatPart(audio=bytes(4)))] * 3),
            "messages[2].parts[0].audio",
        ),
        (session_pb2.ChatRequest(messages=[says("a")] * 5), "messages"),
        (session_pb2.ChatRequest(messages=[says(*"abcdef")]), "messages[0].parts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_request_is_refused_by_its_path_and_the_slot_is_free_again(
    request_: session_pb2.ChatRequest, field: str
) -> None:
    limits = SessionLimits(
        max_chat_messages=4,
        max_chat_parts=5,
        max_chat_clips=2,
        max_chat_text_bytes=100,
        max_chat_media_bytes=100,
    )
    async with running_worker(limits=limits) as rig:
        error = await refusal(rig, request_)
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)
        await rig.all_free()


async def test_what_the_model_refuses_is_named_too() -> None:
    def refuse(request: ChatRequest) -> None:
        raise OptionError("max_slices", "is odd")

    async with running_worker() as rig:
        rig.model.on_prepare = refuse
        error = await refusal(rig, asks())
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, "config.max_slice_count")


@pytest.mark.parametrize("is_worded", [False, True, None])
async def test_an_answer_that_is_heard_is_worded_as_speech(is_worded: bool | None) -> None:
    config = session_pb2.ChatConfig(generate_audio=True, use_tts_template=is_worded)
    async with running_worker() as rig:
        await answer(rig, asks(config=config))
        assert rig.model.chats[0].options.answers_as_speech


async def test_a_lease_of_another_kind_is_refused_on_both_sides() -> None:
    async with running_worker() as rig:
        error = await refusal(rig, asks(), kind=lease_pb2.SESSION_KIND_AUDIO_DUPLEX)
        assert error.reason is Reason.KIND_NOT_SERVED
        async with rig.call() as client:
            granted = rig.grant(kind=lease_pb2.SESSION_KIND_CHAT)
            claim = session_pb2.Claim(lease=granted.lease)
            await client.write(session_pb2.ConverseRequest(claim=claim))
            assert (await client.refused()).reason is Reason.KIND_NOT_SERVED


async def test_a_worker_says_that_it_chats_and_one_without_chat_refuses() -> None:
    async with running_worker() as rig:
        assert lease_pb2.SESSION_KIND_CHAT in rig.scheduler.registers[-1].kinds
    model = ScriptedModel()
    model.has_chat = False
    async with running_worker(model) as rig:
        assert lease_pb2.SESSION_KIND_CHAT not in rig.scheduler.registers[-1].kinds
        assert (await refusal(rig, asks())).reason is Reason.KIND_NOT_SERVED


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
        await answer(rig, asks("one"))
        assert len(rig.model.chat_rounds) == steps + 3, "the abandoned chat went on"


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
            # Nothing is read: gRPC's windows fill, the write stalls, and the chat is given up.
            await rig.all_free()
            steps = len(rig.model.chat_rounds)
            assert (await failure(responses)).reason is Reason.SLOW_CLIENT
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
        assert (await refusal(rig, asks())).reason is Reason.ENGINE_FAILED
        await rig.all_free()


async def test_a_revoked_chat_ends() -> None:
    async with running_worker() as rig:
        rig.model.on_chat = endless
        async with asyncio.timeout(WITHIN_S), chat(rig, asks()) as responses:
            await anext(responses)
            number = rig.last_number(0)
            revoke = registry_pb2.Revoke(slot=0, fencing_number=number, lease_id=f"lease-{number}")
            await rig.scheduler.tell(revoke=revoke)
            assert (await failure(responses)).reason is Reason.LEASE_STALE


async def test_a_chat_on_a_worker_that_stops_ends() -> None:
    async with running_worker(drain_timeout_s=0.01) as rig:
        rig.model.on_chat = endless
        async with asyncio.timeout(WITHIN_S), chat(rig, asks()) as responses:
            await anext(responses)
            rig.shutdown.drain()
            assert (await failure(responses)).reason is Reason.DRAINING


async def test_units_of_a_duplex_session_run_between_the_steps_of_a_chat() -> None:
    """One step of the chats and no more comes between two units."""
    model = ScriptedModel(slot_count=2)
    model.on_chat = endless
    async with (
        running_worker(model) as rig,
        rig.opened(rig.grant(1)) as duplex,
        chat(rig, asks()) as responses,
    ):
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
        assert model.order[before : before + 3] == ["units", "chat", "units"]


async def test_a_chat_is_one_span_with_its_stages_and_none_of_its_words() -> None:
    async with running_worker() as rig:
        await answer(rig, asks("secret words"))
        await rig.all_free()
        spans = [span for span in rig.spans.get_finished_spans() if span.name == "worker.chat"]
        assert len(spans) == 1
        attributes = dict(spans[0].attributes or {})
        assert attributes["duplane.chat.finish"] == Finish.STOP.name
        assert attributes["duplane.stage.decode_ms"] == pytest.approx(4.0)
        assert not any("secret" in str(value) for value in attributes.values())


async def test_what_a_chat_goes_through_are_spans_below_it() -> None:
    async with running_worker() as rig:
        await answer(rig, asks("one two"))
        await rig.all_free()
        spans = rig.spans.get_finished_spans()
        (whole,) = [span for span in spans if span.name == "worker.chat"]
        below = [span for span in spans if span.name.startswith("worker.chat.")]
        names = [span.name.removeprefix("worker.chat.") for span in below]
        assert names == ["prepare", "prefill", "piece", "piece"]
        for span in below:
            assert span.parent
            assert whole.context
            assert span.parent.span_id == whole.context.span_id
            assert span.context
            assert span.context.trace_id == whole.context.trace_id
        told = [dict(span.attributes or {}) for span in below]
        assert told[0]["duplane.prompt.token_count"] == len("one two")
        assert told[1]["duplane.stage.prefill_ms"] == pytest.approx(2.0)
        for sequence, piece in enumerate(told[2:]):
            assert piece["duplane.chat.sequence"] == sequence
            assert piece["duplane.stage.decode_ms"] == pytest.approx(2.0)
            assert piece["duplane.batch.size"] == 1


async def test_a_chat_that_is_refused_says_so_in_the_span_at_fault() -> None:
    async with running_worker() as rig:
        await refusal(rig, asks(seed=-1))
        await rig.all_free()
        spans = {span.name: dict(span.attributes or {}) for span in rig.spans.get_finished_spans()}
        for name in ("worker.chat", "worker.chat.prepare"):
            assert spans[name]["error.type"] == "INVALID_FIELD"
        assert "worker.chat.prefill" not in spans


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    build_tiny(directory)
    return directory


class TinyModel(ScriptedModel):
    """The rig's device, with a real tiny model in place of the script."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def load(self) -> Any:
        torch.set_num_threads(1)
        return DuplexModel.load(self._checkpoint, slot_count=2, context_capacity=1024)

    def memory_used_bytes(self, model: Any) -> int:
        return model.memory_bytes


@pytest.mark.parametrize("is_heard", [False, True], ids=["text", "speech"])
async def test_a_real_model_answers_in_words_and_ends_by_itself(
    checkpoint: Path, is_heard: bool
) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (320, 240), (10, 200, 90)).save(picture, "JPEG")
    sound = np.zeros(16_000, "<f4").tobytes()
    request = session_pb2.ChatRequest(
        messages=[
            says("What is this?", session_pb2.ChatPart(image=picture.getvalue())),
            session_pb2.ChatMessage(
                role=session_pb2.CHAT_ROLE_ASSISTANT, parts=says("A table.").parts
            ),
            says(session_pb2.ChatPart(audio=sound)),
        ],
        config=session_pb2.ChatConfig(generate_audio=is_heard, max_new_token_count=60),
        seed=1,
    )
    async with running_worker(TinyModel(checkpoint)) as rig:
        told = await answer(rig, request)
        text = "".join(response.delta.text for response in told)
        audio = np.frombuffer(b"".join(response.delta.audio for response in told), "<f4")
        done = told[-1].done
        assert done.reason == session_pb2.FINISH_REASON_STOP
        assert text.strip()
        assert "<|" not in text
        assert (np.abs(audio).max(initial=0) > 0) == is_heard
        assert done.token_counts.input_video_token_count == 64
        assert done.token_counts.input_audio_token_count == 10
        ids = [token for response in told for token in response.delta.token_ids]
        assert done.token_counts.output_text_token_count == len(ids)
        again = await answer(rig, request, slot=1)
        assert [token for r in again for token in r.delta.token_ids] == ids


async def test_a_real_model_refuses_what_is_no_picture_by_its_path(checkpoint: Path) -> None:
    request = session_pb2.ChatRequest(
        messages=[says("Look:", session_pb2.ChatPart(image=b"no picture"))]
    )
    async with running_worker(TinyModel(checkpoint)) as rig:
        error = await refusal(rig, request)
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, "messages[0].parts[1].image")
