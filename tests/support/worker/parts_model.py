"""A model of which each part is a launch of its own, as on a GPU, and which records its launches.

It checks the order and the company of its calls. It adds each violation to `violations`. A worker
runs it with `--family support.worker.parts_model`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
from support.time_limits import WITHIN_S

from duplane.worker.engine.schedule import Block, Kind, Work
from duplane.worker.models.chat import ChatOutput, Finish
from duplane.worker.models.interface import (
    Continue,
    Device,
    DeviceDescription,
    Item,
    Model,
    Open,
    Part,
    Preparer,
    Ready,
    Rebuild,
    Result,
    RunUnit,
    StartChat,
    Unfinished,
)
from duplane.worker.models.scripted.model import ScriptedChat, ScriptedModel, answer_loud
from duplane.worker.models.types import Opened, PastUnit, Rebuilt, Unit, UnitFailure
from duplane.worker.settings import WorkerSettings

PROMPT_ROWS, SHARE_UNITS = 700, 2
SPOKEN_IDS, CHUNKS = 3, 2
SPEECH_BLOCKS = (Block.TALK, Block.VOCODE, Block.VOICE)
_Step = tuple[Part, int] | Result


def open_device(settings: WorkerSettings) -> Device:
    """Return the device; the entry point of the family."""
    model = PartsModel(settings.given_slot_count)
    if settings.lanes == 2:
        model.constants = replace(model.constants, lane_count=2)
    return model


class PartsModel(ScriptedModel):
    """Implements `Model`, `Preparer` and `Device`.

    A unit is heard and fed. Its frames are seen. If it is loud it is spoken, too, and then the
    next unit needs a voice. `on_launch` is called in each launch with its block and its slots, on
    the thread of the launch; it may wait or raise. `fails` has for a slot and a part whether the
    failure of this part is fatal. `launches` has the block and the slots of each launch, `fed` the
    rows of each item of a pass, `done` the parts of each slot.
    """

    def __init__(self, slot_count: int = 4) -> None:
        super().__init__(slot_count)
        self.on_launch: Callable[[Block, tuple[int, ...]], None] = lambda block, slots: None
        self.fails: dict[tuple[int, Part], bool] = {}
        self.launches: list[tuple[Block, tuple[int, ...]]] = []
        self.fed: list[dict[int, int]] = []
        self.done: dict[int, list[Part]] = {}
        self.violations: list[str] = []
        self.error: Exception | None = None
        self._steps: dict[int, deque[_Step]] = {}
        self._inside: dict[Block, tuple[int, ...]] = {}
        self._lanes: dict[bool, str] = {}  # the thread of blocks of speech, and of the others
        self._is_warm = False
        self._lock = threading.Lock()

    # The device.

    def load(self) -> tuple[Preparer, Model]:
        return self, self

    def load_preparer(self) -> Preparer:
        return self

    def description(self) -> DeviceDescription:
        return DeviceDescription("parts")

    def memory_used_bytes(self) -> int:
        if not self._is_warm:
            self.launches.clear()
            self.fed.clear()
            self.done.clear()
            self._is_warm = True  # the worker calls this after its warm-up
        return 0

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def lane(self, name: str) -> AbstractContextManager[None]:
        return self._entered(name)

    @contextmanager
    def _entered(self, name: str) -> Generator[None]:
        thread = threading.current_thread().name
        is_speech = name == "speech"
        self._check(self._lanes.setdefault(is_speech, thread) == thread, f"{name} in {thread}")
        yield

    # The model.

    def advance(self, items: Sequence[Item]) -> Iterator[Result]:
        blocks = {Work(item, Kind.UNIT, 0.0).block for item in items}
        (block,) = blocks
        slots = tuple(item.slot for item in items)
        with self._alone_if_shared(block, slots):
            self.launches.append((block, slots))
            if block is Block.PASS:
                self.fed.append({item.slot: item.rows for item in items})
            if self._is_warm:
                self.on_launch(block, slots)
            for item in items:
                yield from self._do(item)

    def _do(self, item: Item) -> Iterator[Result]:
        slot = item.slot
        match item:
            case Open():
                self._lengths[slot] = PROMPT_ROWS
                opened = Opened(slot, PROMPT_ROWS, ())
                self._steps[slot] = deque([(Part.FEED, PROMPT_ROWS), opened])
            case StartChat():
                self._lengths[slot] = 0
                self._steps[slot] = self._chat(slot, cast("ScriptedChat", item.chat))
            case RunUnit(unit):
                self._steps[slot] = self._unit(unit)
            case Rebuild(_, units):
                taken = units[:SHARE_UNITS]
                self._lengths[slot] += len(taken)
                is_complete = len(taken) == len(units)
                self._steps[slot] = deque([Rebuilt(slot, len(taken), 1, is_complete)])
            case Continue():
                if (slot, item.part) in self.fails:
                    self._steps[slot].clear()
                    is_fatal = self.fails.pop((slot, item.part))
                    yield UnitFailure(slot, "STAGE_FAILED", "as the test wants", is_fatal)
                    return
                self._continue(item)
        steps = self._steps[slot]
        while steps and not isinstance(steps[0], tuple):
            yield cast("Result", steps.popleft())
        if steps:
            part, rows = cast("tuple[Part, int]", steps[0])
            yield Unfinished(slot, part, rows)

    def _continue(self, item: Continue) -> None:
        """Do as many rows of a step as the item has; one chunk of VOCODE."""
        steps = self._steps[item.slot]
        part, rows = cast("tuple[Part, int]", steps.popleft())
        self._check(part is item.part, f"slot {item.slot}: {item.part} instead of {part}")
        self._check(1 <= item.rows <= rows, f"slot {item.slot}: {item.rows} of {rows} rows")
        self.done.setdefault(item.slot, []).append(part)
        left = rows - (1 if part is Part.VOCODE else item.rows)
        if left:
            steps.appendleft((part, left))

    def _unit(self, unit: Unit) -> deque[_Step]:
        self._lengths[unit.slot] += 1
        output = answer_loud(unit, self._lengths[unit.slot], "yes")
        steps: list[_Step] = [(Part.HEAR, 1)]
        if unit.frames:
            steps.append((Part.SEE, len(unit.frames)))
        steps.append((Part.FEED, unit.rows))
        if not output.is_listen:
            steps += [(Part.DECODE, 1)] * SPOKEN_IDS
            steps += [(Part.TALK, 1), (Part.VOCODE, CHUNKS)]
        steps += [output, (Part.SETTLE, 1)]
        if not output.is_listen:
            steps.append((Part.VOICE, 1))
        return deque([*steps, Ready(unit.slot)])

    def _chat(self, slot: int, chat: ScriptedChat) -> deque[_Step]:
        """Return the steps of an answer with one piece for each word of the request."""
        text = chat.request.messages[0].parts[-1]
        steps: list[_Step] = [(Part.HEAR, 1), (Part.FEED, chat.prompt_rows), ChatOutput(slot, 1)]
        words = cast("str", text).split()
        for number, word in enumerate(words, 1):
            finish = Finish.STOP if number == len(words) else None
            steps += [(Part.DECODE, 1), (Part.TALK, 1), (Part.VOCODE, 1)]
            steps.append(ChatOutput(slot, number, text=f"{word} ", finish=finish))
        return deque(steps)

    def close(self, slot: int) -> None:
        with self._alone_if_shared(Block.OPEN, (slot,)):
            super().close(slot)
            self._steps.pop(slot, None)

    # Checks.

    @contextmanager
    def _alone_if_shared(self, block: Block, slots: tuple[int, ...]) -> Generator[None]:
        """Note a call, and check that no other call may not run beside it."""
        with self._lock:
            for other, others in self._inside.items():
                is_apart = (other in SPEECH_BLOCKS) != (block in SPEECH_BLOCKS)
                self._check(is_apart, f"{block} beside {other}")
                self._check(not (block.is_shared or other.is_shared), f"{block} beside {other}")
                self._check(set(slots).isdisjoint(others), f"{slots} in {block} and {other}")
            self._inside[block] = slots
        try:
            yield
        finally:
            with self._lock:
                del self._inside[block]

    def _check(self, is_allowed: bool, violation: str) -> None:
        if not is_allowed:
            self.violations.append(violation)


class Gate:
    """Holds the launches of one block until `open` is called. Assign it to `on_launch`."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._entered, self._opened = threading.Event(), threading.Event()

    def __call__(self, block: Block, slots: tuple[int, ...]) -> None:
        if block is self._block:
            self._entered.set()
            assert self._opened.wait(WITHIN_S)

    def entered(self) -> None:
        """Wait, in a thread of the test, until a launch of the block has begun."""
        assert self._entered.wait(WITHIN_S)

    def open(self) -> None:
        self._opened.set()


def past(number: int) -> PastUnit:
    """Return a past unit that can be rebuilt."""
    return PastUnit(Unit(0, np.zeros(16, np.float32), sequence=number), (1,), b"", number)
