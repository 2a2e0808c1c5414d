"""The speech of a batch of units: the talker's tokens, then the vocoder's samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from duplane.worker.model.faults import alive, alone, attempt, each
from duplane.worker.model.parts import SpeechVocoder
from duplane.worker.model.probe import Probe, SpokenUnit
from duplane.worker.model.running_unit import RunningUnit
from duplane.worker.model.speech_tokens import SpeechTokens, TokenChunk
from duplane.worker.model.talker import Speech, Talker
from duplane.worker.model.types import FloatArray
from duplane.worker.model.vocoder import VocoderChunk


class Speaking:
    """Talker and vocoder, run for several slots together."""

    def __init__(self, talker: Talker, vocoder: SpeechVocoder, probe: Probe | None = None) -> None:
        self._talker = talker
        self._vocoder = vocoder
        self._probe = probe

    def buffer(self) -> SpeechTokens:
        """An empty buffer for a conversation's speech tokens."""
        return SpeechTokens(
            silence_token_id=self._vocoder.silence_token_id, lookahead=self._vocoder.lookahead
        )

    def draw(self, units: Sequence[RunningUnit]) -> None:
        """Draw the speech tokens of each unit; slots ascending."""
        done = attempt("talker", units, self._draw, cache=self._talker.cache)
        for unit, tokens in each(done):
            unit.spoken = tokens

    def _draw(self, units: Sequence[RunningUnit]) -> list[list[int]]:
        speeches = [self._speech(unit) for unit in units]
        starts = [self._talker.cache.length(unit.slot) for unit in units]
        spoken = self._talker.speak(speeches)
        if self._probe is not None:
            for speech, start, tokens in zip(speeches, starts, spoken, strict=True):
                length = start + len(speech.condition) + len(tokens)
                self._probe.spoke(speech.slot, SpokenUnit(start, speech.condition, tokens, length))
        return spoken

    def _speech(self, unit: RunningUnit) -> Speech:
        hidden = torch.stack(unit.hidden) if unit.hidden else torch.empty(0)
        options = unit.conversation.options
        return Speech(
            slot=unit.slot,
            condition=self._talker.condition(unit.rules.said, hidden),
            is_turn_end=unit.rules.end_of_turn,
            is_greedy=unit.conversation.is_greedy,
            temperature=options.tts_temperature,
            uniforms=unit.conversation.uniforms,
        )

    def sound(self, units: Sequence[RunningUnit]) -> None:
        """Make samples of the tokens that each unit completes, chunk by chunk."""
        chunks = {unit.slot: deque(self._cut(unit, unit.spoken)) for unit in units}
        while going := [unit for unit in alive(units) if chunks[unit.slot]]:
            heads = {unit.slot: chunks[unit.slot].popleft() for unit in going}
            self._decode(going, {s: VocoderChunk(s, c.tokens, c.is_last) for s, c in heads.items()})
        for unit in alive(units):
            if unit.rules.end_of_turn:
                self.end_turn(unit)

    def _decode(self, units: Sequence[RunningUnit], chunks: dict[int, VocoderChunk]) -> None:
        """Run one chunk of each unit through both halves of the vocoder."""
        mels: dict[int, Tensor] = {}

        def encode(some: Sequence[RunningUnit]) -> list[Tensor]:
            return self._vocoder.encode([chunks[unit.slot] for unit in some])

        def decode(some: Sequence[RunningUnit]) -> list[FloatArray]:
            own = [unit.slot for unit in some]
            return self._vocoder.decode_mel([chunks[s] for s in own], [mels[s] for s in own])

        for unit, mel in each(attempt("flow", units, encode)):
            mels[unit.slot] = mel
        for unit, samples in each(attempt("HiFT", alive(units), decode)):
            unit.pieces.append(samples)
            chunk = chunks[unit.slot]
            if self._probe is not None:
                self._probe.vocoded(unit.slot, list(chunk.tokens), chunk.is_last, len(samples))

    def _cut(self, unit: RunningUnit, tokens: Sequence[int]) -> list[TokenChunk]:
        speech = unit.conversation.speech
        if speech is None:
            return []
        return speech.push(tokens, end_of_turn=unit.rules.end_of_turn)

    def end_turn(self, unit: RunningUnit) -> None:
        """Begin the next turn's speech afresh.

        The talker's cache is not touched: it is dropped when a turn ends by itself, and goes on
        into the next turn when a turn was interrupted, as the model has been used.
        """
        unit.failure = alone("turn", unit.slot, lambda: self._vocoder.start_turn(unit.slot))
        if unit.conversation.speech is not None:
            unit.conversation.speech.reset()
