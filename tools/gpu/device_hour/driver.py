"""Runs conversations through the seam between the worker and a model, as the device thread does."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image

from duplane.worker.engine.drive import drive
from duplane.worker.engine.schedule import Limits
from duplane.worker.models.chat import ChatOutput, ChatRequest
from duplane.worker.models.interface import (
    Item,
    Model,
    Open,
    PreparedConversation,
    Preparer,
    Result,
    RunUnit,
    StartChat,
)
from duplane.worker.models.types import (
    ConversationOptions,
    Opened,
    SpeechRequest,
    Unit,
    UnitFailure,
    UnitOutput,
)

UNIT_TOKENS = 8
"""The most ids of a unit. Seven of them are text, which is about a second of speech."""
OPTIONS = ConversationOptions(force_listen_count=0, max_new_speak_tokens_per_chunk=UNIT_TOKENS)
FRAME_SIDE = 448
_LIMITS = Limits(pieces=Limits.many_pieces)
"""Pictures of ordinary units are seen together, so that launches of all sizes are measured."""
_WORD = "yes"
_COUNTED_WORDS = 20


@dataclass
class Batch:
    """Units that ran together: the outputs in their order, and the seconds until each came."""

    outputs: list[UnitOutput] = field(default_factory=list[UnitOutput])
    seconds: list[float] = field(default_factory=list[float])
    whole_s: float = 0.0


class Driver:
    """Opens conversations, runs their units and closes them."""

    def __init__(self, preparer: Preparer, model: Model) -> None:
        self.preparer, self.model = preparer, model
        self._numbers = np.random.default_rng(0)
        self._picture = _picture()
        speech = (SpeechRequest(0, _words(_COUNTED_WORDS)),)
        (request,) = self.prepared(replace(self.noise(0), speech=speech)).speech
        self._ids_per_word = max(1.0, len(request.ids) / _COUNTED_WORDS)
        self._open: set[int] = set()

    def open(self, slot: int, options: ConversationOptions = OPTIONS, *, rows: int = 0) -> Opened:
        """Open a conversation with a prompt of about `rows` rows, if that is more than usual."""
        self._open.add(slot)
        item = Open(slot, self.conversation(options, rows))
        (opened,) = (one for one in self.run([item]) if isinstance(one, Opened))
        return opened

    def conversation(self, options: ConversationOptions, rows: int) -> PreparedConversation:
        """Prepare a conversation with a prompt of about `rows` rows, if that is more than usual."""
        usual = self.preparer.conversation(options)
        missing = rows - usual.rows
        if missing <= 0:
            return usual
        words = _words(round(missing / self._ids_per_word))
        prompt = f"{options.system_prompt} {words}"
        return self.preparer.conversation(replace(options, system_prompt=prompt))

    def speech(self, units: int) -> tuple[SpeechRequest, ...]:
        """Return the request to speak for about this number of units, and then to end the turn."""
        ids = units * (UNIT_TOKENS - 1) - 1  # the end of the turn is an id, too
        return (SpeechRequest(0, _words(max(1, int(ids / self._ids_per_word)))),)

    def run(self, items: Sequence[Item]) -> Iterator[Result]:
        """Advance items until nothing of them is left. Raises RuntimeError for a failure."""
        for result in drive(self.model, items, _LIMITS):
            if isinstance(result, UnitFailure):
                raise RuntimeError(f"slot {result.slot}: {result.reason}: {result.message}")
            yield result

    def units(self, units: Iterable[Unit]) -> Batch:
        """Prepare units and run them together. Raises RuntimeError if one fails."""
        items = [RunUnit(self.prepared(unit)) for unit in units]
        batch = Batch()
        begin = time.perf_counter()
        for result in self.run(items):
            if isinstance(result, UnitOutput):
                batch.outputs.append(result)
                batch.seconds.append(time.perf_counter() - begin)
        batch.whole_s = time.perf_counter() - begin
        return batch

    def prepared(self, unit: Unit) -> Unit:
        """Return a prepared unit. Raises RuntimeError if it is refused."""
        prepared = self.preparer.unit(unit)
        if isinstance(prepared, UnitFailure):
            raise RuntimeError(f"{prepared.reason}: {prepared.message}")
        return prepared

    def chat(self, slot: int, request: ChatRequest) -> list[ChatOutput]:
        """Answer a chat in a clean slot; return its steps."""
        self._open.add(slot)
        item = StartChat(slot, self.preparer.chat(request, lambda: None))
        return [one for one in self.run([item]) if isinstance(one, ChatOutput)]

    def listen(self, slots: Iterable[int]) -> Batch:
        """Run a unit of noise in each slot, in which the model must listen."""
        return self.units([self.noise(slot, force_listen=True) for slot in slots])

    def speak(self, slots: Iterable[int], units: int = 0) -> Batch:
        """Run a unit of noise in each slot. With `units`, a turn of this many units begins."""
        speech = self.speech(units) if units else ()
        return self.units([replace(self.noise(slot), speech=speech) for slot in slots])

    def see(self, slots: Iterable[int]) -> Batch:
        """Run a unit of noise with a picture in each slot, in which the model must listen."""
        units = [self.noise(slot, force_listen=True) for slot in slots]
        return self.units([replace(unit, frames=(self._picture,)) for unit in units])

    def noise(
        self, slot: int, numbers: np.random.Generator | None = None, *, force_listen: bool = False
    ) -> Unit:
        """Return a unit of noise, from `numbers` if given."""
        sample_count = round(self.model.constants.unit_s * self.model.constants.input_hertz)
        sound = (numbers or self._numbers).normal(0, 0.05, sample_count).astype(np.float32)
        return Unit(slot, sound, force_listen=force_listen)

    def close(self) -> list[int]:
        """Close all conversations. Return the slots that are not clean then."""
        slots, self._open = sorted(self._open), set()
        for slot in slots:
            self.model.close(slot)
        return [slot for slot in slots if not self.model.is_clean(slot)]


def _picture() -> bytes:
    """Return a JPEG file of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (FRAME_SIDE, FRAME_SIDE, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def counts(most: int) -> list[int]:
    """Return the numbers of conversations to measure: 1, 2, 4 and so on, and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def _words(count: int) -> str:
    return " ".join([_WORD] * count)
