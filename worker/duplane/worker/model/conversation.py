"""What the model keeps on the host for one conversation; its tensors live in the slots."""

from __future__ import annotations

from dataclasses import dataclass

from duplane.worker.model.duplex import TurnState, UnitRecord, UnitRules
from duplane.worker.model.sampling import SeededUniforms, Uniforms
from duplane.worker.model.speech_tokens import SpeechTokens
from duplane.worker.model.types import ConversationOptions, DecodeMode
from duplane.worker.model.windows import Window


@dataclass
class Conversation:
    """The state of one conversation between its units.

    `window` knows what the rows of the context are. `speech` is None for a conversation without
    audio. `unsettled` is the unit whose closing ids are still to be fed, `unit_start` the context
    length it began at. `is_lost` means that a unit of it failed, and that it can only be closed.
    """

    options: ConversationOptions
    turn: TurnState
    uniforms: Uniforms
    window: Window
    speech: SpeechTokens | None
    unsettled: UnitRules | None = None
    unit_start: int = 0
    settle_s: float = 0.0
    is_lost: bool = False

    @classmethod
    def begin(
        cls,
        options: ConversationOptions,
        window: Window,
        speech: SpeechTokens | None,
        uniforms: Uniforms | None = None,
    ) -> Conversation:
        """A conversation before its first unit; `uniforms` replaces the draws of its seed."""
        turn = TurnState(options.force_listen_count, options.max_new_speak_tokens_per_chunk)
        return cls(options, turn, uniforms or SeededUniforms(options.seed), window, speech)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely id is taken in place of every draw."""
        return self.options.decode_mode is DecodeMode.GREEDY

    def settle(self, length: int) -> None:
        """Register the unit that has just been closed, in a context of `length` rows."""
        if self.unsettled is not None:
            rules, rows = self.unsettled, length - self.unit_start
            number = self.turn.unit_count - 1
            record = UnitRecord(number, rows, rules.is_listen, tuple(rules.said))
            self.window.units.append(record)
        self.unsettled = None
