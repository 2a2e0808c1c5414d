"""The way of a unit through the model: taken in, encoded, fed, answered, spoken, settled.

Runs one unit of each of several conversations together. Decides the order of the stages; who has
a conversation is `model`'s matter, what a stage does its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from duplane.worker.model.conversation import Conversation
from duplane.worker.model.duplex import UnitRules
from duplane.worker.model.generation import RunningUnit, TextGeneration
from duplane.worker.model.intake import Intake, UnitContent, refused
from duplane.worker.model.parts import CLOSING_ROWS, ModelParts, generated_rows
from duplane.worker.model.probe import Probe
from duplane.worker.model.sampling import TextSampling
from duplane.worker.model.speaking import Speaking
from duplane.worker.model.stopwatch import Stopwatch
from duplane.worker.model.types import FloatArray, UnitFailure, UnitInput, UnitOutput

_NO_AUDIO = np.zeros(0, np.float32)


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
            taken = self._take(unit, conversation)
            if isinstance(taken, UnitFailure):
                yield taken
            else:
                running.append(taken)
        if not running:
            return
        logits = self._prefill(running, watch)
        self._interrupt([unit for unit in running if unit.is_interrupting])
        speaking: list[RunningUnit] = []
        for unit in self._text.run(running, logits):
            if unit.is_broken:
                yield UnitFailure(unit.slot, "NOT_FINITE", "the logits are not finite", True)
            elif unit.rules.is_listen or unit.conversation.speech is None:
                yield self._output(unit, {**watch.laps, "decode": watch.read()})
            else:
                speaking.append(unit)
        watch.lap("decode")
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

    def _prefill(self, running: Sequence[RunningUnit], watch: Stopwatch) -> Tensor:
        """Encode and feed what the units bring; the logits [units, ids]."""
        contents = [unit.content for unit in running]
        seen = self.intake.see(contents)
        if any(seen):
            watch.lap("vision")
        hearing = [unit.slot for unit in running if unit.content.has_audio]
        heard = list(self._parts.audio.encode(hearing).unbind()) if hearing else []
        watch.lap("audio")
        embeds = self.intake.lay_out(contents, seen, heard)
        slots = [unit.slot for unit in running]
        logits = self._llm.feed_units(slots, embeds)
        watch.lap("prefill")
        if self._probe is not None:
            self._show(self._probe, slots, seen, logits)
            for slot, rows in zip(hearing, heard, strict=True):
                self._probe.heard(slot, rows)
        return logits

    def _show(
        self, probe: Probe, slots: Sequence[int], seen: Sequence[list[Tensor]], logits: Tensor
    ) -> None:
        for slot, images, row in zip(slots, seen, logits.unbind(), strict=True):
            if images:
                probe.saw(slot, torch.cat(images))
            probe.prefilled(slot, row, self._llm.cache.length(slot))

    def _interrupt(self, units: Sequence[RunningUnit]) -> None:
        """Close the turns that a forced listen cuts off, and what they were saying."""
        self._text.interrupt(units)
        for unit in units:
            if self._speaking is not None and unit.conversation.speech is not None:
                self._speaking.end_turn(unit)

    def _speak(self, units: Sequence[RunningUnit], watch: Stopwatch) -> Iterator[UnitOutput]:
        """The outputs of the units that are heard."""
        if not units or self._speaking is None:
            return
        tokens = self._speaking.tokens(units)
        watch.lap("talker")
        samples = self._speaking.samples(units, tokens)
        watch.lap("vocoder")
        for unit, spoken, audio in zip(units, tokens, samples, strict=True):
            yield self._output(unit, watch.laps, audio, len(spoken))

    def _output(
        self,
        unit: RunningUnit,
        laps: dict[str, float],
        audio: FloatArray = _NO_AUDIO,
        audio_token_count: int = 0,
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
            audio_token_count=audio_token_count,
            input_audio_count=self._parts.audio.unit_rows if unit.content.has_audio else 0,
            input_video_count=unit.content.piece_count * self.intake.frame_rows,
            input_mark_count=1 + 2 * unit.content.piece_count,
            stage_s={**laps, "settle": unit.conversation.settle_s},
        )

    def settle(self, held: Sequence[tuple[int, Conversation]]) -> None:
        """Complete the units of these slots, ascending, in the context."""
        watch = Stopwatch(self._device)
        pending = [
            (slot, conversation, conversation.unsettled)
            for slot, conversation in held
            if conversation.unsettled is not None and conversation.unsettled.is_over
        ]
        if not pending:
            return
        ids = [token for _, _, rules in pending for token in rules.closing()]
        self._llm.append([(slot, CLOSING_ROWS) for slot, _, _ in pending], self._llm.embed(ids))
        for slot, conversation, _ in pending:
            conversation.settle(self._llm.cache.length(slot))
            if slide := conversation.window.slide():
                self._llm.splice(slot, slide)
            if self._probe is not None:
                self._probe.settled(slot, self._llm.cache.length(slot))
        seconds = watch.lap("settle")
        for _, conversation, _ in pending:
            conversation.settle_s = seconds
