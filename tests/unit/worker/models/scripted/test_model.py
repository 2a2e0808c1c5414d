"""The scripted model as `duplane worker --checkpoint scripted` runs it."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from duplane.fabric.process import Shutdown
from duplane.worker.engine.inbox import Inbox
from duplane.worker.engine.model_runner import ModelRunner
from duplane.worker.engine.schedule import Block, Launch
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.engine.warm_up import warm_up
from duplane.worker.models.interface import DeviceLostError, Open, RunUnit
from duplane.worker.models.scripted.model import (
    REBUILT_UNITS,
    Mark,
    ScriptedDevice,
    ScriptedModel,
)
from duplane.worker.models.types import (
    ConversationOptions,
    PastUnit,
    Rebuilt,
    Unit,
    UnitFailure,
    UnitOutput,
)
from duplane.worker.service import serve
from duplane.worker.settings import WorkerSettings

SILENCE = np.zeros(16_000, np.float32)


def opened(**settings: int) -> ScriptedModel:
    model = ScriptedModel(2, **settings)
    model.open(0, model.conversation(ConversationOptions()))
    return model


def run(model: ScriptedModel, first_sample: float = 0.5) -> UnitOutput | UnitFailure:
    audio = np.zeros(16_000, np.float32)
    audio[0] = first_sample
    (result,) = model.step([Unit(0, audio)])
    return result


def texts(model: ScriptedModel) -> list[str]:
    results = [run(model) for _ in range(8)]
    return [result.text for result in results if isinstance(result, UnitOutput)]


def test_it_listens_to_silence_and_speaks_to_sound() -> None:
    model = opened()
    silent = run(model, 0.0)
    loud = run(model)
    assert isinstance(silent, UnitOutput)
    assert isinstance(loud, UnitOutput)
    assert silent.is_listen
    assert not silent.audio.size
    assert not loud.is_listen
    assert loud.audio.size == 24_000


def test_the_seed_chooses_the_words() -> None:
    assert texts(opened(seed=1)) == texts(opened(seed=1)) != texts(opened(seed=2))


def test_a_full_context_refuses_units() -> None:
    model = opened(context_capacity=20)
    assert isinstance(run(model), UnitOutput)
    refused = run(model)
    assert isinstance(refused, UnitFailure)
    assert refused.reason == "CONTEXT_FULL"
    assert not refused.is_fatal


def past_units(model: ScriptedModel, count: int) -> list[PastUnit]:
    results = [run(model) for _ in range(count)]
    outputs = [result for result in results if isinstance(result, UnitOutput)]
    return [
        PastUnit(
            Unit(0, SILENCE, sequence=sequence),
            output.token_ids,
            output.state,
            output.context_length,
        )
        for sequence, output in enumerate(outputs)
    ]


def test_a_rebuilt_conversation_goes_on_with_the_same_words() -> None:
    model, other = opened(), opened()
    past = past_units(model, REBUILT_UNITS + 1)
    first, last = other.rebuild(0, past), other.rebuild(0, past[REBUILT_UNITS:])
    assert first == Rebuilt(0, REBUILT_UNITS, past[-2].context_length, is_complete=False)
    assert last == Rebuilt(0, 1, past[-1].context_length, is_complete=True)
    assert texts(other) == texts(model)


def test_units_of_another_conversation_are_not_rebuilt() -> None:
    past = past_units(opened(), 2)
    result = opened().rebuild(0, past[1:])
    assert isinstance(result, UnitFailure)
    assert (result.reason, result.is_fatal) == ("REBUILD_DIFFERS", True)
    result = opened().rebuild(0, [replace(past[0], token_ids=())])
    assert isinstance(result, UnitFailure)
    assert (result.reason, result.field) == ("REBUILD_REFUSED", "token_ids")


def test_it_passes_the_warm_up_of_a_worker() -> None:
    model = ScriptedModel(1)
    warm_up(model, model)
    assert model.is_clean(0)


def test_a_unit_can_be_marked_to_fail() -> None:
    failure = run(opened(), Mark.FAILED_UNIT.value)
    assert isinstance(failure, UnitFailure)
    assert failure.is_fatal


def test_a_unit_can_be_marked_to_lose_the_device() -> None:
    model = ScriptedModel(1)
    channel = SlotChannel(0, Inbox(), lambda event: None)
    channels, lock = {0: channel}, threading.Condition()
    runner = ModelRunner(ScriptedDevice(model), 0, channels, lambda channel, event: None, lock)
    opening = Open(0, model.conversation(ConversationOptions()))
    runner.advance(Launch(Block.OPEN, (opening,)))
    unit = Unit(0, np.full(16_000, Mark.LOST_DEVICE.value, np.float32))
    channel.inbox.put(UnitRecord(unit))
    channel.run(RunUnit(unit), 1, 0.0)
    with pytest.raises(DeviceLostError):
        runner.advance(Launch(Block.BEGIN, (RunUnit(unit),)))


async def test_a_worker_of_it_starts_and_stops() -> None:
    shutdown = Shutdown()
    shutdown.drain()
    await serve(WorkerSettings(checkpoint="scripted", schedulers=("127.0.0.1:1",)), shutdown)


def test_a_worker_imports_no_torch_before_it_opens_a_checkpoint() -> None:
    code = "import sys, duplane.worker.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
