"""What the model keeps on the host for one conversation; its tensors live in the slots."""

from __future__ import annotations

from dataclasses import dataclass, field

from duplane.worker.model.duplex import TurnState, UnitRecord, UnitRules
from duplane.worker.model.sampling import SeededUniforms, Uniforms
from duplane.worker.model.speech_tokens import SpeechTokens
from duplane.worker.model.types import ConversationOptions, DecodeMode


@dataclass
class Conversation:
    """The state of one conversation between its units.

    `speech` is None for a conversation without audio. `unsettled` is the unit whose closing ids
    are still to be fed, `unit_start` the context length it began at. `units` registers every
    unit in the context, oldest first, for the windows.
    """

    options: ConversationOptions
    turn: TurnState
    uniforms: Uniforms
    speech: SpeechTokens | None
    prompt_length: int = 0
    units: list[UnitRecord] = field(default_factory=list[UnitRecord])
    unsettled: UnitRules | None = None
    unit_start: int = 0
    settle_s: float = 0.0

    @classmethod
    def begin(
        cls,
        options: ConversationOptions,
        speech: SpeechTokens | None,
        uniforms: Uniforms | None = None,
    ) -> Conversation:
        """A conversation before its first unit; `uniforms` replaces the draws of its seed."""
        turn = TurnState(options.force_listen_count, options.max_new_speak_tokens_per_chunk)
        return cls(options, turn, uniforms or SeededUniforms(options.seed), speech)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely id is taken in place of every draw."""
        return self.options.decode_mode is DecodeMode.GREEDY

    def settle(self, length: int, seconds: float) -> None:
        """Register the unit that has just been closed, in a context of `length` rows."""
        if self.unsettled is not None:
            rules, rows = self.unsettled, length - self.unit_start
            self.units.append(UnitRecord(rows, rules.is_listen, tuple(rules.said)))
        self.unsettled = None
        self.settle_s = seconds
