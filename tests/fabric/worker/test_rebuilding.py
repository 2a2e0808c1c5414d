"""Conversations that continue on a real worker with a scripted model, from their past units."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.worker.rebuild_messages import context, past, rebuild, rebuilt
from support.worker.scripted_model import PROMPT_TOKENS, ScriptedModel
from support.worker.worker_harness import pcm, running_worker, unit

from duplane.fabric.audio import MAX_EXPONENT
from duplane.fabric.bounds import MAX_REBUILD_UNIT_COUNT, MAX_STATE_BYTES
from duplane.fabric.errors import Reason
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.worker.models.types import (
    PastUnit,
    Rebuilt,
    Unit,
    UnitFailure,
    UnitOutput,
    UnitReach,
)
from duplane.worker.settings import SessionLimits

SEEDED = session_pb2.Open(seed=3)


@pytest.mark.parametrize("form", ["rebuild_state", "state_change"])
async def test_conversation_goes_on_where_it_was_on_another_worker(form: str) -> None:
    async with running_worker() as rig:
        async with rig.opened(settings=SEEDED) as client:
            await client.send(unit(0, 0.5))
            first = await client.delta()
        await rig.all_free()
        async with rig.opened(settings=SEEDED) as client:
            state = {"state_change": None, form: getattr(first, form)}
            units = [past(n, token_ids=first.token_ids, **state) for n in range(3)]
            await client.write(rebuild(*units))
            answer = await rebuilt(client)
            assert (answer.sequence, answer.context_token_count) == (2, context(3))
            await client.send(unit(3, 0.5))
            delta = await client.delta()
            assert (delta.sequence, delta.context_token_count) == (3, context(4))
            await client.close()
            closed = await client.closed()
            assert closed.unit_count == 1
            assert closed.token_counts.output_text_token_count == 2


async def test_other_sessions_have_turns_while_units_are_prepared() -> None:
    model, prepared, turns = ScriptedModel(), list[Unit](), list[int]()
    async with running_worker(model) as rig, rig.opened(settings=SEEDED) as client:
        loop, prepare = asyncio.get_running_loop(), model.unit

        def watched(unit: Unit) -> Unit | UnitFailure:
            if not prepared:
                loop.call_soon(lambda: turns.append(len(prepared)))
            prepared.append(unit)
            return prepare(unit)

        model.unit = watched
        await client.write(rebuild(*(past(n) for n in range(200))))
        await rebuilt(client)
    assert turns == [64]


@pytest.mark.parametrize("is_rebuilding", [False, True])
async def test_a_unit_that_the_preparer_fails_on_ends_only_its_session(is_rebuilding: bool) -> None:
    model = ScriptedModel()
    async with (
        running_worker(model) as rig,
        rig.opened(rig.grant(0), SEEDED) as client,
        rig.opened(rig.grant(1)) as neighbour,
    ):
        prepare = model.unit

        def fail(unit: Unit) -> Unit | UnitFailure:
            if unit.slot == 0:
                raise MemoryError("a secret")
            return prepare(unit)

        model.unit = fail
        if is_rebuilding:
            await client.write(rebuild(past(0)))
        else:
            await client.send(unit(0))
        closed = await client.closed()
        assert closed.reason == session_pb2.CLOSE_REASON_ENGINE_FAILED
        assert "secret" not in closed.message
        await neighbour.send(unit(0))
        assert (await neighbour.delta()).sequence == 0


async def test_units_come_in_several_messages_and_none_is_dropped() -> None:
    """There are far more past units than the inbox or the outbox has room for."""
    seen: list[int] = []

    async with running_worker() as rig, rig.opened(settings=SEEDED) as client:
        take = rig.model.rebuild

        def watched(slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
            result = take(slot, units)
            assert isinstance(result, Rebuilt)
            seen.extend(each.unit.sequence for each in units[: result.unit_count])
            return result

        rig.model.rebuild = watched
        for begin in range(0, 60, 20):
            units = (past(n) for n in range(begin, begin + 20))
            await client.write(rebuild(*units, is_last=begin == 40))
            assert (await rebuilt(client)).sequence == begin + 19
        await client.send(unit(60))
        assert (await client.delta()).context_token_count == context(61)
    assert seen == list(range(60))


async def test_only_a_few_units_with_decoded_pictures_wait_to_be_rebuilt() -> None:
    """A rebuild repeats the speech only once, after the last unit of the message."""
    most = SessionLimits().inbox_unit_count
    decoded: list[int] = []
    taken: list[int] = []
    waiting: list[int] = []
    speech_count = 0
    async with running_worker() as rig:
        omni = rig.grant(kind=lease_pb2.SESSION_KIND_OMNI_DUPLEX)
        async with rig.opened(omni, SEEDED) as client:
            prepare, take = rig.model.unit, rig.model.rebuild

            def noted(unit: Unit) -> Unit | UnitFailure:
                if unit.frames:
                    decoded.append(unit.sequence)
                    waiting.append(len(decoded) - len(taken))
                return prepare(unit)

            def watched(slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
                nonlocal speech_count
                result = take(slot, units)
                assert isinstance(result, Rebuilt)
                shares = units[: result.unit_count]
                taken.extend(each.unit.sequence for each in shares if each.unit.frames)
                speech_count += not units
                return replace(result, is_complete=not units)

            rig.model.unit, rig.model.rebuild = noted, watched
            count = 5 * most
            units = [past(n, video_frames=[b"jpeg"] if n % 2 else []) for n in range(2 * count)]
            await client.write(rebuild(*units))
            assert (await rebuilt(client)).context_token_count == context(2 * count)
    assert taken == decoded == list(range(1, 2 * count, 2))
    assert max(waiting) == most
    assert speech_count == 1


async def test_picture_that_cannot_be_decoded_is_named_by_its_place_in_the_message() -> None:
    async with running_worker() as rig:
        omni = rig.grant(kind=lease_pb2.SESSION_KIND_OMNI_DUPLEX)
        async with rig.opened(omni, SEEDED) as client:
            pictures = [b"jpeg"] * 9 + [b""]
            await client.write(
                rebuild(*(past(n, video_frames=[jpeg]) for n, jpeg in enumerate(pictures)))
            )
            error = await client.refused()
            assert (error.reason, error.field) == (
                Reason.INVALID_FIELD,
                "rebuild.units[9].video_frames[0]",
            )
            await rig.all_free()


async def test_units_that_were_dropped_are_left_out() -> None:
    async with running_worker() as rig, rig.opened(settings=SEEDED) as client:
        await client.write(rebuild(past(2, 1), past(9, 2)))
        assert (await rebuilt(client)).sequence == 9
        await client.send(unit(9))
        assert (await client.failed()).field == "sequence"
        await client.send(unit(10))
        assert (await client.delta()).context_token_count == context(3)


async def test_empty_rebuild_is_answered() -> None:
    async with running_worker() as rig, rig.opened(settings=SEEDED) as client:
        await client.write(rebuild())
        answer = await rebuilt(client)
        assert (answer.sequence, answer.context_token_count) == (-1, PROMPT_TOKENS)
        await client.send(unit(0))
        assert (await client.delta()).sequence == 0


async def test_past_audio_reaches_the_model_as_it_was() -> None:
    heard: list[float] = []
    async with running_worker() as rig, rig.opened(settings=SEEDED) as client:
        take = rig.model.rebuild

        def watched(slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
            heard.extend(float(each.unit.audio[0]) for each in units)
            return take(slot, units)

        rig.model.rebuild = watched
        quiet = (-16384).to_bytes(2, "little", signed=True) * 16_000
        await client.write(
            rebuild(
                past(0, audio_int16=quiet),
                past(1, audio_int16=b"", audio=pcm(1.5)),
                past(2, audio_int16=quiet, audio_exponent=2),
            )
        )
        await rebuilt(client)
    assert heard == [-0.5, 1.5, -2.0]


async def test_worker_says_that_it_reads_the_exponent_of_past_audio() -> None:
    async with running_worker() as rig, rig.claimed() as client:
        opened = await client.open(SEEDED)
        assert opened.accepts_audio_exponent
        assert opened.accepts_row_count


async def test_units_that_are_not_fed_reach_the_model_without_sound() -> None:
    taken: list[PastUnit] = []
    async with running_worker() as rig, rig.opened(settings=SEEDED) as client:
        take = rig.model.rebuild

        def watched(slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
            rebuilt = take(slot, units)
            taken.extend(units[: rebuilt.unit_count] if isinstance(rebuilt, Rebuilt) else ())
            return rebuilt

        rig.model.rebuild = watched
        await client.write(
            rebuild(
                past(0, audio_int16=b"", row_count=13, had_sound=True),
                past(1, row_count=14, had_sound=True),
                past(2),
            )
        )
        await rebuilt(client)
        await client.send(unit(3))
        assert (await client.delta()).context_token_count == context(4)
    found = [(unit.unfed_rows, unit.had_audio, unit.unit.audio.size) for unit in taken]
    assert found == [(13, True, 0), (14, True, 16_000), (0, False, 16_000)]
    assert [unit.row_count > 0 for unit in taken] == [False, False, True]


async def test_rebuild_that_lacks_units_of_the_context_is_refused_at_its_end() -> None:
    async with running_worker() as rig, rig.opened(settings=SEEDED) as client:
        take = rig.model.rebuild

        def lacking(slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
            rebuilt = take(slot, units)
            assert isinstance(rebuilt, Rebuilt)
            return replace(rebuilt, lack="units are missing")

        rig.model.rebuild = lacking
        await client.write(rebuild(past(0), is_last=False))
        await rebuilt(client)
        await client.write(rebuild(past(1)))
        error = await client.refused()
        assert (error.reason, error.field) == (Reason.REBUILD_REFUSED, "rebuild.units")
        assert "units are missing" in str(error)


async def test_delta_tells_which_units_a_rebuild_needs() -> None:
    reach = UnitReach(row_count=13, context_units=5, sound_units=40, turn_units=3)
    model = ScriptedModel()
    async with running_worker(model) as rig, rig.opened(settings=SEEDED) as client:
        await client.send(unit(0))
        assert not (await client.delta()).HasField("reach")
        step = model.step

        def with_reach(*args: Any, **fields: Any) -> Iterator[UnitOutput | UnitFailure]:
            for output in step(*args, **fields):
                assert isinstance(output, UnitOutput)
                yield replace(output, reach=reach)

        model.step = with_reach
        await client.send(unit(1))
        assert (await client.delta()).reach == session_pb2.UnitReach(
            row_count=13, context_unit_count=5, sound_unit_count=40, turn_unit_count=3
        )


BAD: dict[str, tuple[session_pb2.ConverseRequest, Reason, str]] = {
    "another model": (
        rebuild(past(0), model_digest="other"),
        Reason.REBUILD_REFUSED,
        "rebuild.model_digest",
    ),
    "no ids": (rebuild(past(0, token_ids=[])), Reason.REBUILD_REFUSED, "token_ids"),
    "another length": (rebuild(past(0, 2)), Reason.REBUILD_DIFFERS, ""),
    "half a sample": (
        rebuild(past(0), past(1, audio_int16=b"abc")),
        Reason.INVALID_FIELD,
        "rebuild.units[1].audio_int16",
    ),
    "rows below 0": (
        rebuild(past(0, row_count=-1)),
        Reason.INVALID_FIELD,
        "rebuild.units[0].row_count",
    ),
    "rows and pictures": (
        rebuild(past(0, row_count=13, video_frames=[b"x"])),
        Reason.INVALID_FIELD,
        "rebuild.units[0].row_count",
    ),
    "too loud": (
        rebuild(past(0, audio_exponent=MAX_EXPONENT + 1)),
        Reason.INVALID_FIELD,
        "rebuild.units[0].audio_exponent",
    ),
    "an exponent below 0": (
        rebuild(past(0, audio_exponent=-1)),
        Reason.INVALID_FIELD,
        "rebuild.units[0].audio_exponent",
    ),
    "no sound": (
        rebuild(past(0, audio_int16=b"")),
        Reason.INVALID_FIELD,
        "rebuild.units[0].audio",
    ),
    "two sounds": (rebuild(past(0, audio=pcm())), Reason.INVALID_FIELD, "rebuild.units[0].audio"),
    "too long": (
        rebuild(past(0, audio_int16=bytes(96_000))),
        Reason.INVALID_FIELD,
        "rebuild.units[0].audio_int16",
    ),
    "no state": (
        rebuild(past(0, state_change=None)),
        Reason.INVALID_FIELD,
        "rebuild.units[0].rebuild_state",
    ),
    "a state that is too long": (
        rebuild(past(0, rebuild_state=bytes(MAX_STATE_BYTES + 1))),
        Reason.INVALID_FIELD,
        "rebuild.units[0].rebuild_state",
    ),
    "out of order": (
        rebuild(past(1, 1), past(0, 2)),
        Reason.INVALID_FIELD,
        "rebuild.units[1].sequence",
    ),
    "pictures without video": (
        rebuild(past(0, video_frames=[b"x"])),
        Reason.INVALID_FIELD,
        "rebuild.units[0].video_frames",
    ),
    "too large": (
        rebuild(*(past(n, audio_int16=bytes(64_000)) for n in range(132))),
        Reason.INVALID_FIELD,
        "rebuild.units",
    ),
    "too many": (
        rebuild(*(past(n, audio_int16=bytes(2)) for n in range(MAX_REBUILD_UNIT_COUNT + 1))),
        Reason.INVALID_FIELD,
        "rebuild.units",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_units_that_cannot_be_rebuilt_end_the_call_and_leave_a_clean_slot(name: str) -> None:
    request, reason, field = BAD[name]
    async with running_worker() as rig, rig.opened(settings=SEEDED) as client:
        await client.write(request)
        error = await client.refused()
        assert (error.reason, error.field) == (reason, field)
        await rig.all_free()


async def test_message_with_the_most_units_is_rebuilt() -> None:
    async with running_worker() as rig, rig.opened(settings=SEEDED) as client:
        units = (past(n, audio_int16=bytes(2)) for n in range(MAX_REBUILD_UNIT_COUNT))
        await client.write(rebuild(*units))
        assert (await rebuilt(client)).sequence == MAX_REBUILD_UNIT_COUNT - 1


async def test_conversation_without_a_seed_cannot_be_rebuilt() -> None:
    async with running_worker() as rig, rig.opened() as client:
        await client.write(rebuild(past(0)))
        error = await client.refused()
        assert (error.reason, error.field) == (Reason.REBUILD_REFUSED, "seed")


async def test_model_that_raises_ends_the_session_like_a_failed_unit() -> None:
    async with running_worker() as rig, rig.opened(settings=SEEDED) as client:

        def broken(slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
            raise RuntimeError("a stage is broken")

        rig.model.rebuild = broken
        await client.write(rebuild(past(0)))
        assert (await client.closed()).reason == session_pb2.CLOSE_REASON_ENGINE_FAILED


ORDERS: dict[str, list[session_pb2.ConverseRequest]] = {
    "after a unit": [session_pb2.ConverseRequest(unit=unit(0)), rebuild(past(0))],
    "after a pause": [session_pb2.ConverseRequest(pause=session_pb2.Pause()), rebuild(past(0))],
    "after the last one": [rebuild(past(0)), rebuild(past(1))],
    "a unit between": [rebuild(is_last=False), session_pb2.ConverseRequest(unit=unit(0))],
    "a pause between": [
        rebuild(is_last=False),
        session_pb2.ConverseRequest(pause=session_pb2.Pause()),
    ],
}


@pytest.mark.parametrize("name", ORDERS)
async def test_message_out_of_its_order_ends_the_call(name: str) -> None:
    async with running_worker() as rig, rig.opened(settings=SEEDED) as client:
        first, second = ORDERS[name]
        await client.write(first)
        if not first.HasField("pause"):
            await client.read()
        await client.write(second)
        assert (await client.refused()).reason is Reason.OUT_OF_ORDER
        await rig.all_free()


async def test_rebuild_before_opened_ends_the_call() -> None:
    async with running_worker() as rig, rig.claimed() as client:
        await client.write(rebuild(past(0)))
        assert (await client.refused()).reason is Reason.OUT_OF_ORDER


@pytest.mark.timing
async def test_session_that_ends_while_it_is_rebuilt_leaves_a_clean_slot() -> None:
    model = ScriptedModel()
    entered = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with running_worker(model) as rig, rig.opened(settings=SEEDED) as client:
        take = model.rebuild

        def watched(slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
            loop.call_soon_threadsafe(entered.set)
            model.wait()
            return take(slot, units)

        model.rebuild = watched
        model.hold()
        await client.write(rebuild(*(past(n) for n in range(40))))
        async with asyncio.timeout(5):
            await entered.wait()
        client.vanish()
        model.let_go()
        await rig.all_free()
