"""Valid and invalid input of clients: units, settings, and messages out of order."""

from __future__ import annotations

import numpy as np
import pytest
from support.worker.worker_harness import pcm, running_worker, unit

from duplane.fabric.errors import Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.models.types import OptionError

Request = session_pb2.ConverseRequest


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"audio": b""}, "INVALID_FIELD", "audio"),
        ({"audio": b"\0" * 6}, "INVALID_FIELD", "audio"),
        ({"audio": np.array([0, np.nan], "<f4").tobytes()}, "INVALID_FIELD", "audio"),
        ({"audio": np.array([np.inf], "<f4").tobytes()}, "INVALID_FIELD", "audio"),
        ({"audio": b"RIFF\0\0\0\0WAVE" + b"\0" * 100}, "INVALID_FIELD", "audio"),
        ({"audio": pcm(seconds=2.1)}, "UNIT_TOO_LONG", "audio"),
        ({"audio_int16": bytes(2)}, "INVALID_FIELD", "audio"),  # beside `audio`
        ({"audio": b"", "audio_int16": bytes(3)}, "INVALID_FIELD", "audio_int16"),
        ({"audio": b"", "audio_int16": bytes(70_000)}, "UNIT_TOO_LONG", "audio_int16"),
        (
            {"audio": b"", "audio_int16": b"\0\x7f", "audio_exponent": 21},
            "INVALID_FIELD",
            "audio_exponent",
        ),
        (
            {"audio": b"", "audio_int16": b"\xff\x7f", "audio_exponent": 20},
            "INVALID_FIELD",
            "audio_int16",
        ),
        ({"video_frames": [b"jpeg"]}, "INVALID_FIELD", "video_frames"),
        ({"forced_token_ids": [1]}, "INVALID_FIELD", "forced_token_ids"),
    ],
)
async def test_a_bad_unit_is_answered_and_the_session_goes_on(
    fields: dict, reason: str, field: str
) -> None:
    async with running_worker() as rig, rig.opened() as client:
        await client.send(unit(0, **fields))
        failed = await client.failed()
        assert (failed.sequence, failed.reason, failed.field) == (0, reason, field)
        await client.send(unit(1))
        assert (await client.delta()).sequence == 1


async def test_a_sequence_that_does_not_rise_is_answered_and_the_session_goes_on() -> None:
    async with running_worker() as rig, rig.opened() as client:
        for sequence in (3, 3, 2):
            await client.send(unit(sequence))
        assert (await client.delta()).sequence == 3
        for sequence in (3, 2):
            failed = await client.failed()
            assert (failed.sequence, failed.field) == (sequence, "sequence")
        await client.send(unit(4))
        assert (await client.delta()).sequence == 4


async def test_answers_keep_the_order_of_their_units() -> None:
    async with running_worker() as rig, rig.opened() as client:
        rig.model.hold()
        await client.send(unit(0))
        await rig.model.held()
        await client.send(unit(1, audio=b""))
        await client.send(unit(2))
        await rig.received(3)
        rig.model.let_go()
        assert (await client.delta()).sequence == 0
        assert (await client.failed()).sequence == 1
        assert (await client.delta()).sequence == 2


async def test_the_newest_units_win_and_the_dropped_are_counted() -> None:
    async with running_worker() as rig, rig.opened() as client:
        rig.model.hold()
        await client.send(unit(0))
        await rig.model.held()
        for sequence in range(1, 8):
            await client.send(unit(sequence, 0.5, force_listen=sequence == 2))
        await rig.received(8)
        rig.model.let_go()
        assert (await client.delta()).dropped_unit_count == 0
        first_kept = await client.delta()
        assert (first_kept.sequence, first_kept.dropped_unit_count) == (4, 3)
        # Unit 2 was dropped, but its interruption still had an effect.
        assert first_kept.HasField("listen")
        for sequence in (5, 6, 7):
            delta = await client.delta()
            assert (delta.sequence, delta.dropped_unit_count) == (sequence, 0)
            assert delta.HasField("speech")
        await client.close()
        assert (await client.closed()).dropped_unit_count == 3


@pytest.mark.parametrize(
    "request_",
    [
        Request(unit=unit(0)),
        Request(pause=session_pb2.Pause()),
        Request(resume=session_pb2.Resume()),
        Request(claim=session_pb2.Claim()),
        Request(),
    ],
)
async def test_a_message_before_open_ends_the_call(request_: session_pb2.ConverseRequest) -> None:
    async with running_worker() as rig, rig.claimed() as client:
        await client.write(request_)
        assert (await client.refused()).reason is Reason.OUT_OF_ORDER
        await rig.all_free()


async def test_a_second_open_ends_the_call() -> None:
    async with running_worker() as rig, rig.opened() as client:
        await client.write(Request(open=session_pb2.Open()))
        assert (await client.refused()).reason is Reason.OUT_OF_ORDER


async def test_a_call_that_does_not_begin_with_a_claim_is_refused() -> None:
    async with running_worker() as rig, rig.call() as client:
        await client.write(Request(open=session_pb2.Open()))
        assert (await client.refused()).reason is Reason.OUT_OF_ORDER


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (session_pb2.Open(system_prompt="x" * 40_000), "system_prompt"),
        (session_pb2.Open(llm_voice=b"123"), "llm_voice"),
        (session_pb2.Open(tts_voice=pcm(seconds=31)), "tts_voice"),
        (session_pb2.Open(context_token_limit=0), "context_token_limit"),
        (session_pb2.Open(context_token_limit=5), "system_prompt"),
        (session_pb2.Open(seed=-1), "seed"),
        (session_pb2.Open(config=session_pb2.DuplexConfig(temperature=3)), "config.temperature"),
        (
            session_pb2.Open(config=session_pb2.DuplexConfig(top_p=float("nan"))),
            "config.top_p",
        ),
        (
            session_pb2.Open(config=session_pb2.DuplexConfig(max_new_speak_token_count=0)),
            "config.max_new_speak_token_count",
        ),
        (
            session_pb2.Open(config=session_pb2.DuplexConfig(context_window_unit_count=0)),
            "config.context_window_unit_count",
        ),
        (
            session_pb2.Open(config=session_pb2.DuplexConfig(context_window=9)),  # pyright: ignore[reportArgumentType]  # an undefined value
            "config.context_window",
        ),
    ],
)
async def test_a_setting_that_cannot_be_is_named(settings: session_pb2.Open, field: str) -> None:
    async with running_worker() as rig, rig.claimed() as client:
        await client.write(Request(open=settings))
        error = await client.refused()
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)
        await rig.all_free()


async def test_an_option_that_the_model_refuses_is_named() -> None:
    async with running_worker() as rig, rig.claimed() as client:

        def refuse(options: object) -> None:
            raise OptionError("max_new_speak_tokens_per_chunk", "is odd")

        rig.model.on_options = refuse
        await client.write(Request(open=session_pb2.Open()))
        error = await client.refused()
        assert error.reason is Reason.INVALID_FIELD
        assert error.field == "config.max_new_speak_token_count"
