"""Runs launches: one block of the model, for the units, chats or prompts of some slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from duplane.worker.models.interface import Continue, Part, Result, Unfinished
from duplane.worker.models.minicpm_o.chat.chats import Chats
from duplane.worker.models.minicpm_o.chat.state import Chat
from duplane.worker.models.minicpm_o.duplex.conversation import (
    Conversation,
    Opening,
    RunningUnit,
    Status,
)
from duplane.worker.models.minicpm_o.duplex.pipeline import Pipeline
from duplane.worker.models.minicpm_o.duplex.speech import Speaker, SpeechStage
from duplane.worker.models.minicpm_o.llm.language_model import LanguageModel
from duplane.worker.models.minicpm_o.llm.passes import feed
from duplane.worker.models.minicpm_o.probe import Probe
from duplane.worker.models.minicpm_o.stopwatch import Laps, Stopwatch
from duplane.worker.models.types import Opened

_PASS = (Part.FEED, Part.DECODE)


class Work(Speaker, Protocol):
    """A unit or a chat in progress."""

    laps: Laps


T = TypeVar("T", bound=Work)
T_contra = TypeVar("T_contra", bound=Work, contravariant=True)


class Parts(Protocol[T_contra]):
    """The parts of units, or of chats."""

    def hear(self, works: Sequence[T_contra], watch: Stopwatch, /) -> None: ...
    def see(self, works: Sequence[T_contra], watch: Stopwatch, /) -> None: ...
    def talk(self, works: Sequence[T_contra], watch: Stopwatch, /) -> None: ...
    def results(self, works: Sequence[T_contra], /) -> Iterator[Result]: ...


class Launches:
    """The launches of one model. `conversations` has the conversations by slot."""

    def __init__(
        self,
        llm: LanguageModel,
        pipeline: Pipeline,
        chats: Chats,
        speech: SpeechStage | None,
        probe: Probe | None,
    ) -> None:
        self._llm, self._pipeline, self._chats, self._speech = llm, pipeline, chats, speech
        self._device, self._probe = llm.model.norm.weight.device, probe
        self.conversations: dict[int, Conversation] = {}

    def part_of(self, slot: int) -> Part | None:
        """Return the part that does the slot's next work, if there is any.

        Raises ValueError for an empty slot.
        """
        conversation = self.conversations.get(slot)
        if conversation is None:
            chat = self._chats.chat(slot)
            return chat.part if chat.failure is None else None
        return None if conversation.status is Status.LOST else conversation.part

    def run(self, items: Sequence[Continue]) -> Iterator[Result]:
        """Do the work of items of one block; see `interface.Model.advance`."""
        items = sorted(items, key=lambda item: item.slot)
        self._check(items)
        part = items[0].part
        if part in (Part.SETTLE, Part.VOICE):
            step = self._pipeline.settle if part is Part.SETTLE else self._pipeline.start_turn
            for item in items:
                yield from step(self.conversations[item.slot])
            return
        found = [self._begun(item) for item in items]
        units = [work for work in found if isinstance(work, RunningUnit)]
        chats = [work for work in found if isinstance(work, Chat)]
        if part in _PASS:
            openings = [work for work in found if isinstance(work, Opening)]
            yield from self._pass(units, chats, openings)
        else:
            yield from self._run(self._pipeline, units, part)
            yield from self._run(self._chats, chats, part)

    def _check(self, items: Sequence[Continue]) -> None:
        """Raise ValueError if the items may not be done now, or not in one launch."""
        if len({item.slot for item in items}) < len(items):
            raise ValueError("a slot is named twice")
        for item in items:
            if self.part_of(item.slot) is not item.part:
                raise ValueError(f"slot {item.slot} has no work for {item.part.value}")
        if len({Part.FEED if item.part in _PASS else item.part for item in items}) > 1:
            raise ValueError("the items are for several blocks")

    def _begun(self, item: Continue) -> RunningUnit | Opening | Chat | None:
        """Return the unit, prompt or chat of an item, after it was granted the item's rows."""
        conversation = self.conversations.get(item.slot)
        if conversation is None:
            work = self._chats.chat(item.slot)
        else:
            work = conversation.opening or conversation.running
        if work is not None:
            work.granted = item.rows
        return work

    def _run(self, parts: Parts[T], works: Sequence[T], part: Part) -> Iterator[Result]:
        """HEAR, SEE, TALK or VOCODE, which the vocoder may do in several calls."""
        most = max(len(works), 1)
        if part is Part.VOCODE and self._speech is not None:
            most = self._speech.most_rows
        for start in range(0, len(works), most):
            some = works[start : start + most]
            watch = Stopwatch(self._device)
            for work in some:
                work.laps.add(watch)
            match part:
                case Part.HEAR:
                    parts.hear(some, watch)
                case Part.SEE:
                    parts.see(some, watch)
                case Part.TALK:
                    parts.talk(some, watch)
                case _:
                    if self._speech is not None:
                        self._speech.decode(some, watch)
            yield from parts.results(some)

    def _pass(
        self, units: Sequence[RunningUnit], chats: Sequence[Chat], openings: Sequence[Opening]
    ) -> Iterator[Result]:
        """PASS: feed rows of all in one pass, then choose the ids of units, and those of chats."""
        watch = Stopwatch(self._device)
        self._pipeline.prepare_rows(units)
        self._chats.prepare_rows(chats)
        for work in (*units, *chats):
            work.laps.add(watch, "decode" if work.pass_rows is None else "")
        sources = sorted((*units, *chats, *openings), key=lambda source: source.slot)
        fed = feed(self._llm, sources)
        watch.lap("prefill")
        if fed is not None and units:
            self._pipeline.take_rows(units, fed)
            watch.lap("decode")
        yield from self._pipeline.results(units)
        for opening in openings:
            yield from self._opened(opening)
        if fed is not None and chats:
            self._chats.take_rows(chats, fed)
            watch.lap("decode")
        yield from self._chats.results(chats)

    def _opened(self, opening: Opening) -> Iterator[Result]:
        """Yield what a prompt has come to after a pass."""
        conversation = self.conversations[opening.slot]
        if opening.failure is not None:
            conversation.status = Status.LOST
            yield opening.failure
            return
        opening.rows = opening.rows[opening.granted :]
        if len(opening.rows):
            yield Unfinished(opening.slot, Part.FEED, len(opening.rows))
            return
        conversation.opening, conversation.status = None, Status.READY
        if self._probe is not None:
            self._probe.prepared(opening.slot, opening.voice)
        length = self._llm.cache.length(opening.slot)
        yield Opened(opening.slot, length, opening.ignored, conversation.window.is_on)
        if part := conversation.part:
            yield Unfinished(opening.slot, part)
