"""Chats on a real worker with a scripted model: requests, refusals, answers and spans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.worker.scripted_model import PROMPT_TOKENS, ScriptedModel
from support.worker.worker_harness import (
    asks,
    chat_answer,
    chat_refusal,
    running_worker,
    says,
)

from duplane.fabric.errors import Reason
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.worker.models.chat import (
    ChatAudio,
    ChatImage,
    ChatRequest,
    ChatRole,
    Finish,
)
from duplane.worker.models.types import DecodeMode, OptionError
from duplane.worker.settings import SessionLimits


async def test_a_chat_is_prefilled_answered_and_done() -> None:
    async with running_worker() as rig:
        responses = await chat_answer(rig, asks())
        assert [response.WhichOneof("event") for response in responses] == [
            "prefilled",
            *["delta"] * 3,
            "done",
        ]
        assert responses[0].prefilled.prompt_token_count == len("one two three")
        deltas = [response.delta for response in responses[1:-1]]
        assert "".join(delta.text for delta in deltas) == "one two three "
        assert [delta.sequence for delta in deltas] == [0, 1, 2]
        assert [list(delta.token_ids) for delta in deltas] == [[0], [1], [2]]
        assert deltas[0].stage_times.decode.nanos == 2_000_000
        assert deltas[0].stage_times.prefill.nanos == 2_000_000  # rows of earlier steps
        assert not deltas[1].stage_times.HasField("prefill")
        assert all(delta.stage_times.total.ToNanoseconds() > 0 for delta in deltas)
        assert [delta.context_token_count for delta in deltas] == [
            PROMPT_TOKENS + count for count in (1, 2, 3)
        ]
        done = responses[-1].done
        assert done.reason == session_pb2.FINISH_REASON_STOP
        assert done.token_counts.output_text_token_count == 3
        assert done.token_counts.input_text_token_count == len("one two three")
        await rig.all_free()


async def test_a_chat_that_speaks_sends_samples() -> None:
    async with running_worker() as rig:
        responses = await chat_answer(rig, asks(config=session_pb2.ChatConfig(generate_audio=True)))
        audio = np.frombuffer(responses[1].delta.audio, "<f4")
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
        responses = await chat_answer(
            rig, session_pb2.ChatRequest(messages=messages, config=config, seed=7)
        )
        assert responses[-1].done.token_counts.output_text_token_count == 2
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
        sound, seen, text = request.messages[1].parts
        assert isinstance(sound, ChatAudio)
        assert sound.samples.tolist() == [0.5] * 8
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
        error = await chat_refusal(rig, request_)
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)
        await rig.all_free()


async def test_what_the_model_refuses_is_named_too() -> None:
    def refuse(request: ChatRequest) -> None:
        raise OptionError("max_slices", "is odd")

    async with running_worker() as rig:
        rig.model.on_prepare = refuse
        error = await chat_refusal(rig, asks())
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, "config.max_slice_count")


@pytest.mark.parametrize(
    ("seconds", "is_used", "ignored"),
    [(0.05, False, ["config.tts_voice"]), (0.5, False, ["config.tts_voice"]), (0.5, True, [])],
)
async def test_a_voice_that_is_not_used_is_named(
    seconds: float, is_used: bool, ignored: list[str]
) -> None:
    voice = np.full(int(16_000 * seconds), 0.1, "<f4").tobytes()
    config = session_pb2.ChatConfig(generate_audio=True, tts_voice=voice)
    async with running_worker() as rig:
        rig.model.uses_tts_voice = is_used
        responses = await chat_answer(rig, asks(config=config))
        assert list(responses[0].prefilled.ignored_fields) == ignored
        is_short = seconds < 0.1
        assert (rig.model.chats[0].options.tts_voice is None) == is_short


@pytest.mark.parametrize("is_worded", [False, True, None])
async def test_an_answer_that_is_heard_is_worded_as_speech(is_worded: bool | None) -> None:
    config = session_pb2.ChatConfig(generate_audio=True, use_tts_template=is_worded)
    async with running_worker() as rig:
        await chat_answer(rig, asks(config=config))
        assert rig.model.chats[0].options.answers_as_speech


async def test_a_lease_of_another_kind_is_refused_on_both_sides() -> None:
    async with running_worker() as rig:
        error = await chat_refusal(rig, asks(), kind=lease_pb2.SESSION_KIND_AUDIO_DUPLEX)
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
    model.constants = replace(model.constants, has_chat=False)
    async with running_worker(model) as rig:
        assert lease_pb2.SESSION_KIND_CHAT not in rig.scheduler.registers[-1].kinds
        assert (await chat_refusal(rig, asks())).reason is Reason.KIND_NOT_SERVED


async def test_a_chat_is_one_span_with_its_stages_and_none_of_its_words() -> None:
    async with running_worker() as rig:
        await chat_answer(rig, asks("secret words"))
        await rig.all_free()
        spans = [span for span in rig.spans.get_finished_spans() if span.name == "worker.chat"]
        assert len(spans) == 1
        attributes = dict(spans[0].attributes or {})
        assert attributes["duplane.chat.finish"] == Finish.STOP.name
        assert attributes["duplane.stage.decode_ms"] == pytest.approx(4.0)
        assert not any("secret" in str(value) for value in attributes.values())


async def test_what_a_chat_goes_through_are_spans_below_it() -> None:
    async with running_worker() as rig:
        await chat_answer(rig, asks("one two"))
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
        attributes = [dict(span.attributes or {}) for span in below]
        assert attributes[0]["duplane.prompt.token_count"] == len("one two")
        assert attributes[1]["duplane.stage.prefill_ms"] == pytest.approx(2.0)
        for sequence, piece in enumerate(attributes[2:]):
            assert piece["duplane.chat.sequence"] == sequence
            assert piece["duplane.stage.decode_ms"] == pytest.approx(2.0)
            assert piece["duplane.batch.size"] == 1


async def test_a_chat_that_is_refused_says_so_in_the_span_at_fault() -> None:
    async with running_worker() as rig:
        await chat_refusal(rig, asks(seed=-1))
        await rig.all_free()
        spans = {span.name: dict(span.attributes or {}) for span in rig.spans.get_finished_spans()}
        for name in ("worker.chat", "worker.chat.prepare"):
            assert spans[name]["error.type"] == "INVALID_FIELD"
        assert "worker.chat.prefill" not in spans
