"""A second family of models: units of 80 ms, 24 kHz in, 48 kHz out, and an echo of loud units.

It shares no code with the families of duplane: it uses only the neutral types of `worker.models`. A
worker runs it with `--family support.echo_family`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import assert_never, cast

import numpy as np
from PIL.Image import Image

from duplane.worker.models.chat import ChatRequest
from duplane.worker.models.interface import (
    Continue,
    Device,
    DeviceDescription,
    Item,
    Model,
    ModelConstants,
    Open,
    Part,
    Preparer,
    Rebuild,
    Result,
    RunUnit,
    StartChat,
    Unfinished,
)
from duplane.worker.models.types import (
    ConversationOptions,
    FloatArray,
    ImageError,
    Opened,
    OptionError,
    PastUnit,
    Rebuilt,
    Unit,
    UnitFailure,
    UnitOutput,
)
from duplane.worker.settings import WorkerSettings

UNIT_S, INPUT_HERTZ, OUTPUT_HERTZ = 0.08, 24_000, 48_000
UNIT_SAMPLES = round(UNIT_S * INPUT_HERTZ)
PROMPT_ROWS, UNIT_ROWS = 600, 2  # a prompt is longer than the rows of a launch
_FACTOR = OUTPUT_HERTZ // INPUT_HERTZ
_SHARE_UNITS = 16  # past units in one share of a rebuild
_LEAST_AMPLITUDE = 1e-3  # of a loud unit


def open_device(settings: WorkerSettings) -> Device:
    """Return the device; the entry point of the family."""
    return EchoDevice(settings.given_slot_count, settings.context_token_limit)


@dataclass(frozen=True)
class EchoConversation:
    """A prepared conversation. `key` depends on the system prompt."""

    key: int
    rows: int = PROMPT_ROWS


@dataclass
class _Heard:
    """A conversation: the rows of its context, and a checksum of all that it has heard.

    `prompt_rows` are the rows of the prompt that are still to be fed.
    """

    prompt_rows: int
    key: int
    rows: int = 0


class EchoPreparer:
    """Implements `Preparer`."""

    def conversation(self, options: ConversationOptions) -> EchoConversation:
        return EchoConversation(zlib.crc32(options.system_prompt.encode()))

    def unit(self, unit: Unit) -> Unit | UnitFailure:
        if unit.frames:
            return UnitFailure(unit.slot, "FRAMES_UNSUPPORTED", "an echo sees nothing", False)
        return replace(unit, rows=UNIT_ROWS)

    def unit_steps(self, unit: Unit) -> Generator[None, None, Unit | UnitFailure]:
        yield from ()
        return self.unit(unit)

    def picture(self, picture: Image, max_slices: int | None) -> EchoPicture:
        raise ImageError("an echo sees nothing")

    def chat(self, request: ChatRequest, check: Callable[[], None]) -> EchoChat:
        raise OptionError("messages", "cannot be answered by an echo")


@dataclass(frozen=True)
class EchoPicture:
    """Never made."""

    piece_count: int


@dataclass(frozen=True)
class EchoChat:
    """Never made."""

    prompt_rows: int
    image_rows: int
    audio_rows: int
    uses_tts_voice: bool


class EchoModel:
    """Implements `Model`. The text of an answer is a checksum of all units so far."""

    def __init__(self, slot_count: int, context_capacity: int) -> None:
        self.constants = ModelConstants(
            slot_count=slot_count,
            context_capacity=context_capacity,
            name="echo",
            digest="echo-1",
            parameter_count=0,
            memory_bytes=0,
            unit_s=UNIT_S,
            input_hertz=INPUT_HERTZ,
            output_hertz=OUTPUT_HERTZ,
            accepts_pictures=False,
            has_chat=False,
        )
        self._heard: dict[int, _Heard] = {}

    def advance(self, items: Sequence[Item]) -> Iterator[Result]:
        for item in items:
            match item:
                case Open():
                    conversation = cast("EchoConversation", item.conversation)
                    heard = _Heard(conversation.rows, conversation.key)
                    self._heard[item.slot] = heard
                    yield Unfinished(item.slot, Part.FEED, heard.prompt_rows)
                case Continue(part=Part.FEED):
                    yield _feed_prompt(item.slot, self._heard[item.slot], item.rows)
                case RunUnit(unit):
                    yield self._run(unit, self._heard[unit.slot])
                case Rebuild(slot, units):
                    yield self._rebuild(slot, units)
                case StartChat() | Continue():
                    raise ValueError(f"slot {item.slot}: an echo has no such work")
                case _:
                    assert_never(item)

    def _run(self, unit: Unit, heard: _Heard) -> UnitOutput | UnitFailure:
        if heard.rows + UNIT_ROWS > self.constants.context_capacity:
            return UnitFailure(unit.slot, "CONTEXT_FULL", "the context is full", False)
        key = zlib.crc32(unit.audio.tobytes(), heard.key)
        heard.rows, heard.key = heard.rows + UNIT_ROWS, key
        is_listen = unit.force_listen or not is_loud(unit.audio)
        return UnitOutput(
            slot=unit.slot,
            context_length=heard.rows,
            text="" if is_listen else f"{key:08x} ",
            audio=np.zeros(0, np.float32) if is_listen else np.repeat(unit.audio, _FACTOR),
            token_ids=(0,) if is_listen else (1,),
            is_listen=is_listen,
            end_of_turn=False,
            text_token_count=0 if is_listen else 1,
            input_audio_count=UNIT_ROWS,
            state=key.to_bytes(4, "big"),
        )

    def _rebuild(self, slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
        heard, taken = self._heard[slot], units[:_SHARE_UNITS]
        for past in taken:
            name = f"past unit {past.unit.sequence}"
            if len(past.state) != 4:
                message = f"{name} has no state of an echo"
                return UnitFailure(slot, "REBUILD_REFUSED", message, True, "rebuild_state")
            heard.rows += UNIT_ROWS
            if heard.rows != past.context_length:
                message = f"{name} ends at {heard.rows} rows, not {past.context_length}"
                return UnitFailure(slot, "REBUILD_DIFFERS", message, True)
            heard.key = int.from_bytes(past.state, "big")
        return Rebuilt(slot, len(taken), heard.rows, len(taken) == len(units))

    def close(self, slot: int) -> None:
        self._heard.pop(slot, None)

    def is_clean(self, slot: int) -> bool:
        return slot not in self._heard


def _feed_prompt(slot: int, heard: _Heard, rows: int) -> Opened | Unfinished:
    """Feed rows of a prompt. Raises ValueError if this is no row, or more than are left."""
    if not 1 <= rows <= heard.prompt_rows:
        raise ValueError(f"slot {slot}: cannot feed {rows} of {heard.prompt_rows} rows")
    heard.rows += rows
    heard.prompt_rows -= rows
    if heard.prompt_rows:
        return Unfinished(slot, Part.FEED, heard.prompt_rows)
    return Opened(slot, heard.rows, ("llm_voice", "tts_voice"))


def is_loud(audio: FloatArray) -> bool:
    """Return whether the model answers a unit with its echo."""
    return bool(np.abs(audio).max(initial=0.0) > _LEAST_AMPLITUDE)


class EchoDevice:
    """Implements `Device`."""

    def __init__(self, slot_count: int, context_capacity: int) -> None:
        self._model = EchoModel(slot_count, context_capacity)

    def description(self) -> DeviceDescription:
        return DeviceDescription("echo")

    def load(self) -> tuple[Preparer, Model]:
        return EchoPreparer(), self._model

    def load_preparer(self) -> Preparer:
        return EchoPreparer()

    def lane(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def memory_used_bytes(self) -> int:
        return 0

    def check(self) -> None: ...
