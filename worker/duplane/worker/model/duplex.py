"""The rules of one duplex unit: which ids are fed, when a unit ends, who is speaking.

Plain Python over chosen ids, without tensors; how ids are chosen and fed is not its matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from duplane.worker.model.tokens import Tokens

MAX_UNIT_CHARACTERS = 28
"""A token that would bring a unit's text to this length is dropped and the unit ends."""


@dataclass
class TurnState:
    """What a conversation carries from unit to unit for these rules."""

    force_listen_count: int
    max_tokens: int
    is_open: bool = False
    unit_count: int = 0


@dataclass(frozen=True)
class UnitRecord:
    """One unit in the context, as the windows need it: its rows, and what was said in it.

    `number` counts the units of a conversation, from 0.
    """

    number: int
    row_count: int
    is_listen: bool
    ids: tuple[int, ...]


@dataclass
class UnitRules:
    """The state machine of one unit. Ask `wants_choice`, then `take` an id until `is_over`.

    `said` are the ids behind the unit's text and speech: those fed after the first one, which
    only says that the model speaks. `added` are all ids of the unit, fed now or with `closing`.
    """

    tokens: Tokens
    turn: TurnState
    is_forced: bool
    added: list[int] = field(default_factory=list[int])
    said: list[int] = field(default_factory=list[int])
    is_listen: bool = False
    end_of_turn: bool = False
    is_over: bool = False
    _step: int = 0

    @classmethod
    def begin(cls, tokens: Tokens, turn: TurnState, *, force_listen: bool) -> UnitRules:
        """Begin a unit: the first units of a conversation listen, and those that are forced."""
        is_forced = force_listen or turn.unit_count < turn.force_listen_count
        turn.unit_count += 1
        return cls(tokens, turn, is_forced)

    def interrupt(self) -> int:
        """Close the open turn for a forced listen: the id to feed before anything else."""
        self.turn.is_open = False
        self.added.append(self.tokens.turn_eos)
        return self.tokens.turn_eos

    @property
    def wants_choice(self) -> bool:
        """Whether the next id is the model's to choose; otherwise `take(None)` does without."""
        return not (self.is_over or self.is_forced or self._is_last_step)

    @property
    def _is_last_step(self) -> bool:
        return self._step == self.turn.max_tokens - 1

    def take(self, chosen: int | None) -> int | None:
        """Take the model's choice for this step; the id to feed, or None when the unit is over."""
        tokens = self.tokens
        if self._is_last_step:
            return self._end(tokens.chunk_eos)
        token = tokens.listen if chosen is None else chosen
        if token == tokens.listen and self.turn.is_open and not self.is_forced:
            token = tokens.tts_bos  # nobody stops listening in the middle of its own turn
        self.is_listen = token == tokens.listen
        if token in tokens.terminators:
            return self._end(token)
        self.turn.is_open = True
        if self._step and self._is_too_long(token):
            return self._end(tokens.chunk_eos)
        self.added.append(token)
        self.end_of_turn = token == tokens.turn_eos
        if self.end_of_turn:
            self.turn.is_open = False
        if self._step:
            self.said.append(token)
        self._step += 1
        return token

    def closing(self) -> tuple[int, int]:
        """The terminator and the unit end, to be fed when the unit is settled."""
        return self.added[-2], self.added[-1]

    def _is_too_long(self, token: int) -> bool:
        return len(self.tokens.decode([*self.said, token])) >= MAX_UNIT_CHARACTERS

    def _end(self, terminator: int) -> None:
        self.added += [terminator, self.tokens.unit_end]
        self.is_over = True
