"""The way of a unit through the model: taken in, encoded, fed, answered, spoken, settled.

Runs one unit of each of several conversations together. Decides the order of the stages and who
of them goes on where one fails, as `faults` has it; what a stage does is its own matter.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from duplane.worker.model.conversation import Conversation
from duplane.worker.model.duplex import UnitRules
from duplane.worker.model.faults import alive, alone, attempt, each
from duplane.worker.model.generation import TextGeneration, joined
from duplane.worker.model.intake import Intake, refused
from duplane.worker.model.parts import CLOSING_ROWS, ModelParts, generated_rows
from duplane.worker.model.probe import Probe
from duplane.worker.model.running_unit import RunningUnit, UnitContent
from duplane.worker.model.sampling import TextSampling
from duplane.worker.model.speaking import Speaking
from duplane.worker.model.speech_pcm import unit_speech
from duplane.worker.model.stopwatch import Stopwatch
from duplane.worker.model.types import FloatArray, UnitFailure, UnitInput, UnitOutput

_NO_AUDIO = np.zeros(0, np.float32)


@dataclass
class _Closing:
    """One unit that is being settled: the ids that end it."""

    slot: int
    conversation: Conversation
    ids: tuple[int, int]
    failure: UnitFailure | None = None


class Pipeline:
    """The stages of one model, in their order."""

    def __init__(
        self,
        parts: ModelParts,
        sampling: TextSampling,
        speaking: Speaking | None,
        probe: Probe | None = None,
    ) -> None:
        self._parts, self._llm, self._tokens = parts, parts.llm, parts.tokens
        self._device = parts.llm.model.norm.weight.device
        self._capacity = parts.llm.cache.capacity - parts.overhang
        self._text = TextGeneration(parts.llm, sampling, probe)
        self._speaking, self._probe = speaking, probe
        self.intake = Intake(parts)

    def run(
        self, units: Sequence[tuple[UnitInput, Conversation]]
    ) -> Iterator[UnitOutput | UnitFailure]:
        """Run units, slots ascending; one output or failure for each, as they are done."""
        watch = Stopwatch(self._device)
        running: list[RunningUnit] = []
        for unit, conversation in units:
            taken = alone("intake", unit.slot, partial(self._take, unit, conversation))
            if isinstance(taken, RunningUnit):
                running.append(taken)
                continue
            conversation.is_lost = taken.is_fatal
            yield taken
        running, logits = yield from self._prefill(running, watch)
        self._interrupt([unit for unit in running if unit.is_interrupting])
        speaking: list[RunningUnit] = []
        for unit in self._text.run(running, logits):
            if unit.failure is not None:
                yield self._failed(unit, unit.failure)
            elif unit.rules.is_listen or unit.conversation.speech is None:
                yield self._output(unit, {**watch.laps, "decode": watch.read()})
            else:
                speaking.append(unit)
        watch.lap("decode")
        if speaking and self._speaking is not None:
            yield from self._speak(sorted(speaking, key=lambda unit: unit.slot), watch)

    def _take(self, unit: UnitInput, conversation: Conversation) -> RunningUnit | UnitFailure:
        """Take a unit in, or say why it cannot be run.

        A refused unit leaves the conversation as it was, but for audio that is too short, and
        for room that was made for it by dropping what the window drops first.
        """
        prepared = self.intake.prepare(unit)
        if isinstance(prepared, UnitFailure):
            return prepared
        content = self.intake.content(prepared)
        failure = self._make_room(unit, conversation, content)
        if failure is None and content.has_audio:
            failure = self.intake.hear(unit)
        if failure is not None:
            return failure
        is_interrupting = unit.force_listen and conversation.turn.is_open
        rules = UnitRules.begin(self._tokens, conversation.turn, force_listen=unit.force_listen)
        conversation.unsettled = rules
        conversation.unit_start = self._llm.cache.length(unit.slot)
        return RunningUnit(unit.slot, conversation, rules, content, is_interrupting)

    def _make_room(
        self, unit: UnitInput, conversation: Conversation, content: UnitContent
    ) -> UnitFailure | None:
        """See that the unit fits, whatever it leads to; a window drops what it must for that."""
        generated = generated_rows(conversation.options.max_new_speak_tokens_per_chunk)
        rows = self.intake.rows(content) + generated + conversation.window.spare_rows
        limit = min(self._llm.cache.capacity - rows, self._capacity - 1)
        while self._llm.cache.length(unit.slot) > limit:
            slide = conversation.window.slide(limit)
            if slide is None:
                held = self._llm.cache.length(unit.slot)
                message = f"{held} rows of {self._capacity}, the unit takes up to {rows}"
                return refused(unit, "CONTEXT_FULL", message)
            self._llm.splice(unit.slot, slide)
        return None

    def _prefill(
        self, units: Sequence[RunningUnit], watch: Stopwatch
    ) -> Generator[UnitFailure, None, tuple[list[RunningUnit], Tensor]]:
        """Encode and feed what the units bring; those it went well for, their logits [units, ids].

        Yields the failures of the others.
        """
        seeing = [unit for unit in units if unit.content.images]
        for unit, seen in each(attempt("vision", seeing, self.intake.see)):
            unit.seen = seen
        if seeing:
            watch.lap("vision")
        hearing = [unit for unit in alive(units) if unit.content.has_audio]
        for unit, heard in each(attempt("audio", hearing, self.intake.listen)):
            unit.heard = heard
        watch.lap("audio")
        done = attempt("prefill", alive(units), self._feed, cache=self._llm.cache)
        watch.lap("prefill")
        for unit in units:
            if unit.failure is not None:
                yield self._failed(unit, unit.failure)
        fed, logits = alive(units), joined([logits for _, logits in done])
        if self._probe is not None:
            self._show(self._probe, fed, logits)
        return fed, logits

    def _feed(self, units: Sequence[RunningUnit]) -> Tensor:
        embeds = self.intake.lay_out(units)
        return self._llm.feed_units([unit.slot for unit in units], embeds)

    def _show(self, probe: Probe, units: Sequence[RunningUnit], logits: Tensor) -> None:
        for unit, row in zip(units, logits.unbind(), strict=True):
            if unit.seen:
                probe.saw(unit.slot, torch.cat(unit.seen))
            probe.prefilled(unit.slot, row, self._llm.cache.length(unit.slot))
            if unit.heard is not None:
                probe.heard(unit.slot, unit.heard)

    def _interrupt(self, units: Sequence[RunningUnit]) -> None:
        """Close the turns that a forced listen cuts off, and what they were saying."""
        self._text.interrupt(units)
        for unit in alive(units):
            if self._speaking is not None and unit.conversation.speech is not None:
                self._speaking.end_turn(unit)

    def _speak(
        self, units: Sequence[RunningUnit], watch: Stopwatch
    ) -> Iterator[UnitOutput | UnitFailure]:
        """The outputs of the units that are heard."""
        assert self._speaking, "a conversation has speech only where the model has"
        self._speaking.draw(units)
        watch.lap("talker")
        self._speaking.sound(alive(units))
        watch.lap("vocoder")
        for unit in units:
            if unit.failure is not None:
                yield self._failed(unit, unit.failure)
            else:
                audio = unit_speech(unit.pieces, end_of_turn=unit.rules.end_of_turn)
                yield self._output(unit, watch.laps, audio)

    def _failed(self, unit: RunningUnit, failure: UnitFailure) -> UnitFailure:
        unit.conversation.is_lost = True
        return failure

    def _output(
        self,
        unit: RunningUnit,
        laps: dict[str, float],
        audio: FloatArray = _NO_AUDIO,
    ) -> UnitOutput:
        rules = unit.rules
        return UnitOutput(
            slot=unit.slot,
            is_listen=rules.is_listen,
            text="" if rules.is_listen else self._tokens.decode(rules.said),
            audio=audio,
            end_of_turn=rules.end_of_turn and not rules.is_listen,
            context_length=self._llm.cache.length(unit.slot),
            token_ids=tuple(rules.added),
            text_token_count=len(rules.said),
            audio_token_count=len(unit.spoken),
            input_audio_count=self._parts.audio.unit_rows if unit.content.has_audio else 0,
            input_video_count=unit.content.piece_count * self.intake.frame_rows,
            input_mark_count=1 + 2 * unit.content.piece_count,
            stage_s={**laps, "settle": unit.conversation.settle_s},
        )

    def settle(self, held: Sequence[tuple[int, Conversation]]) -> list[UnitFailure]:
        """Complete the units of these slots, ascending, in the context; those it fails for."""
        watch = Stopwatch(self._device)
        closing = [
            _Closing(slot, conversation, conversation.unsettled.closing())
            for slot, conversation in held
            if not conversation.is_lost
            and conversation.unsettled is not None
            and conversation.unsettled.is_over
        ]
        if not closing:
            return []
        attempt("settle", closing, self._close, cache=self._llm.cache)
        for unit in alive(closing):
            unit.failure = alone("window", unit.slot, partial(self._slide, unit))
        seconds = watch.lap("settle")
        for unit in closing:
            unit.conversation.settle_s = seconds
            unit.conversation.is_lost = unit.failure is not None
        return [unit.failure for unit in closing if unit.failure is not None]

    def _close(self, units: Sequence[_Closing]) -> None:
        """Feed the ids that end the units."""
        ids = [token for unit in units for token in unit.ids]
        self._llm.append([(unit.slot, CLOSING_ROWS) for unit in units], self._llm.embed(ids))

    def _slide(self, unit: _Closing) -> None:
        """Register the unit, and drop what the window drops."""
        slot, conversation = unit.slot, unit.conversation
        conversation.settle(self._llm.cache.length(slot))
        if slide := conversation.window.slide():
            self._llm.splice(slot, slide)
        if self._probe is not None:
            self._probe.settled(slot, self._llm.cache.length(slot))
