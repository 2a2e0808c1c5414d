"""Runs the stages of units in their order: accept, encode, prefill, generate text, speak.

Units of several conversations, one of each, run together. If a stage raises an error,
`batch_isolation` ends only the conversations that cause it. Later, `DuplexModel.settle` completes
the units with `Pipeline.apply`. Source: class `DuplexCapability` of
`MiniCPMO45/modeling_minicpmo_unified.py` in OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.batch_isolation import run_stage
from duplane.worker.models.minicpm_o.duplex import rebuild_state
from duplane.worker.models.minicpm_o.duplex.conversation import Conversation, RunningUnit, Status
from duplane.worker.models.minicpm_o.duplex.inputs import UnitInputs, refusal
from duplane.worker.models.minicpm_o.duplex.sampling import Decision, DuplexSampling
from duplane.worker.models.minicpm_o.duplex.speech import SpeechStage, unit_audio
from duplane.worker.models.minicpm_o.duplex.unit_state import UnitState
from duplane.worker.models.minicpm_o.llm.kv_cache import Slide
from duplane.worker.models.minicpm_o.loader import ModelParts
from duplane.worker.models.minicpm_o.probe import Probe
from duplane.worker.models.minicpm_o.stopwatch import Stopwatch
from duplane.worker.models.minicpm_o.transfer import upload
from duplane.worker.models.minicpm_o.types import PreparedImage
from duplane.worker.models.types import (
    SpeechOutcome,
    StateChange,
    Unit,
    UnitFailure,
    UnitOutput,
    UnitReach,
)

PrefilledBatch = tuple[Sequence[RunningUnit], Tensor]
"""Units that were fed together, and the logits [units, ids] of their last rows."""


class Pipeline:
    """The stages of one model."""

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

    def run(self, units: Sequence[RunningUnit]) -> Iterator[UnitOutput | UnitFailure]:
        """Run units with ascending slots. Yield the output or failure of each when it is done."""
        watch = Stopwatch(self._device)
        accepted: list[RunningUnit] = []
        for unit in units:
            run_stage("intake", [unit], self._accept)  # alone: it cannot be repeated
            conversation = unit.conversation
            conversation.ahead = None
            if unit.failure is None:
                conversation.unsettled, conversation.status = unit, Status.UNSETTLED
                accepted.append(unit)
            else:
                yield self._result(unit, {})
        if with_frames := [unit for unit in accepted if unit.images]:
            run_stage("vision", with_frames, self.inputs.encode_frames)
            watch.lap("vision")
        with_audio = [unit for unit in accepted if unit.rows.audio]
        run_stage("audio", with_audio, self.inputs.encode_audio)
        watch.lap("audio")
        batches = run_stage("prefill", accepted, self.inputs.feed, cache=self._llm.cache)
        watch.lap("prefill")
        if self._probe is not None:
            self._show_input(self._probe, batches)
        yield from (self._result(unit, {}) for unit in accepted if unit.failure)
        if interrupting := [unit for unit in accepted if unit.is_interrupting]:
            self._interrupt(interrupting)
        speaking: list[RunningUnit] = []
        for unit in self._generate(batches):
            if unit.failure or unit.state.is_listen or unit.conversation.speech is None:
                yield self._result(unit, watch.seconds("decode"))
            else:
                speaking.append(unit)
        watch.lap("decode")
        if self._speech is not None and speaking:
            speaking.sort(key=lambda unit: unit.slot)
            for unit in self._speech.run(speaking, watch):
                yield self._result(unit, watch.seconds())

    def feed_ahead(self, unit: RunningUnit, row_count: int) -> int | UnitFailure:
        """Encode and feed the first images of a unit; see `DuplexModel.feed_ahead`."""
        run_stage("intake", [unit], self._accept)
        conversation = unit.conversation
        conversation.ahead, conversation.status = unit, Status.BEGUN
        if unit.failure is None and (count := self.inputs.images_ahead(unit, row_count)):
            encode = partial(self.inputs.encode_frames, most=count)
            run_stage("vision", [unit], encode)
            run_stage("prefill", [unit], self.inputs.feed_images, cache=self._llm.cache)
        if unit.failure is not None:
            conversation.ahead = None
            conversation.status = Status.LOST if unit.failure.is_fatal else Status.READY
            return unit.failure
        fed = sum(map(self.inputs.count_image_rows, unit.images[: unit.fed_images]))
        left = sum(unit.rows) - fed - (unit.fed_images > 0)  # `<unit>` is fed, too
        return left if unit.fed_images + 1 < len(unit.images) else min(left, row_count)

    def _accept(self, units: Sequence[RunningUnit]) -> None:
        """Prepare the input of each unit, or refuse the unit by setting its failure.

        A refused unit leaves the conversation unchanged, with two exceptions: audio that is too
        short stays in the buffer, and the window may have dropped units to make room.
        """
        for unit in units:
            if unit is unit.conversation.ahead:
                continue  # `feed_ahead` has prepared it
            prepared = self.inputs.prepare(unit.unit) if unit.unit.frames else unit.unit
            if isinstance(prepared, UnitFailure):
                unit.failure = prepared
                continue
            unit.unit, unit.rows = prepared, self.inputs.count_rows(prepared)
            unit.images = [image for image in prepared.frames if isinstance(image, PreparedImage)]
            pending_count = len(unit.conversation.pending_ids)
            unit.start = self._llm.cache.length(unit.slot) + pending_count
            if unit.start > (limit := self.row_limit(unit)):
                unit.failure = self.make_room(unit, limit)
            if unit.failure is None and unit.rows.audio:
                unit.failure = self._hear(unit)
            if unit.failure is None:
                unit.first_draw = unit.conversation.sampling.uniforms.used_count
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

    def row_limit(self, unit: RunningUnit) -> int:
        """Return the length of the longest context that has room for the unit and its output."""
        conversation, cache = unit.conversation, self._llm.cache
        rows = sum(unit.rows) + conversation.generated_rows + conversation.window.spare_rows
        return min(cache.capacity - rows, self._capacity - 1)

    def make_room(self, unit: RunningUnit, limit: int) -> UnitFailure | None:
        """Let the window drop units until the context before `unit` has at most `limit` rows."""
        while unit.start > limit:
            slide = unit.conversation.window.slide(limit)
            if slide is None:
                message = f"{unit.start} rows of {self._capacity}, the unit needs at most {limit}"
                return refusal(unit.unit, "CONTEXT_FULL", message)
            self._feed_pending([unit])
            self._llm.splice(unit.slot, slide)
            unit.start = self._llm.cache.length(unit.slot)
        return None

    def _show_input(self, probe: Probe, batches: Sequence[PrefilledBatch]) -> None:
        for units, logits in batches:
            for unit, row in zip(units, logits.unbind(), strict=True):
                if unit.frame_embeds:
                    probe.frames_encoded(unit.slot, torch.cat(unit.frame_embeds))
                probe.prefilled(unit.slot, row, self._llm.cache.length(unit.slot))
                if unit.audio_embeds is not None:
                    probe.audio_encoded(unit.slot, unit.audio_embeds)

    def _interrupt(self, units: Sequence[RunningUnit]) -> None:
        """End the turns that a forced listen interrupts, and their speech."""
        for unit in units:
            unit.next_id = unit.state.interrupt()
        run_stage("decode", units, self._feed_ids, cache=self._llm.cache)
        if self._speech is not None:
            run_stage("turn", units, self._speech.end_turns)

    def _generate(self, batches: list[PrefilledBatch]) -> Iterator[RunningUnit]:
        """Choose and feed ids step by step, for the units of all `batches` together.

        Yields each unit when its text is complete or it has a failure.
        """
        while batches:
            units, logits = batches[0]
            if len(batches) > 1:
                units = [unit for some, _ in batches for unit in some]
                logits = torch.cat([rows for _, rows in batches])
            choosing = [unit for unit in units if unit.state.needs_choice]
            run_stage("choice", choosing, partial(self._choose, units, logits))
            for unit in units:
                unit.next_id = None if unit.failure else unit.state.advance(unit.chosen_id)
            yield from (unit for unit in units if unit.next_id is None)
            feeding = [unit for unit in units if unit.next_id is not None]
            batches = run_stage("decode", feeding, self._feed_ids, cache=self._llm.cache)
            yield from (unit for unit in feeding if unit.failure)

    def _choose(
        self, units: Sequence[RunningUnit], logits: Tensor, choosing: Sequence[RunningUnit]
    ) -> None:
        """Choose the next id of the units in `choosing`. `logits` has a row for each of `units`."""
        if len(choosing) < len(units):
            rows = {unit.slot: row for row, unit in enumerate(units)}
            logits = logits[upload([rows[unit.slot] for unit in choosing], logits.device)]
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

    def _feed_ids(self, units: Sequence[RunningUnit]) -> Tensor:
        """Feed the next id of each unit. Return the logits [units, ids] after these ids."""
        ids = [unit.next_id for unit in units if unit.next_id is not None]
        counts = [(unit.slot, 1) for unit in units]
        hidden, logits = self._llm.feed(counts, self._llm.embed(ids))
        for unit, token, state in zip(units, ids, hidden.unbind(), strict=True):
            if len(unit.state.text_ids) > len(unit.hidden):
                unit.hidden.append(state)
            if self._probe is not None:
                self._probe.fed(unit.slot, token, state)
        return logits

    def _result(self, unit: RunningUnit, stage_s: dict[str, float]) -> UnitOutput | UnitFailure:
        """Return the unit's output, or its failure. A fatal failure ends the conversation."""
        if unit.failure is not None:
            if unit.failure.is_fatal:
                unit.conversation.status = Status.LOST
            return unit.failure
        state = unit.state
        requested = unit.conversation.requested
        has_ended = any(end.outcome is SpeechOutcome.INTERRUPTED for end in unit.results)
        new_requests = islice(requested.requests, len(requested.requests) - unit.new_requests, None)
        change = StateChange(
            speech_token_ids=tuple(unit.speech_tokens),
            chosen_token_ids=tuple(unit.chosen_ids),
            draw_count=unit.conversation.sampling.uniforms.used_count - unit.first_draw,
            interrupted_turn=unit.is_interrupting,
            was_requested=unit.request is not None,
            ended_requests=has_ended,
            requests=tuple(new_requests),
        )
        if unit.request is not None:
            unit.results += requested.spoken(len(state.text_ids))
        return UnitOutput(
            slot=unit.slot,
            is_listen=state.is_listen,
            text="" if state.is_listen else self._tokens.decode(state.text_ids),
            audio=unit_audio(unit.samples, end_of_turn=state.end_of_turn),
            end_of_turn=state.end_of_turn and not state.is_listen,
            context_length=self._llm.cache.length(unit.slot),
            token_ids=tuple(state.token_ids),
            text_token_count=len(state.text_ids),
            audio_token_count=len(unit.speech_tokens),
            input_audio_count=unit.rows.audio,
            input_video_count=unit.rows.video,
            input_mark_count=unit.rows.marks,
            stage_s={**stage_s, "settle": unit.conversation.settle_s},
            interrupted_turn=unit.is_amid_turn and state.is_listen,
            is_forced=state.is_forced,
            listen_probability=unit.listen_probability,
            state=rebuild_state.encode(change),
            change=change,
            speech_request=unit.request,
            speech_results=tuple(unit.results),
            reach=_reach(unit),
        )

    def apply(self, slides: Sequence[tuple[RunningUnit, Slide | None]]) -> float:
        """Feed pending ids of units, then move context rows (`Slide`). Return the seconds taken."""
        watch = Stopwatch(self._device)
        units = [unit for unit, _ in slides]
        run_stage("settle", units, self._feed_pending, cache=self._llm.cache)
        for unit, slide in slides:
            if slide is not None:
                run_stage("window", [unit], partial(self._splice, slide))
        return watch.seconds("settle")["settle"]

    def _splice(self, slide: Slide, units: Sequence[RunningUnit]) -> None:
        for unit in units:
            self._llm.splice(unit.slot, slide)

    def _feed_pending(self, units: Sequence[RunningUnit]) -> None:
        """Feed the pending ids of the units' conversations. The slots must be ascending."""
        pending = [unit for unit in units if unit.conversation.pending_ids]
        if not pending:
            return
        ids = [token for unit in pending for token in unit.conversation.pending_ids]
        counts = [(unit.slot, len(unit.conversation.pending_ids)) for unit in pending]
        self._llm.append(counts, self._llm.embed(ids))
        for unit in pending:
            unit.conversation.pending_ids = ()


def _reach(unit: RunningUnit) -> UnitReach | None:
    """Return which units before a complete unit a rebuild needs; None if it needs all of them."""
    conversation = unit.conversation
    number, begin = conversation.number, conversation.talker_begin
    if not (conversation.window.is_on and conversation.hearing.is_regular):
        return None
    return UnitReach(
        row_count=sum(unit.rows) + len(unit.state.token_ids),
        context_units=len(conversation.window.units) + 1,
        sound_units=conversation.hearing.units_before(number),
        turn_units=0 if begin is None else number - begin + 1,
    )
