"""Sessions on a real worker with a scripted model, without faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.worker.scripted_model import PROMPT_TOKENS, UNIT_TOKENS, ScriptedModel, answer_loud
from support.worker.worker_harness import pcm, running_worker, unit

from duplane.fabric.v1 import session_pb2
from duplane.worker.models.types import DecodeMode, Unit, UnitOutput


async def test_a_session_listens_speaks_and_closes() -> None:
    async with running_worker() as rig, rig.opened() as client:
        await client.send(unit(0))
        delta = await client.delta()
        assert delta.sequence == 0
        assert delta.HasField("listen")
        assert delta.context_token_count == PROMPT_TOKENS + UNIT_TOKENS
        await client.send(unit(1, 0.5))
        delta = await client.delta()
        assert delta.sequence == 1
        assert delta.speech.text == "0.500"
        assert len(delta.speech.audio) == 240 * 4
        assert list(delta.token_ids) == [2, 3]
        assert list(delta.state_change.speech_token_ids) == [1, 2, 3, 4, 5]
        assert list(delta.state_change.chosen_token_ids) == [2]
        assert delta.state_change.draw_count == 2
        assert delta.token_counts.output_audio_token_count == 5
        assert delta.stage_times.decode.nanos > 0
        assert not delta.stage_times.HasField("vocoder")
        assert delta.stage_times.total.nanos > 0
        await client.close("enough")
        closed = await client.closed()
        assert closed.reason == session_pb2.CLOSE_REASON_CLIENT
        assert closed.unit_count == 2
        assert closed.token_counts.output_text_token_count == 2
        await rig.all_free()


async def test_a_forced_listen_ends_the_turn_that_it_interrupts() -> None:
    def answer(unit_: Unit, length: int) -> UnitOutput:
        output = answer_loud(unit_, length)
        return replace(output, interrupted_turn=unit_.force_listen)

    async with running_worker() as rig, rig.opened() as client:
        rig.model.answer = answer
        await client.send(unit(0, 0.5))
        delta = await client.delta()
        assert (delta.WhichOneof("outcome"), delta.end_of_turn) == ("speech", False)
        await client.send(unit(1, 0.5, force_listen=True))
        delta = await client.delta()
        assert (delta.WhichOneof("outcome"), delta.end_of_turn) == ("listen", True)
        assert delta.interrupted_turn


async def test_open_says_what_is_in_force_and_what_has_no_effect() -> None:
    config = session_pb2.DuplexConfig(
        decode_mode=session_pb2.DECODE_MODE_GREEDY, top_k=3, max_new_speak_token_count=9
    )
    settings = session_pb2.Open(
        system_prompt="Be brief.",
        tts_voice=pcm(0.1),
        config=config,
        seed=5,
        context_token_limit=100,
    )
    async with running_worker() as rig, rig.claimed() as client:
        opened = await client.open(settings)
        assert opened.prompt_token_count == PROMPT_TOKENS
        assert opened.context_token_limit == 100
        assert list(opened.ignored_fields) == ["tts_voice"]
        options = rig.model.options[0]
        assert options.system_prompt == "Be brief."
        assert options.decode_mode is DecodeMode.GREEDY
        assert (options.top_k, options.max_new_speak_tokens_per_chunk, options.seed) == (3, 9, 5)
        assert options.tts_voice is not None
        assert options.tts_voice.dtype == np.float32
        assert rig.model.prepared == [options]
        await client.close()


async def test_a_voice_that_is_too_short_is_not_used_and_is_named() -> None:
    request = session_pb2.Open(llm_voice=pcm(0.1, seconds=0.09), tts_voice=pcm(0.1, seconds=0.1))
    async with running_worker() as rig, rig.claimed() as client:
        opened = await client.open(request)
        assert list(opened.ignored_fields) == ["llm_voice", "tts_voice"]
        options = rig.model.options[0]
        assert options.llm_voice is None
        assert options.tts_voice is not None  # the model, not the worker, ignores it
        await client.close()


async def test_units_sent_before_opened_are_run() -> None:
    async with running_worker() as rig, rig.claimed() as client:
        await client.write(session_pb2.ConverseRequest(open=session_pb2.Open()))
        await client.send(unit(0))
        assert (await client.read()).HasField("opened")
        assert (await client.delta()).sequence == 0


async def test_units_of_several_slots_run_in_one_launch() -> None:
    model = ScriptedModel(slot_count=4)
    async with (
        running_worker(model) as rig,
        rig.opened(rig.grant(0)) as first,
        rig.opened(rig.grant(1)) as second,
        rig.opened(rig.grant(3)) as third,
    ):
        model.hold()
        await first.send(unit(0))
        await model.held()
        await first.send(unit(1, 0.1))
        await second.send(unit(0, 0.2))
        await third.send(unit(0, 0.3))
        await rig.received(4)
        model.let_go()
        assert (await first.delta()).sequence == 0
        texts = [(await client.delta()).speech.text for client in (first, second, third)]
        assert texts == ["0.100", "0.200", "0.300"]
        assert sorted(model.rounds[-1]) == [0, 1, 3]
