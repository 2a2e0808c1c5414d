"""The speech of a batch of units: the talker's tokens, then the vocoder's samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from duplane.worker.model.generation import RunningUnit
from duplane.worker.model.parts import SpeechVocoder
from duplane.worker.model.probe import Probe, SpokenUnit
from duplane.worker.model.speech_pcm import unit_speech
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

    def tokens(self, units: Sequence[RunningUnit]) -> list[list[int]]:
        """The speech tokens of each unit; slots ascending."""
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

    def samples(
        self, units: Sequence[RunningUnit], tokens: Sequence[Sequence[int]]
    ) -> list[FloatArray]:
        """The samples of each unit, float32 at 24 kHz; empty where nothing is to be heard yet."""
        chunks = [
            VocoderChunk(unit.slot, chunk.tokens, chunk.is_last)
            for unit, spoken in zip(units, tokens, strict=True)
            for chunk in self._cut(unit, spoken)
        ]
        pieces: dict[int, list[FloatArray]] = {unit.slot: [] for unit in units}
        for chunk, samples in zip(chunks, self._vocoder.decode(chunks), strict=True):
            pieces[chunk.slot].append(samples)
            if self._probe is not None:
                self._probe.vocoded(chunk.slot, list(chunk.tokens), chunk.is_last, len(samples))
        for unit in units:
            if unit.rules.end_of_turn:
                self.end_turn(unit)
        return [
            unit_speech(pieces[unit.slot], end_of_turn=unit.rules.end_of_turn) for unit in units
        ]

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
        self._vocoder.start_turn(unit.slot)
        if unit.conversation.speech is not None:
            unit.conversation.speech.reset()
