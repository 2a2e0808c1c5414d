"""The rules of a duplex unit: which ids are fed, and when the unit and a turn end.

Plain Python over chosen ids, without tensors. Source: `DuplexCapability.streaming_generate` in
`MiniCPMO45/modeling_minicpmo_unified.py` of OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens

MAX_UNIT_CHARACTERS = 28
"""Length that the text of a unit stays below: a token that would reach it ends the unit instead."""


@dataclass
class TurnState:
    """The state that the rules of one unit pass on to the next unit of the conversation.

    `unit_count` is the number of complete units.
    """

    force_listen_count: int
    max_tokens: int
    is_open: bool = False
    unit_count: int = 0

    @property
    def must_listen(self) -> bool:
        """True if the next unit is one of the first units, which must listen."""
        return self.unit_count < self.force_listen_count


@dataclass(frozen=True)
class UnitRecord:
    """One unit in the context: the number of its rows, and the ids of its text.

    `number` is the number of the unit in its conversation, from 0. Without `is_fed`, the rows are
    counted, but not in the cache, because a rebuild has not fed the unit.
    """

    number: int
    row_count: int
    is_listen: bool
    ids: tuple[int, ...]
    is_fed: bool = True


@dataclass
class UnitState:
    """The state machine of one unit: until `is_over`, call `advance` with the chosen id.

    The model must choose an id only if `needs_choice`; otherwise the rules determine the id.

    - `is_forced`: the unit must listen.
    - `token_ids`: all ids that the unit adds to the context, including the closing ids.
    - `text_ids`: the ids of the unit's text and speech. These are all ids that are fed after the
      first one, which only marks that the model speaks.
    - `closing_ids`: the terminator and the unit end, which are fed after the unit.
    """

    tokens: Tokens
    turn: TurnState
    is_forced: bool
    token_ids: list[int] = field(default_factory=list[int])
    text_ids: list[int] = field(default_factory=list[int])
    closing_ids: tuple[int, ...] = ()
    is_listen: bool = False
    end_of_turn: bool = False
    is_over: bool = False
    _step: int = 0

    @property
    def needs_choice(self) -> bool:
        """Whether the model chooses the next id."""
        return not (self.is_over or self.is_forced) and self._step < self.turn.max_tokens - 1

    @property
    def is_begin(self) -> bool:
        """Whether the next choice is the first one of the unit."""
        return not self._step

    @classmethod
    def retraced(
        cls,
        tokens: Tokens,
        turn: TurnState,
        token_ids: Sequence[int],
        chosen_ids: Sequence[int],
        *,
        is_interrupting: bool,
    ) -> UnitState | None:
        """Apply the rules to the recorded choices of a unit; return the state at the unit's end.

        `token_ids` are the ids that the unit added to the context, `chosen_ids` the choices that
        the repetition penalty counted. Returns None if these choices do not give these ids.
        """
        choices = deque(chosen_ids)
        unit = cls(tokens, turn, is_forced=not choices and tokens.listen in token_ids)
        if is_interrupting:
            unit.interrupt()
        while not unit.is_over and len(unit.token_ids) < len(token_ids):
            expected = token_ids[len(unit.token_ids)]
            unit.advance(_choice(tokens, expected, choices) if unit.needs_choice else None)
        is_same = unit.is_over and tuple(unit.token_ids) == tuple(token_ids)
        return unit if is_same and not choices else None

    def interrupt(self) -> int:
        """End the open turn for a forced listen; return the id to feed before all others."""
        self.turn.is_open = False
        self.token_ids.append(self.tokens.turn_eos)
        return self.tokens.turn_eos

    def advance(self, chosen: int | None) -> int | None:
        """Apply the rules to the chosen id, which is ignored unless the unit needs a choice.

        Returns the id to feed, or None if the unit is over.
        """
        tokens, turn = self.tokens, self.turn
        token = tokens.listen if self.is_forced or chosen is None else chosen
        if self._step == turn.max_tokens - 1:
            token = tokens.chunk_eos
        elif token == tokens.listen and turn.is_open and not self.is_forced:
            token = tokens.tts_bos  # the model cannot listen before it has ended its turn
        self.is_listen = token == tokens.listen
        if token not in tokens.terminators:
            turn.is_open = True
            is_text = self._step > 0
            if is_text and len(tokens.decode([*self.text_ids, token])) >= MAX_UNIT_CHARACTERS:
                token = tokens.chunk_eos
        if token in tokens.terminators:
            self.closing_ids = (token, tokens.unit_end)
            self.token_ids += self.closing_ids
            self.is_over = True
            turn.unit_count += 1
            return None
        if self._step:
            self.text_ids.append(token)
        self.token_ids.append(token)
        self.end_of_turn = token == tokens.turn_eos
        if self.end_of_turn:
            turn.is_open = False
        self._step += 1
        return token


def _choice(tokens: Tokens, expected: int, choices: deque[int]) -> int | None:
    """Return the choice that the rules turned into the id `expected`, or None if no choice fits.

    `choices` also has the ids that the rules dropped. It lacks the choices that the penalty does
    not count: the end of a chunk, and the end-of-sequence id if `listen_top_k` decided.
    """
    if expected == tokens.eos and (not choices or choices[0] != tokens.eos):
        return tokens.eos
    if choices:
        return choices.popleft()
    return tokens.chunk_eos if expected == tokens.chunk_eos else None
