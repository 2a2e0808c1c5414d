"""Omni sessions: the frames that reach the model, their bounds and their token counts."""

from __future__ import annotations

import asyncio
import io
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from support.paths import GOLDEN
from support.time_limits import WITHIN_S
from support.worker.scripted_model import ScriptedConversation, ScriptedModel, answer_loud
from support.worker.worker_harness import Rig, pcm, running_worker, unit

from duplane.fabric.errors import Reason
from duplane.fabric.v1 import lease_pb2, registry_pb2, session_pb2
from duplane.worker.models.interface import DeviceDescription
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.worker_model import WorkerModel
from duplane.worker.models.types import (
    ConversationOptions,
    Opened,
    Unit,
    UnitFailure,
    UnitOutput,
    WindowMode,
)
from duplane.worker.settings import SessionLimits

OMNI = lease_pb2.SESSION_KIND_OMNI_DUPLEX
CHECKPOINT = GOLDEN / "checkpoint"
LIMITS = SessionLimits(frame_count=3, max_frame_bytes=100, max_slice_count=4)
Config = session_pb2.DuplexConfig


def omni(rig: Rig, slot: int = 0) -> lease_pb2.Granted:
    return rig.grant(slot, kind=OMNI)


async def test_frames_reach_the_model_with_their_unit() -> None:
    seen: list[Unit] = []

    def answer(shown: Unit, length: int) -> UnitOutput:
        seen.append(shown)
        return answer_loud(shown, length)

    async with running_worker() as rig, rig.opened(omni(rig)) as client:
        rig.model.answer = answer
        await client.send(unit(0, video_frames=[b"one", b"two"], max_slice_count=4))
        await client.send(unit(1, audio=b"", video_frames=[b"three"]))
        await client.send(unit(2))
        for sequence in range(3):
            assert (await client.delta()).sequence == sequence
        assert [shown.frames for shown in seen] == [(b"one", b"two"), (b"three",), ()]
        assert [shown.max_slices for shown in seen] == [4, 1, 1]
        assert [shown.audio.size for shown in seen] == [16_000, 0, 16_000]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"video_frames": [b"x"] * 4}, "video_frames"),
        ({"video_frames": [b"x", b"x" * 101]}, "video_frames"),
        ({"video_frames": [b"x"], "max_slice_count": 5}, "max_slice_count"),
        ({"video_frames": [b"x"], "max_slice_count": 0}, "max_slice_count"),
        ({"video_frames": [b"x"], "audio": b"12345"}, "audio"),
        ({"audio": b""}, "audio"),
    ],
)
async def test_frames_beyond_their_bounds_are_refused_and_the_session_goes_on(
    fields: dict[str, Any], field: str
) -> None:
    async with running_worker(limits=LIMITS) as rig, rig.opened(omni(rig)) as client:
        await client.send(unit(0, **fields))
        failed = await client.failed()
        assert (failed.sequence, failed.reason, failed.field) == (0, "INVALID_FIELD", field)
        await client.send(unit(1, video_frames=[b"x"] * 3))
        assert (await client.delta()).sequence == 1


async def test_what_came_in_is_told_and_summed_up() -> None:
    def answer(shown: Unit, length: int) -> UnitOutput:
        loud = answer_loud(shown, length)
        stages = {**loud.stage_s, "vision": 0.25}
        counts = {"input_audio_count": 10, "input_video_count": 64, "input_mark_count": 3}
        return replace(loud, stage_s=stages, **counts)

    async with running_worker() as rig, rig.opened(omni(rig)) as client:
        rig.model.answer = answer
        for sequence in range(2):
            await client.send(unit(sequence, 0.5, video_frames=[b"x"]))
            delta = await client.delta()
            assert delta.token_counts.input_audio_token_count == 10
            assert delta.token_counts.input_video_token_count == 64
            assert delta.token_counts.input_text_token_count == 3
            assert delta.stage_times.vision.nanos == 250_000_000
        await client.close()
        total = (await client.closed()).token_counts
        assert (total.input_audio_token_count, total.input_video_token_count) == (20, 128)
        assert (total.input_text_token_count, total.output_text_token_count) == (6, 4)


async def test_a_picture_that_cannot_be_shown_is_refused_in_its_turn() -> None:
    async with running_worker() as rig, rig.opened(omni(rig)) as client:
        rig.model.hold()
        await client.send(unit(0, video_frames=[b"x"]))
        await rig.model.held()
        await client.send(unit(1, video_frames=[b"x", b""]))
        await client.send(unit(2, video_frames=[b"x"]))
        await rig.received(3)
        rig.model.let_go()
        assert (await client.delta()).sequence == 0
        failed = await client.failed()
        assert (failed.sequence, failed.reason) == (1, "INVALID_FIELD")
        assert failed.field == "video_frames[1]"
        assert failed.message == "video_frames[1] cannot be used: the frame is empty"
        assert (await client.delta()).sequence == 2
        assert len(rig.model.rounds) == 3 + 2  # two more rounds are the worker's warm-up


