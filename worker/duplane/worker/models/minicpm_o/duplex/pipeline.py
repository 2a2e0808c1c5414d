"""Runs the parts of units: each method does one block's work for units of several conversations.

A unit is accepted, and then moves from part to part (`RunningUnit.part`): its sound and pictures
are encoded, its rows are fed, ids are chosen and fed one by one, and its text is spoken. After a
part, `results` yields what each unit has come to. If a stage raises an error, `batch_isolation`
ends only the conversations that cause it.

The parts of speech may run in another thread than the others, for other slots. So they change
nothing but the state of their slots, and of talker and vocoder. Source: class `DuplexCapability` of
`MiniCPMO45/modeling_minicpmo_unified.py` in OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from duplane.worker.models.interface import Ready, Result, Unfinished
from duplane.worker.models.minicpm_o.batch_isolation import run_stage
from duplane.worker.models.minicpm_o.duplex.conversation import Conversation, RunningUnit, Status
from duplane.worker.models.minicpm_o.duplex.inputs import UnitInputs, refusal
from duplane.worker.models.minicpm_o.duplex.sampling import Decision, DuplexSampling
from duplane.worker.models.minicpm_o.duplex.speech import SpeechStage
from duplane.worker.models.minicpm_o.duplex.unit_output import unit_output
from duplane.worker.models.minicpm_o.duplex.unit_state import UnitRecord, UnitState
from duplane.worker.models.minicpm_o.llm.kv_cache import Slide
from duplane.worker.models.minicpm_o.llm.passes import Fed
from duplane.worker.models.minicpm_o.loader import ModelParts
from duplane.worker.models.minicpm_o.probe import Probe
from duplane.worker.models.minicpm_o.stopwatch import Stopwatch
from duplane.worker.models.types import Unit, UnitFailure

Results = Iterator[Result]
CONTEXT_FULL = "CONTEXT_FULL"


class Pipeline:
    """The parts of the units of one model."""

    def __init__(
        self,
        parts: ModelParts,
        sampling: DuplexSampling,
        speech: SpeechStage | None,
        probe: Probe | None = None,
    ) -> None:
        self._llm, self._tokens = parts.llm, parts.tokens
        self._device = parts.llm.model.norm.weight.device
        self._capacity = parts.llm.cache.capacity - parts.overhang
        self._sampling, self._speech, self._probe = sampling, speech, probe
        self.inputs = UnitInputs(parts)

    def begin(self, unit: Unit, conversation: Conversation | None) -> RunningUnit:
        """Return the state in which to run a unit now.

        Raises ValueError and changes nothing if the unit may not run now.
        """
        if conversation is None:
            raise ValueError(f"slot {unit.slot} has no conversation")
        turn = conversation.turn
        if conversation.status is not Status.READY:
            raise ValueError(f"slot {unit.slot} is {conversation.status.value}")
        state = UnitState(self._tokens, turn, unit.force_listen or turn.must_listen)
        is_interrupting = unit.force_listen and turn.is_open
        return RunningUnit(
            unit.slot, unit, conversation, state, is_interrupting, is_amid_turn=turn.is_open
        )

    def accept(self, units: Sequence[RunningUnit]) -> Results:
        """Prepare the input of units, or refuse them."""
        for unit in units:
            run_stage("intake", [unit], self._accept)  # alone: it cannot be repeated
            if unit.failure is None:
                unit.conversation.running, unit.conversation.status = unit, Status.RUNNING
        return self.results(units)

    def _accept(self, units: Sequence[RunningUnit]) -> None:
        """Prepare the input of each unit, or refuse the unit by setting its failure.

        A refused unit leaves the conversation unchanged, with two exceptions: audio that is too
        short stays in the buffer, and the window may have dropped units to make room.
        """
        for unit in units:
            prepared = self.inputs.prepare(unit.unit) if unit.unit.frames else unit.unit
            if isinstance(prepared, UnitFailure):
                unit.failure = prepared
                continue
            unit.set_input(prepared, self.inputs.count_rows(prepared))
            unit.start = self._llm.cache.length(unit.slot) + len(unit.conversation.pending_ids)
            limit = self.row_limit(unit, self._llm.cache.room(unit.slot))
            if unit.start > limit:
                unit.failure = self._make_room(unit, limit)
            if unit.failure is None and unit.rows.audio:
                unit.failure = self._hear(unit)
            if unit.failure is None:
                unit.row_count = len(unit.conversation.pending_ids) + sum(unit.rows)
                unit.first_draw = unit.conversation.sampling.uniforms.used_count
                self._hold_rows(unit)
                self._take_requests(unit)

    def _hear(self, unit: RunningUnit) -> UnitFailure | None:
        """Consume the audio of a unit; return a failure if it is refused or too short."""
        conversation = unit.conversation
        conversation.hearing.push(len(unit.unit.audio))
        failure = self.inputs.buffer_audio(unit.unit)
        if failure is None:
            conversation.hearing.take(conversation.turn.unit_count)
        return failure

    def _take_requests(self, unit: RunningUnit) -> None:
        """Add the unit's requests to speak, and let the unit speak the oldest one if it is due.

        A request goes before `force_listen_count`, but not before a forced listen.
        """
        requested, turn = unit.conversation.requested, unit.conversation.turn
        if unit.unit.force_listen:
            unit.results += requested.end()
        before = len(requested.requests)
        unit.results += requested.add(self._tokens, turn, unit.unit.speech)
        unit.new_requests = len(requested.requests) - before
        if not unit.unit.force_listen:
            unit.request = requested.due(turn)
            unit.state.is_forced &= unit.request is None

    def row_limit(self, unit: RunningUnit, room: int) -> int:
        """Return the length of the longest context after which the unit and its output fit.

        `room` is the largest number of rows of the context.
        """
        return min(room - _most_rows(unit), self._capacity - 1)

    def _hold_rows(self, unit: RunningUnit) -> None:
        """Take the memory of an accepted unit. Note what a rebuild has to know of it."""
        conversation, cache = unit.conversation, self._llm.cache
        cache.hold(unit.slot, unit.start + _most_rows(unit))
        if conversation.slid_to < self.row_limit(unit, cache.capacity):
            unit.row_limit = conversation.slid_to
        conversation.slid_to = sys.maxsize

    def _make_room(self, unit: RunningUnit, limit: int) -> UnitFailure | None:
        """Let the window drop units until the context before `unit` has at most `limit` rows."""
        while unit.start > limit:
            slide = unit.conversation.window.slide(limit)
            if slide is None:
                message = f"{unit.start} rows of {self._capacity}, the unit needs at most {limit}"
                return refusal(unit.unit, CONTEXT_FULL, message)
            unit.conversation.slid_to = max(1, limit)
            self._feed_pending([unit.conversation])
            self._llm.splice(unit.slot, slide)
            unit.start = self._llm.cache.length(unit.slot)
        return None

    def hear(self, units: Sequence[RunningUnit], watch: Stopwatch) -> None:
        """HEAR: encode the sound of units."""
        run_stage("audio", units, self.inputs.encode_audio)
        watch.lap("audio")

    def see(self, units: Sequence[RunningUnit], watch: Stopwatch) -> None:
        """SEE: encode the next `granted` tiles of units."""
        run_stage("vision", units, self.inputs.encode_tiles)
        watch.lap("vision")

    def prepare_rows(self, units: Sequence[RunningUnit]) -> None:
        """Before a pass: embed the input of units of which no row was fed."""
        beginning = [unit for unit in units if unit.fed == 0]
        run_stage("prefill", beginning, self.inputs.embed_units)

    def take_rows(self, units: Sequence[RunningUnit], fed: Fed) -> None:
        """After a pass: let units whose input or latest id is in the context choose the next id."""
        choosing = [unit for unit in units if unit.failure is None and self._note(unit, fed)]
        drawn = [unit for unit in choosing if unit.state.needs_choice]
        run_stage("choice", drawn, partial(self._choose, fed))
        for unit in choosing:
            unit.next_id = None if unit.failure else unit.state.advance(unit.chosen_id)

    def _note(self, unit: RunningUnit, fed: Fed) -> bool:
        """Note the rows that were fed. Return whether the unit chooses an id now.

        A unit that interrupts a turn first feeds the id that ends this turn.
        """
        if unit.embeds is None:
            self._note_id(unit, fed)
            return True
        count = min(unit.granted, len(unit.embeds))
        unit.fed, unit.embeds = unit.fed + count, unit.embeds[count:]
        if unit.fed < unit.row_count:
            return False
        if self._probe is not None:
            self._show_input(self._probe, unit, fed)
        unit.embeds = unit.audio_embeds = None
        unit.seen.embeds.clear()
        if unit.is_interrupting:
            unit.next_id = unit.state.interrupt()
        return not unit.is_interrupting

    def _note_id(self, unit: RunningUnit, fed: Fed) -> None:
        """Note that `next_id` was fed. After the end of a turn, the speech of the turn ends."""
        hidden = fed.hidden_of(unit.slot)
        if len(unit.state.text_ids) > len(unit.hidden):
            unit.hidden.append(hidden)
        if self._probe is not None and unit.next_id is not None:
            self._probe.fed(unit.slot, unit.next_id, hidden)
        if unit.is_interrupting:
            unit.conversation.end_speech()

    def _show_input(self, probe: Probe, unit: RunningUnit, fed: Fed) -> None:
        if unit.seen.embeds:
            probe.frames_encoded(unit.slot, torch.stack(tuple(unit.seen.embeds)))
        (logits,) = fed.logits_of([unit.slot])
        probe.prefilled(unit.slot, logits, self._llm.cache.length(unit.slot))
        if unit.audio_embeds is not None:
            probe.audio_encoded(unit.slot, unit.audio_embeds)

    def _choose(self, fed: Fed, choosing: Sequence[RunningUnit]) -> None:
        """Choose the next id of units."""
        logits = fed.logits_of([unit.slot for unit in choosing])
        samplings = [unit.conversation.sampling for unit in choosing]
        begins_unit = [unit.state.is_begin for unit in choosing]
        required = [
            None
            if unit.request is None
            else unit.conversation.requested.required(self._tokens, unit.state)
            for unit in choosing
        ]
        choices = self._sampling.choose(samplings, logits, begins_unit, required)
        for row, (unit, (token, decision, probability)) in enumerate(
            zip(choosing, choices, strict=True)
        ):
            unit.chosen_id = token
            if unit.state.is_begin:
                unit.listen_probability = probability
            if decision is Decision.CHOICE:
                unit.chosen_ids.append(token)
            if decision is Decision.NOT_FINITE:
                message = "the logits are not finite"
                unit.failure = UnitFailure(unit.slot, "NOT_FINITE", message, is_fatal=True)
            if self._probe is not None:
                self._probe.chosen(unit.slot, logits[row], token)

    def talk(self, units: Sequence[RunningUnit], watch: Stopwatch) -> None:
        """TALK: draw the speech tokens of units."""
        if self._speech is not None:
            self._speech.talk(units, watch)

    def results(self, units: Sequence[RunningUnit]) -> Results:
        """Yield the next part of each unit, its output or its failure.

        The units of which the output was yielded are completed afterwards: the ends of their turns
        are noted, and the rows that the context window drops.
        """
        ended: list[RunningUnit] = []
        for unit in units:
            if unit.failure is not None:
                yield self._lost(unit)
            elif part := unit.part:
                yield Unfinished(unit.slot, part, unit.left)
            else:
                yield unit_output(unit, self._tokens, self._llm.cache.length(unit.slot))
                ended.append(unit)
        turns = [unit for unit in ended if unit.speaks and unit.state.end_of_turn]
        if self._speech is not None:
            run_stage("turn", turns, self._speech.end_turns)
        for unit in ended:
            if unit.failure is not None:
                yield self._lost(unit)
                continue
            self._complete(unit)
            if part := unit.conversation.part:
                yield Unfinished(unit.slot, part)

    def _lost(self, unit: RunningUnit) -> UnitFailure:
        """Return the failure of a unit. A fatal failure ends the conversation."""
        assert unit.failure is not None
        if unit.failure.is_fatal:
            unit.conversation.status = Status.LOST
        return unit.failure

    def _complete(self, unit: RunningUnit) -> None:
        """Add a unit to the units of the window, without a launch.

        The closing ids are fed with the next unit, which saves a pass over the weights. If the
        window drops units, SETTLE feeds the closing ids first, because they must be computed while
        these units are in the context.
        """
        state, conversation, window = unit.state, unit.conversation, unit.conversation.window
        rows = self._llm.cache.length(unit.slot) + len(state.closing_ids) - unit.start
        ids = tuple(state.text_ids)
        window.units.append(UnitRecord(conversation.number, rows, state.is_listen, ids))
        conversation.pending_ids, conversation.running = state.closing_ids, None
        conversation.settle_s = 0.0
        conversation.slide = window.slide() if window.is_on else None
        conversation.status = Status.READY if conversation.slide is None else Status.UNSETTLED
        self._show_settled(conversation)

    def _show_settled(self, conversation: Conversation) -> None:
        if self._probe is not None and conversation.slide is None:
            length = self._llm.cache.length(conversation.slot) + len(conversation.pending_ids)
            self._probe.settled(conversation.slot, length)

    def settle(self, conversation: Conversation) -> Results:
        """SETTLE: move the context window."""
        watch, slide, conversation.slide = Stopwatch(self._device), conversation.slide, None
        if slide is not None:
            self.apply(conversation, slide)
        watch.lap("settle")
        conversation.settle_s = watch.seconds()["settle"]
        conversation.status = Status.READY
        self._show_settled(conversation)
        return self._after(conversation)

    def start_turn(self, conversation: Conversation) -> Results:
        """VOICE: compute the prompt of the voice, and start the next turn."""
        if self._speech is not None:
            run_stage("turn", [conversation], self._speech.start_turns)
        return self._after(conversation)

    def _after(self, conversation: Conversation) -> Results:
        """Yield what a conversation without a unit has come to."""
        if conversation.failure is not None:
            conversation.status = Status.LOST
            yield conversation.failure
        elif part := conversation.part:
            yield Unfinished(conversation.slot, part)
        else:
            yield Ready(conversation.slot)

    def feed_closing_ids(self, conversation: Conversation) -> Results:
        """Feed the closing ids of the last unit now, and not with the next unit."""
        run_stage("settle", [conversation], self._feed_pending, cache=self._llm.cache)
        return self._after(conversation)

    def apply(self, conversation: Conversation, slide: Slide) -> None:
        """Feed the pending ids, then move rows of the context. May set the `failure`."""
        run_stage("settle", [conversation], self._feed_pending, cache=self._llm.cache)
        run_stage("window", [conversation], partial(self._splice, slide))

    def _splice(self, slide: Slide, conversations: Sequence[Conversation]) -> None:
        for conversation in conversations:
            self._llm.splice(conversation.slot, slide)

    def _feed_pending(self, conversations: Sequence[Conversation]) -> None:
        pending = [conversation for conversation in conversations if conversation.pending_ids]
        if not pending:
            return
        ids = [token for conversation in pending for token in conversation.pending_ids]
        counts = [(each.slot, len(each.pending_ids)) for each in pending]
        self._llm.append(counts, self._llm.embed(ids))
        for conversation in pending:
            conversation.pending_ids = ()


def _most_rows(unit: RunningUnit) -> int:
    """Return the largest number of rows that the unit adds to the context before the next unit."""
    conversation = unit.conversation
    return sum(unit.rows) + conversation.generated_rows + conversation.window.spare_rows
