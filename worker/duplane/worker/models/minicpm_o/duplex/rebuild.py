"""Rebuilds a conversation from past units: their rows are prefilled, and no id is chosen again.

The result is, up to rounding, the state that the conversation had on the worker where the units
ran. The rules of units, turns and windows are applied to the recorded ids again, so the window
moves rows at the same units. One call does a *share*, a bounded part of the work, so that other
conversations do not wait long.

With a context window, the first units need not be fed: their ids and numbers of rows suffice for
the rules. A row depends on the units that were in the context when it was computed, and these on
the units in the context of theirs, layer by layer. So the result is exact if the first fed unit is
as many contexts before the present one as the LLM has layers, less one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, takewhile

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.batch_isolation import run_stage
from duplane.worker.models.minicpm_o.duplex import rebuild_state
from duplane.worker.models.minicpm_o.duplex.conversation import (
    Conversation,
    InputRows,
    RunningUnit,
    Status,
)
from duplane.worker.models.minicpm_o.duplex.hearing import HearingError
from duplane.worker.models.minicpm_o.duplex.pipeline import Pipeline
from duplane.worker.models.minicpm_o.duplex.sampling import DuplexSampling
from duplane.worker.models.minicpm_o.duplex.speech import SpeechStage
from duplane.worker.models.minicpm_o.duplex.unit_state import UnitRecord, UnitState
from duplane.worker.models.minicpm_o.llm.kv_cache import Slide
from duplane.worker.models.minicpm_o.llm.pages import CacheFullError
from duplane.worker.models.minicpm_o.loader import CLOSING_ROWS, ModelParts
from duplane.worker.models.minicpm_o.stopwatch import Stopwatch
from duplane.worker.models.minicpm_o.tts.sampling import TOKENS_PER_UNIT, UNIT_DRAWS
from duplane.worker.models.types import PastUnit, Rebuilt, StateChange, UnitFailure

SHARE_ROWS = 512
"""Maximum number of rows of one share, unless its only unit has more."""
CPU_SHARE_ROWS = 128
"""Maximum number of rows of one share on a CPU with an empty context; a CPU needs longer for a
row."""
CPU_CONTEXT_ROWS = 8192
"""Length of the context at which a share on a CPU has half as many rows: the time of a row grows
with the context."""
SHARE_UNITS = 29
"""Maximum number of units of one share: as many as the audio encoder's cache holds in the released
model."""
WINDOW_UNITS = 8
"""Maximum number of units of one share if a context window may move rows after each of them."""
UNFED_UNITS = 64
"""Maximum number of units of one share that are neither fed nor heard."""

REFUSED = "REBUILD_REFUSED"
DIFFERS = "REBUILD_DIFFERS"
COLD = "the sound before it is missing"


class _RefusedError(Exception):
    """A past unit cannot be a part of the conversation."""

    def __init__(self, past: PastUnit, message: str, field: str = "", reason: str = REFUSED):
        message = f"past unit {past.unit.sequence}: {message}"
        super().__init__(message)
        self.failure = UnitFailure(past.unit.slot, reason, message, is_fatal=True, field=field)


@dataclass
class _Share:
    """The past units of one share of work. The rows of the units in `waiting` are not fed yet.

    `placed_count` is the number of units of the conversation that are in the context.
    """

    slot: int
    conversation: Conversation
    past: Sequence[PastUnit]
    changes: list[StateChange] = field(default_factory=list[StateChange])
    units: list[RunningUnit] = field(default_factory=list[RunningUnit])
    waiting: list[RunningUnit] = field(default_factory=list[RunningUnit])
    placed_count: int = 0
    failure: UnitFailure | None = None


def _change_of(past: PastUnit) -> StateChange:
    """Return how a past unit changed the state; raises `_RefusedError` for a bad state."""
    if not past.state:
        if past.change is None:
            raise _RefusedError(past, "the state is missing", "rebuild_state")
        return past.change
    try:
        return rebuild_state.decode(past.state)
    except rebuild_state.StateError as error:
        raise _RefusedError(past, str(error), "rebuild_state") from error


def _is_unfed(past: PastUnit, *, is_heard: bool) -> bool:
    return bool(past.unfed_rows) and bool(past.unit.audio.size) == is_heard


def _lack(conversation: Conversation) -> str:
    """Return what a conversation needs before a unit can run; empty if it needs nothing."""
    if conversation.window.has_unfed:
        return "units that were not fed are still in the context"
    return "" if conversation.hearing.is_ready else COLD


class Rebuilder:
    """Rebuilds the conversations of one model."""

    def __init__(
        self,
        parts: ModelParts,
        sampling: DuplexSampling,
        pipeline: Pipeline,
        speech: SpeechStage | None,
    ) -> None:
        self._llm, self._tokens, self._audio = parts.llm, parts.tokens, parts.audio
        self._speech_ids = 0 if parts.talker is None else parts.talker.end
        self._device = parts.llm.model.norm.weight.device
        self._sampling, self._pipeline, self._speech = sampling, pipeline, speech
        self._inputs = pipeline.inputs

    def run(self, conversation: Conversation, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
        """Do one share of the rebuild.

        The share feeds the first few of `units`. When `units` is empty, the share instead computes
        the state of the talker or the vocoder from a part of the stored speech. If the share fails,
        the conversation is lost.
        """
        watch = Stopwatch(self._device)
        share = _Share(conversation.slot, conversation, self._first(conversation, units))
        conversation.status = Status.REBUILDING
        run_stage("rebuild", [share], lambda shares: self._run(shares[0], watch))
        if share.failure is not None:
            conversation.status = Status.LOST
            return share.failure
        is_complete = len(share.past) == len(units) and not conversation.past_speech
        if is_complete:
            conversation.status = Status.READY
        return Rebuilt(
            slot=share.slot,
            unit_count=len(share.past),
            context_length=(
                share.past[-1].context_length if share.past else self._llm.cache.length(share.slot)
            ),
            is_complete=is_complete,
            lack=_lack(conversation),
            stage_s=watch.seconds(),
        )

    def _first(self, conversation: Conversation, units: Sequence[PastUnit]) -> Sequence[PastUnit]:
        """Return the units of the next share: the first few of `units`, and at least one.

        A share has units that are fed, units that are only heard, or units without both.
        """
        if units and units[0].unfed_rows:
            is_heard = bool(units[0].unit.audio.size)
            same = takewhile(lambda past: _is_unfed(past, is_heard=is_heard), units)
            return list(islice(same, SHARE_UNITS if is_heard else UNFED_UNITS))
        rows, count = 0, 0
        share_rows = self._share_rows(conversation.slot)
        most = WINDOW_UNITS if conversation.window.is_on else SHARE_UNITS
        for past in units[:most]:
            if past.unfed_rows:
                break
            rows += sum(self._inputs.count_rows(past.unit)) + len(past.token_ids)
            if count and rows > share_rows:
                break
            count += 1
        return units[:count]

    def _share_rows(self, slot: int) -> int:
        """Return the maximum number of rows of the slot's next share."""
        if self._device.type == "cuda":
            return SHARE_ROWS
        length = self._llm.cache.length(slot)
        return CPU_SHARE_ROWS * CPU_CONTEXT_ROWS // (CPU_CONTEXT_ROWS + length)

    def _run(self, share: _Share, watch: Stopwatch) -> None:
        if not share.past:
            if self._speech is not None and share.conversation.past_speech:
                self._speech.repeat(share.conversation, watch)
            return
        try:
            self._enter(share)
            if share.past[0].unfed_rows:
                self._follow(share, watch)
            else:
                self._encode(share, watch)
                self._feed(share)
        except _RefusedError as error:
            share.failure = error.failure
            return
        except CacheFullError as error:
            share.failure = UnitFailure(share.slot, REFUSED, str(error), is_fatal=True)
            return
        changes = share.changes
        chosen = [token for change in changes for token in change.chosen_token_ids]
        draw_count = sum(change.draw_count for change in changes)
        self._sampling.repeat(share.conversation.sampling, chosen, draw_count)
        watch.lap("prefill")

    def _enter(self, share: _Share) -> None:
        """Check the units of a share, and apply the rules of units to their ids."""
        conversation = share.conversation
        for past in share.past:
            change = _change_of(past)
            self._check(past, change, conversation)
            share.changes.append(change)
            state = UnitState.retraced(
                self._tokens,
                conversation.turn,
                past.token_ids,
                change.chosen_token_ids,
                is_interrupting=change.interrupted_turn,
            )
            if state is None:
                raise _RefusedError(past, "a unit cannot have these ids", "token_ids")
            if change.speech_token_ids and state.is_listen:
                raise _RefusedError(past, "a unit that listens has speech", "speech_token_ids")
            if not conversation.requested.repeat(self._tokens, change, state.text_ids):
                raise _RefusedError(past, "the unit cannot have these requests", "rebuild_state")
            unit = RunningUnit(share.slot, past.unit, conversation, state, change.interrupted_turn)
            unit.speech_tokens, unit.row_limit = list(change.speech_token_ids), change.row_limit
            if past.unfed_rows:
                unit.rows = InputRows(marks=past.unfed_rows - len(past.token_ids))
            else:
                self._prepare(past, unit)
            share.units.append(unit)

    def _prepare(self, past: PastUnit, unit: RunningUnit) -> None:
        """Prepare the input of a unit that is fed."""
        prepared = self._inputs.prepare(past.unit)
        if isinstance(prepared, UnitFailure):
            raise _RefusedError(past, prepared.message, prepared.field)
        unit.set_input(prepared, self._inputs.count_rows(prepared))
        unit.granted = unit.seen.left

    def _check(self, past: PastUnit, change: StateChange, conversation: Conversation) -> None:
        """Refuse ids and numbers that no unit can have."""
        most = conversation.turn.max_tokens
        speech_ids = 0 if conversation.speech is None else self._speech_ids
        for name, ids, end, longest in (
            ("token_ids", past.token_ids, self._llm.vocabulary, conversation.generated_rows),
            ("chosen_token_ids", change.chosen_token_ids, self._llm.vocabulary, most),
            ("speech_token_ids", change.speech_token_ids, speech_ids, TOKENS_PER_UNIT),
        ):
            if len(ids) > longest:
                raise _RefusedError(past, f"{len(ids)} ids, at most {longest}", name)
            if outside := [token for token in ids if not 0 <= token < end]:
                raise _RefusedError(past, f"no such ids: {outside[:10]}", name)
        if not 0 <= change.draw_count <= 2 * most + UNIT_DRAWS:
            raise _RefusedError(past, f"{change.draw_count} draws", "draw_count")
        if change.interrupted_turn and not conversation.turn.is_open:
            raise _RefusedError(past, "there was no turn to interrupt", "interrupted_turn")
        if past.unfed_rows:
            rows = past.unfed_rows - len(past.token_ids)
            if not 0 < rows <= self._llm.cache.capacity:
                raise _RefusedError(past, f"a unit cannot have {past.unfed_rows} rows", "row_count")
            if past.unit.frames:
                raise _RefusedError(past, "a unit that is not fed has pictures", "row_count")

    def _follow(self, share: _Share, watch: Stopwatch) -> None:
        """Apply units that are not fed to everything but the rows of the context."""
        conversation, hearing = share.conversation, share.conversation.hearing
        first = conversation.turn.unit_count - len(share.units)
        if first != conversation.unfed_count:
            raise _RefusedError(share.past[0], "a unit before it was fed", "row_count")
        conversation.unfed_count += len(share.units)
        features: list[tuple[Tensor, list[bool]]] = []
        for number, (past, unit) in enumerate(zip(share.past, share.units, strict=True), first):
            self._place(share, past, unit, number)
            if self._speech is not None:
                self._speech.note(unit, number, is_fed=False)
            if past.unit.audio.size:
                found = self._hear(share, past, number)
                features += [found] if hearing.is_encoding else []
            elif past.had_audio:
                try:
                    hearing.skip(number)
                except HearingError as error:
                    raise _RefusedError(past, str(error), "audio") from error
        if features:
            self._audio.encode_run(share.slot, features)
        watch.lap("audio")

    def _hear(self, share: _Share, past: PastUnit, number: int) -> tuple[Tensor, list[bool]]:
        """Return the mel of the unit `number`, which must come next."""
        hearing = share.conversation.hearing
        hearing.push(len(past.unit.audio))
        if failure := self._inputs.buffer_audio(past.unit):
            raise _RefusedError(past, failure.message, "audio")
        try:
            hearing.take(number)
        except HearingError as error:
            raise _RefusedError(past, str(error), "audio") from error
        return self._audio.mel.features([share.slot])

    def _encode(self, share: _Share, watch: Stopwatch) -> None:
        """Encode the audio and the frames of all units of a share."""
        heard = [unit for unit in share.units if unit.rows.audio]
        features: list[tuple[Tensor, list[bool]]] = []
        first = share.conversation.turn.unit_count - len(share.units)
        for number, (past, unit) in enumerate(zip(share.past, share.units, strict=True), first):
            if unit.rows.audio:
                if not share.conversation.hearing.is_ready:
                    raise _RefusedError(past, COLD, "audio")
                features.append(self._hear(share, past, number))
        if heard:
            embeds = self._audio.encode_run(share.slot, features)
            for unit, rows in zip(heard, embeds.unbind(), strict=True):
                unit.audio_embeds = rows
        watch.lap("audio")
        if with_frames := [unit for unit in share.units if unit.images]:
            self._inputs.encode_tiles(with_frames)
            watch.lap("vision")

    def _feed(self, share: _Share) -> None:
        """Feed the rows of all units of a share; drop units where the context window drops them."""
        conversation = share.conversation
        first = conversation.turn.unit_count - len(share.units)
        if first == conversation.unfed_count:
            self._feed_previous(conversation)
        for number, (past, unit) in enumerate(zip(share.past, share.units, strict=True), first):
            self._place(share, past, unit, number)
        self._feed_waiting(share)

    def _feed_previous(self, conversation: Conversation) -> None:
        """Feed the text of units that the window has dropped, before the first unit is fed."""
        slot, window = conversation.slot, conversation.window
        if window.previous:
            self._llm.cache.truncate(slot, window.head_rows)
            self._llm.append_long(slot, self._llm.embed((*window.previous, *window.tail)))

    def _place(self, share: _Share, past: PastUnit, unit: RunningUnit, number: int) -> None:
        """Add a unit to the context; let the window drop units before and after it.

        The rows of a unit that is fed are fed later, together with those of other units.
        """
        window, is_fed = share.conversation.window, not past.unfed_rows
        most = self._pipeline.row_limit(unit, self._llm.cache.capacity)
        limit = min(most, unit.row_limit or most)
        while window.length > limit and (slide := window.slide(limit)):
            self._slide(share, slide, is_fed=is_fed)
        unit.start = window.length
        if unit.start > most:
            raise _RefusedError(past, f"{unit.start} rows, the unit needs at most {most}")
        row_count = sum(unit.rows) + len(unit.state.token_ids)
        length = unit.start + row_count - CLOSING_ROWS
        if length != past.context_length:
            message = f"the context has {length} tokens, not {past.context_length}"
            raise _RefusedError(past, message, reason=DIFFERS)
        share.placed_count = number + 1
        if is_fed:
            share.waiting.append(unit)
        state = unit.state
        ids = tuple(state.text_ids)
        window.units.append(UnitRecord(number, row_count, state.is_listen, ids, is_fed))
        if slide := window.slide():
            self._slide(share, slide, is_fed=is_fed)

    def _slide(self, share: _Share, slide: Slide, *, is_fed: bool) -> None:
        """Change the rows of the context, if there are any of units."""
        if not is_fed:
            return
        self._feed_waiting(share)
        conversation, cache = share.conversation, self._llm.cache
        grown = len(conversation.pending_ids) + max(0, slide.target - slide.kept)
        cache.hold(share.slot, cache.length(share.slot) + grown)
        self._pipeline.apply(conversation, slide)
        if failure := conversation.failure:
            raise RuntimeError(failure.message)

    def _feed_waiting(self, share: _Share) -> None:
        """Feed the rows of the waiting units, except the closing ids of the last unit."""
        conversation, waiting = share.conversation, share.waiting
        if not waiting:
            return
        ids = [unit.state.token_ids for unit in waiting]
        inputs = self._inputs.embed(waiting, [conversation.pending_ids, *ids[:-1]])
        last = self._llm.embed(ids[-1][:-CLOSING_ROWS])
        hidden = torch.cat(self._llm.append_long(share.slot, torch.cat([*inputs, last])))
        conversation.pending_ids = waiting[-1].state.closing_ids
        starts = accumulate(map(len, inputs))
        first = share.placed_count - len(waiting)
        for number, (unit, start) in enumerate(zip(waiting, starts, strict=True), first):
            stop = start + len(unit.state.token_ids) - CLOSING_ROWS
            unit.hidden = list(hidden[stop - len(unit.state.text_ids) : stop].unbind())
            if self._speech is not None:
                self._speech.note(unit, number)
        share.waiting = []
