"""The output of a complete unit."""

from __future__ import annotations

from itertools import islice

from duplane.worker.models.minicpm_o.duplex import rebuild_state
from duplane.worker.models.minicpm_o.duplex.conversation import RunningUnit
from duplane.worker.models.minicpm_o.duplex.speech import unit_audio
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.types import SpeechOutcome, StateChange, UnitOutput, UnitReach


def unit_output(unit: RunningUnit, tokens: Tokens, context_length: int) -> UnitOutput:
    """Return the output of a complete unit. It is asked for once."""
    state, conversation = unit.state, unit.conversation
    requested = conversation.requested
    has_ended = any(end.outcome is SpeechOutcome.INTERRUPTED for end in unit.results)
    new_requests = islice(requested.requests, len(requested.requests) - unit.new_requests, None)
    change = StateChange(
        speech_token_ids=tuple(unit.speech_tokens),
        chosen_token_ids=tuple(unit.chosen_ids),
        draw_count=conversation.sampling.uniforms.used_count - unit.first_draw,
        interrupted_turn=unit.is_interrupting,
        was_requested=unit.request is not None,
        ended_requests=has_ended,
        requests=tuple(new_requests),
        row_limit=unit.row_limit,
    )
    if unit.request is not None:
        unit.results += requested.spoken(len(state.text_ids))
    return UnitOutput(
        slot=unit.slot,
        is_listen=state.is_listen,
        text="" if state.is_listen else tokens.decode(state.text_ids),
        audio=unit_audio(unit.samples, end_of_turn=state.end_of_turn),
        end_of_turn=state.end_of_turn and not state.is_listen,
        context_length=context_length,
        token_ids=tuple(state.token_ids),
        text_token_count=len(state.text_ids),
        audio_token_count=len(unit.speech_tokens),
        input_audio_count=unit.rows.audio,
        input_video_count=unit.rows.video,
        input_mark_count=unit.rows.marks,
        stage_s={**unit.laps.seconds(), "settle": conversation.settle_s},
        interrupted_turn=unit.is_amid_turn and state.is_listen,
        is_forced=state.is_forced,
        listen_probability=unit.listen_probability,
        state=rebuild_state.encode(change),
        change=change,
        speech_request=unit.request,
        speech_results=tuple(unit.results),
        reach=_reach(unit),
    )


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
