"""The speech of a batch of units: the talker draws tokens; the vocoder makes samples from them.

Source: `_generate_waveform_from_tokens` of class `DuplexCapability` in
`MiniCPMO45/modeling_minicpmo_unified.py` of OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
from torch import Tensor

from duplane.worker.models.minicpm_o.batch_isolation import BatchItem, run_stage
from duplane.worker.models.minicpm_o.duplex.conversation import Conversation, RunningUnit
from duplane.worker.models.minicpm_o.loader import SpeechVocoder
from duplane.worker.models.minicpm_o.probe import Probe, SpokenUnit
from duplane.worker.models.minicpm_o.stopwatch import Stopwatch
from duplane.worker.models.minicpm_o.tts.sampling import SpeechRequest
from duplane.worker.models.minicpm_o.tts.talker import Talker
from duplane.worker.models.minicpm_o.vocoder.token_buffer import SpeechTokens
from duplane.worker.models.minicpm_o.vocoder.vocoder import VocoderChunk
from duplane.worker.models.types import FloatArray

UNIT_SAMPLES = 24_000
SHARE_CHUNKS = 2
"""Maximum number of chunks that one share of a rebuild feeds to the vocoder."""
TURN_CHUNKS = 30
"""Maximum number of chunks of an open turn that a rebuild feeds to the vocoder. If the turn has
more chunks, the vocoder starts as in a new turn."""
RECENT_CHUNKS = 2


class Speaker(BatchItem, Protocol):
    """A unit or a chat: the chunks that wait to be decoded, and the samples of the others.

    `mel` belongs to the first chunk.
    """

    chunks: deque[VocoderChunk]
    mel: Tensor | None
    samples: list[FloatArray]


class SpeechStage:
    """Runs the talker and the vocoder for several slots together."""

    def __init__(self, talker: Talker, vocoder: SpeechVocoder, probe: Probe | None = None) -> None:
        self._talker, self._vocoder, self._probe = talker, vocoder, probe

    def new_buffer(self) -> SpeechTokens:
        """Make an empty buffer for the speech tokens of a conversation."""
        return SpeechTokens(
            silence_token_id=self._vocoder.silence_token_id, lookahead=self._vocoder.lookahead
        )

    @property
    def most_rows(self) -> int:
        """The largest number of chunks that the vocoder decodes in one call."""
        return self._vocoder.most_rows

    def talk(self, units: Sequence[RunningUnit], watch: Stopwatch) -> None:
        """Draw the speech tokens of units, slots ascending.

        If the caller has not started the turn of a unit, this is done here.
        """
        waiting = [unit for unit in units if unit.conversation.awaits_voice]
        run_stage("turn", waiting, self._start_turns)
        watch.lap("talker")
        draw = partial(self._draw_tokens, watch=watch)
        run_stage("talker", units, draw, cache=self._talker.cache)
        watch.lap("talker")

    def decode(self, speakers: Sequence[Speaker], watch: Stopwatch) -> None:
        """Decode the next chunk of units, or of chats; at most `most_rows` of them."""
        run_stage("flow", speakers, self._encode_chunks)
        run_stage("HiFT", speakers, self._decode_chunks)
        watch.lap("vocoder")

    def _draw_tokens(self, units: Sequence[RunningUnit], watch: Stopwatch) -> None:
        """Draw the speech tokens of units, and cut them into chunks for the vocoder."""
        requests: list[SpeechRequest] = []
        for unit in units:
            sampling = unit.conversation.sampling
            requests.append(
                SpeechRequest(
                    slot=unit.slot,
                    condition=self._talker.condition(unit.state.text_ids, unit.hidden),
                    is_turn_end=unit.state.end_of_turn,
                    is_greedy=sampling.draws.is_greedy,
                    temperature=sampling.options.tts_temperature,
                    uniforms=sampling.uniforms,
                )
            )
        watch.lap("talker", "condition")
        starts = [self._talker.cache.length(unit.slot) for unit in units]
        conditions = [request.condition for request in requests]
        drawn = self._talker.speak(requests)
        buffers = [unit.conversation.speech for unit in units if unit.conversation.speech]
        for unit, start, condition in zip(units, starts, conditions, strict=True):
            self._follow_talker(unit, start, len(condition))
        for unit, tokens, buffer in zip(units, drawn, buffers, strict=True):
            unit.speech_tokens, unit.is_spoken = tokens, True
            cut = buffer.push(tokens, end_of_turn=unit.state.end_of_turn)
            unit.chunks = deque(VocoderChunk(unit.slot, new.tokens, new.is_last) for new in cut)
        if self._probe is not None:
            for request, start, tokens in zip(requests, starts, drawn, strict=True):
                length = start + len(request.condition) + len(tokens)
                speech = SpokenUnit(start, request.condition, tokens, length)
                self._probe.spoke(request.slot, speech)

    def _follow_talker(self, unit: RunningUnit, start: int, rows: int) -> None:
        """Record which units the talker's cache has after a unit: `start` rows were in it before.

        The unit's condition has `rows` rows.
        """
        conversation = unit.conversation
        if unit.state.end_of_turn:
            conversation.talker_begin = None
        elif conversation.talker_begin is None or not self._talker.has_room(start, rows):
            conversation.talker_begin = conversation.number

    def _encode_chunks(self, speakers: Sequence[Speaker]) -> None:
        """Compute the mel of the next chunk of each speaker."""
        mels = self._vocoder.encode([speaker.chunks[0] for speaker in speakers])
        for speaker, mel in zip(speakers, mels, strict=True):
            speaker.mel = mel

    def _decode_chunks(self, speakers: Sequence[Speaker]) -> None:
        """Make samples of the mel of each speaker."""
        mels = [speaker.mel for speaker in speakers if speaker.mel is not None]
        decoded = self._vocoder.decode_mel([speaker.chunks[0] for speaker in speakers], mels)
        for speaker, samples in zip(speakers, decoded, strict=True):
            speaker.samples.append(samples)
            chunk = speaker.chunks.popleft()
            if self._probe is not None:
                self._probe.vocoded(speaker.slot, list(chunk.tokens), chunk.is_last, len(samples))

    def note(self, unit: RunningUnit, number: int, *, is_fed: bool = True) -> None:
        """Store the speech of the past unit `number` for `repeat`. The end of a turn clears it.

        Without `is_fed`, the LLM's states of the text are unknown, so the talker gets nothing of
        the unit.
        """
        conversation, past = unit.conversation, unit.conversation.past_speech
        if conversation.speech is None:
            return
        if conversation.awaits_voice:
            self.start_turn(conversation)
        if unit.is_interrupting:
            self._skip_turn(conversation)
        if unit.state.is_listen:
            return
        rows = len(unit.state.text_ids) + 1  # of the condition
        is_full = not self._talker.has_room(past.talker_rows, rows)
        if is_full:
            self._empty_talker(conversation)
        if is_full or conversation.talker_begin is None:
            conversation.talker_begin = number
        past.talker_rows += rows + len(unit.speech_tokens)
        if is_fed:
            hidden = [row.clone() for row in unit.hidden]  # views of all states of a share
            past.units.append((unit.state.text_ids, hidden, unit.speech_tokens))
        cut = conversation.speech.push(unit.speech_tokens, end_of_turn=unit.state.end_of_turn)
        past.chunks += [VocoderChunk(unit.slot, new.tokens, new.is_last) for new in cut]
        if unit.state.end_of_turn:
            conversation.talker_begin = None
            self._empty_talker(conversation)
            self._skip_turn(conversation)

    def _empty_talker(self, conversation: Conversation) -> None:
        """Drop the past speech that the talker has dropped, or would have if it had all of it."""
        conversation.past_speech.units.clear()
        conversation.past_speech.talker_rows = 0
        self._talker.cache.truncate(conversation.slot, 0)

    def _skip_turn(self, conversation: Conversation) -> None:
        """Skip the chunks of a past turn, and start the next turn."""
        self._vocoder.skip(conversation.past_speech.chunks)
        conversation.past_speech.chunks.clear()
        if conversation.speech is not None:
            conversation.speech.reset()
        self.start_turn(conversation)

    def repeat(self, conversation: Conversation, watch: Stopwatch) -> None:
        """Restore a part of the talker's and the vocoder's state, from speech that `note` stored.

        The first call feeds all tokens to the talker; each later call, some chunks to the vocoder.
        """
        slot, past = conversation.slot, conversation.past_speech
        if past.units:
            self._talker.repeat(
                slot,
                [
                    (self._talker.condition(text_ids, hidden), tokens)
                    for text_ids, hidden, tokens in past.units
                ],
            )
            past.units.clear()
            watch.lap("talker")
            return
        if len(past.chunks) > TURN_CHUNKS:
            self._skip_turn(conversation)
        for _ in range(min(SHARE_CHUNKS, len(past.chunks))):
            chunk = past.chunks.popleft()
            self._vocoder.repeat(chunk, is_recent=len(past.chunks) < RECENT_CHUNKS)
        watch.lap("vocoder")

    def end_turns(self, units: Sequence[RunningUnit]) -> None:
        """End the turns of units, and start the next turns, except where this takes long.

        A conversation whose voice has no cached prompt only `awaits_voice` then. `start_turns`
        computes the prompt, so that no other conversation has to wait for it here.
        """
        for unit in units:
            unit.conversation.end_speech()
            if self._vocoder.has_prompt(unit.slot):
                self.start_turn(unit.conversation)

    def has_prompt(self, slot: int) -> bool:
        """Whether the next turn of the slot can start quickly."""
        return self._vocoder.has_prompt(slot)

    def _start_turns(self, units: Sequence[RunningUnit]) -> None:
        self.start_turns([unit.conversation for unit in units])

    def start_turns(self, conversations: Sequence[Conversation]) -> None:
        """Start turns in the vocoder. This computes the prompts of voices that are not cached."""
        for conversation in conversations:
            self.start_turn(conversation)

    def start_turn(self, conversation: Conversation) -> None:
        """Start one turn in the vocoder; see `start_turns`."""
        self._vocoder.start_turn(conversation.slot)
        conversation.awaits_voice = False


def unit_audio(pieces: Sequence[FloatArray], *, end_of_turn: bool) -> FloatArray:
    """Join the samples of one unit's chunks, `[samples]` at 24 kHz, quantised to 16 bits.

    As in the reference, the samples are clipped to [-1, 1], multiplied by 32767, truncated towards
    zero and divided by 32768. Inside a turn, audio shorter than a second gets zeros in front, so
    that it ends when the next unit begins. Without samples the result is empty.
    """
    if not any(map(len, pieces)):
        return np.zeros(0, np.float32)
    scaled = np.clip(np.concatenate(pieces), -1.0, 1.0) * np.float32(32767.0)
    samples = scaled.astype(np.int16).astype(np.float32) / np.float32(32768.0)
    missing = 0 if end_of_turn else max(0, UNIT_SAMPLES - len(samples))
    return np.pad(samples, (missing, 0))
