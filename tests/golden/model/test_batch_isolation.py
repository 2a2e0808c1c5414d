"""If a stage fails for one conversation, only this conversation ends; no other result changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.paths import GOLDEN
from torch.utils._python_dispatch import TorchDispatchMode

from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.chat import ChatMessage, ChatRequest, ChatRole
from duplane.worker.models.interface import (
    Continue,
    DeviceLostError,
    Item,
    Part,
    RunUnit,
    Unfinished,
)
from duplane.worker.models.minicpm_o.batch_isolation import STAGE_FAILED
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.worker_model import WorkerModel
from duplane.worker.models.types import (
    ConversationOptions,
    Unit,
    UnitFailure,
    UnitOutput,
    WindowMode,
)

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 40 * UNIT)
FRAME = (GOLDEN / "images" / "small.png").read_bytes()
SLOTS = (0, 1, 2)
GUILTY = 1
UNITS = 6
INTERRUPTED = 4
USER = ChatRole.USER
# These options use every state that a step changes: draws, penalised ids, and a moving window.
OPTIONS = ConversationOptions(
    force_listen_count=0,
    temperature=0.9,
    text_repetition_window_size=4,
    sliding_window_mode=WindowMode.BASIC,
    basic_window_high_tokens=110,
    basic_window_low_tokens=80,
)

Results = dict[int, list[UnitOutput | UnitFailure]]


def is_first(*slots: Sequence[Any] | Any) -> bool:
    """Return whether `GUILTY`, the slot that fails, is among these slots, units or pairs."""
    items = slots[0] if isinstance(slots[0], Sequence) else [slots[0]]
    found = (item[0] if isinstance(item, tuple) else getattr(item, "slot", item) for item in items)
    return GUILTY in found


def rows_of(counts: Sequence[tuple[int, int]]) -> set[int]:
    return {rows for _, rows in counts}


Place = Callable[[DuplexModel], tuple[object, str, Callable[..., bool]]]
STAGES: dict[str, Place] = {
    "intake": lambda m: (m.parts.audio.mel, "push", lambda slot, _: slot == GUILTY),
    "mel": lambda m: (m.parts.audio.mel, "numbers", is_first),
    "audio": lambda m: (m.parts.audio, "encode", is_first),
    "vision": lambda m: (m._pipeline.inputs, "encode_tiles", is_first),
    "prefill": lambda m: (m.llm, "feed", lambda c, _: is_first(c) and rows_of(c) != {1}),
    "choice": lambda m: (m.sampling, "choose", is_first),
    "decode": lambda m: (m.llm, "feed", lambda c, _: is_first(c) and rows_of(c) == {1}),
    "talker": lambda m: (m.parts.talker, "speak", is_first),
    "flow": lambda m: (m.parts.vocoder, "encode", is_first),
    "HiFT": lambda m: (m.parts.vocoder, "decode_mel", is_first),
    "turn": lambda m: (m.parts.vocoder, "start_turn", is_first),
    "settle": lambda m: (m.llm, "append", is_first),
    "window": lambda m: (m.llm, "splice", lambda slot, _: slot == GUILTY),
}


class FailAt(TorchDispatchMode):
    """Counts operations, and raises an error in place of the operation with a given number."""

    def __init__(self, number: float, error: Exception) -> None:
        super().__init__()
        self.count, self._number, self._error = 0, number, error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.count >= self._number:
            raise self._error
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def replaced(owner: object, name: str, call: Callable[..., Any]) -> Iterator[None]:
    before = vars(owner).get(name)  # two places may have the same method
    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


def count_work(model: DuplexModel, places: dict[str, Place]) -> dict[str, list[int]]:
    """Run without failures, and count the operations of each call that `places` select."""
    counts: dict[str, list[int]] = {stage: [] for stage in places}

    def counting(stage: str, call: Any, is_chosen: Callable[..., bool]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            if not is_chosen(*arguments):
                return call(*arguments)
            with FailAt(float("inf"), RuntimeError()) as mode:
                result = call(*arguments)
            counts[stage].append(mode.count)
            return result

        return counted

    with ExitStack() as stack:
        for stage, place in places.items():
            owner, name, is_chosen = place(model)
            call = counting(stage, getattr(owner, name), is_chosen)
            stack.enter_context(replaced(owner, name, call))
        play(model, SLOTS)
    return counts


@contextmanager
def broken(
    model: DuplexModel, place: Place, numbers: Sequence[float], error: Exception
) -> Iterator[list[Exception]]:
    """Make the chosen calls of a stage raise at these operations; later calls raise immediately."""
    owner, name, is_chosen = place(model)
    call: Any = getattr(owner, name)
    waiting, raised = list(numbers), list[Exception]()

    def failing(*arguments: Any) -> Any:
        if not is_chosen(*arguments):
            return call(*arguments)
        number = waiting.pop(0) if waiting else 0
        try:
            if not number:
                raise error
            with FailAt(number, error):
                return call(*arguments)
        except type(error):
            raised.append(error)
            raise

    with replaced(owner, name, failing):
        yield raised


def play(model: DuplexModel, slots: Sequence[int]) -> Results:
    """Run a conversation in each slot; close a conversation when it fails."""
    for slot in slots:
        model.open(slot, replace(OPTIONS, seed=slot))
    results: Results = defaultdict(list)
    going = list(slots)
    for number in range(UNITS):
        units = [
            Unit(
                slot,
                TALK[(3 * slot + number) * UNIT :][:UNIT],
                force_listen=number == INTERRUPTED,
                frames=(FRAME,) if number % 2 else (),
            )
            for slot in going
        ]
        for result in model.step(units):
            results[result.slot].append(result)
        for failure in model.settle(going):
            results[failure.slot].append(failure)
        for slot in going:
            last = results[slot][-1]
            if isinstance(last, UnitFailure):
                assert (last.reason, last.is_fatal) == (STAGE_FAILED, True)
                going.remove(slot)
                model.close(slot)
                assert model.is_clean(slot)
    for slot in going:
        model.close(slot)
        assert model.is_clean(slot)
    return results


def assert_same(got: list[UnitOutput | UnitFailure], want: list[UnitOutput | UnitFailure]) -> None:
    assert len(got) == len(want) == UNITS
    for ours, theirs in zip(got, want, strict=True):
        assert isinstance(ours, UnitOutput)
        assert isinstance(theirs, UnitOutput)
        assert ours.token_ids == theirs.token_ids
        assert ours.context_length == theirs.context_length
        assert ours.audio_token_count == theirs.audio_token_count
        # Another batch changes the last bits of the pitch; after a second the wave differs by this
        # much.
        assert len(ours.audio) == len(theirs.audio)
        if len(ours.audio):
            assert np.sqrt(np.mean((ours.audio - theirs.audio) ** 2)) < 2e-3


@pytest.fixture(scope="module")
def alone(_loaded: DuplexModel) -> Results:
    """Return the results of each of the three conversations when it runs alone."""
    found: Results = {}
    for slot in SLOTS:
        found |= play(_loaded, [slot])
    spoken = [r for r in found[GUILTY] if isinstance(r, UnitOutput) and r.audio_token_count]
    assert spoken
    return found


@pytest.fixture(scope="module")
def work(_loaded: DuplexModel) -> dict[str, list[int]]:
    """Return the operation counts of the stages, from `count_work`."""
    return count_work(_loaded, STAGES)


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_stage_that_fails_for_one_leaves_the_others_what_they_have_alone(
    model: DuplexModel, alone: Results, work: dict[str, list[int]], stage: str
) -> None:
    # In the slot that fails, the first call succeeds, the second fails late, and later calls fail
    # immediately.
    undisturbed, disturbed = work[stage][:2]
    numbers = [undisturbed + 1, 0.9 * disturbed, 0]
    with broken(model, STAGES[stage], numbers, RuntimeError("the device says no")) as raised:
        results = play(model, SLOTS)
    assert raised
    assert isinstance(results[GUILTY][-1], UnitFailure)
    for slot in (0, 2):
        assert_same(results[slot], alone[slot])


@pytest.mark.parametrize("stage", ["audio", "prefill", "decode", "talker", "flow", "HiFT"])
def test_memory_that_is_too_short_for_all_at_once_is_enough_for_each_alone(
    model: DuplexModel, alone: Results, stage: str
) -> None:
    owner, name, _ = STAGES[stage](model)

    def is_crowded(items: Sequence[Any], *_: Any) -> bool:
        if stage not in ("prefill", "decode"):
            return len(items) > 1
        return len(items) > 1 and (rows_of(items) == {1}) == (stage == "decode")

    def place(_: DuplexModel) -> tuple[object, str, Callable[..., bool]]:
        return owner, name, is_crowded

    numbers = [0.5 * count for count in count_work(model, {stage: place})[stage]]
    with broken(model, place, numbers, torch.OutOfMemoryError("CUDA out of memory")) as raised:
        results = play(model, SLOTS)
    assert len(raised) == len(numbers)
    for slot in SLOTS:
        assert_same(results[slot], alone[slot])


def ask(model: DuplexModel) -> None:
    model.open_chat(GUILTY, model.preparer.chat(ChatRequest((ChatMessage(USER, ("Hi",)),))))


@pytest.mark.parametrize("work", ["units", "chat", "close"])
def test_an_error_of_the_device_is_not_repeated_and_loses_the_device(
    model: DuplexModel, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def fail(*arguments: object) -> None:
        calls.append(arguments)
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    for slot in SLOTS:
        model.close(slot)
    worker = WorkerModel(model)
    if work == "units":
        for slot in SLOTS:
            model.open(slot, OPTIONS)
        monkeypatch.setattr(model.llm, "feed", fail)
        begun = list(worker.advance([RunUnit(Unit(slot, TALK[:UNIT])) for slot in SLOTS]))
        assert begun == [Unfinished(slot, Part.HEAR) for slot in SLOTS]
        heard = list(worker.advance([Continue(slot, Part.HEAR, 1) for slot in SLOTS]))
        items: list[Item] = [Continue(each.slot, Part.FEED, 512) for each in heard]
    else:
        monkeypatch.setattr(model.chats._sampling, "choose", fail)
        ask(model)
        items = [Continue(GUILTY, Part.FEED, 512)]
    if work == "close":
        monkeypatch.setattr(model.parts.llm.cache, "reset", fail)
    with pytest.raises(DeviceLostError, match="AcceleratorError: CUDA error: an illegal"):
        worker.close(GUILTY) if work == "close" else list(worker.advance(items))
    assert len(calls) == 1
    monkeypatch.undo()
    for slot in SLOTS:
        model.close(slot)