async def test_a_client_that_leaves_while_its_picture_is_decoded_leaves_nothing() -> None:
    is_decoding, may_go_on = threading.Event(), threading.Event()

    class Slow(ScriptedModel):
        def unit(self, unit: Unit) -> Unit | UnitFailure:
            if unit.frames == (b"x",):
                is_decoding.set()
                may_go_on.wait(2 * WITHIN_S)
            return super().unit(unit)

    async with running_worker(Slow()) as rig:
        async with rig.opened(omni(rig)) as client:
            await client.send(unit(0, video_frames=[b"x"]))
            await asyncio.to_thread(is_decoding.wait, WITHIN_S)
        await rig.scheduler.until_slot(0, registry_pb2.SLOT_STATE_CLEANING)
        may_go_on.set()
        await rig.all_free()
        async with rig.opened(omni(rig)) as client:
            await client.send(unit(0))
            assert (await client.delta()).sequence == 0
        assert rig.model.rounds == [(0,)] * 4


async def test_a_model_that_sees_nothing_serves_no_omni_session() -> None:
    blind = ScriptedModel()
    blind.constants = replace(blind.constants, accepts_pictures=False)
    async with running_worker(blind) as rig:
        kinds = list(rig.scheduler.registers[0].kinds)
        assert lease_pb2.SESSION_KIND_AUDIO_DUPLEX in kinds
        assert lease_pb2.SESSION_KIND_OMNI_DUPLEX not in kinds
        async with rig.call() as client:
            claim = session_pb2.Claim(lease=omni(rig).lease)
            await client.write(session_pb2.ConverseRequest(claim=claim))
            assert (await client.refused()).reason is Reason.KIND_NOT_SERVED


async def test_the_window_of_a_session_is_the_clients() -> None:
    config = Config(
        context_window=session_pb2.CONTEXT_WINDOW_CONTEXT,
        basic_window_high_token_count=230,
        basic_window_low_token_count=160,
        context_window_unit_count=9,
        context_window_previous_token_count=0,
    )
    async with running_worker() as rig:
        async with rig.opened(rig.grant(0), session_pb2.Open(config=config)):
            pass
        async with rig.opened(rig.grant(1)):
            pass
        chosen, default = rig.model.options[0], rig.model.options[1]
        assert chosen.sliding_window_mode is WindowMode.CONTEXT
        assert (chosen.basic_window_high_tokens, chosen.basic_window_low_tokens) == (230, 160)
        assert (chosen.context_max_units, chosen.context_previous_max_tokens) == (9, 0)
        assert default == ConversationOptions()


@pytest.mark.parametrize(
    ("has_window", "limit", "is_closed"),
    [(False, None, True), (True, None, False), (True, 18, True), (True, 100, False)],
)
async def test_a_window_leaves_no_context_full_but_at_the_clients_own_limit(
    has_window: bool, limit: int | None, is_closed: bool
) -> None:
    class Windowed(ScriptedModel):
        def open(self, slot: int, conversation: ScriptedConversation) -> Opened:
            return replace(super().open(slot, conversation), has_window=has_window)

    settings = session_pb2.Open(context_token_limit=limit)
    async with (
        running_worker(Windowed(context_capacity=19)) as rig,
        rig.opened(rig.grant(), settings) as client,
    ):
        await client.send(unit(0))
        assert (await client.delta()).context_token_count == 19
        if is_closed:
            assert (await client.closed()).reason == session_pb2.CLOSE_REASON_CONTEXT_FULL
        else:
            await client.send(unit(1))
            assert (await client.delta()).sequence == 1


class TinyModel(ScriptedModel):
    """The scripted device of the tests, but with a real tiny model."""

    def load(self) -> Any:
        torch.set_num_threads(1)
        slot_count = self.constants.slot_count
        model = DuplexModel.load(CHECKPOINT, slot_count=slot_count, context_capacity=512)
        return model.preparer, WorkerModel(model)

    def memory_used_bytes(self) -> int:
        return 0

    def description(self) -> DeviceDescription:
        return DeviceDescription("cpu")


async def test_a_real_model_sees_what_a_client_shows() -> None:
    written = io.BytesIO()
    Image.new("RGB", (320, 240), (10, 200, 90)).save(written, "JPEG")
    settings = session_pb2.Open(
        seed=1, config=Config(decode_mode=session_pb2.DECODE_MODE_GREEDY, generate_audio=False)
    )
    async with running_worker(TinyModel()) as rig, rig.opened(omni(rig), settings) as client:
        shown = [
            unit(0, audio=pcm(0.1), video_frames=[written.getvalue()]),
            unit(1, audio=b"", video_frames=[written.getvalue()] * 2),
            unit(2, audio=pcm(0.1), video_frames=[b"no picture"]),
        ]
        counts: list[int] = []
        for entry in shown[:2]:
            await client.send(entry)
            counts.append((await client.delta()).token_counts.input_video_token_count)
        assert counts == [64, 128]
        await client.send(shown[2])
        failed = await client.failed()
        assert (failed.reason, failed.field) == ("INVALID_FIELD", "video_frames[0]")
