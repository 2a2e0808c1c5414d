"""Context windows: choose the units to drop from a long context, and the text of them to keep.

This module only counts rows and ids; the KV cache moves the rows.

A conversation's context is `[prompt head][previous][prompt tail][units]`. Mode `basic` drops the
oldest units when the context has more rows than a high mark, until it has at most as many as a low
mark. Mode `context` keeps at most a fixed number of units. It appends the model's text in dropped
units to `previous`, which begins with a marker. If `previous` grows too long, its oldest text is
dropped. Source: class `StreamDecoder` of `MiniCPMO45/utils.py` in OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from duplane.worker.models.minicpm_o.duplex.unit_state import UnitRecord
from duplane.worker.models.minicpm_o.llm.kv_cache import Slide
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.minicpm_o.types import WindowRules
from duplane.worker.models.types import WindowMode

PREVIOUS_MARK = "\n\nprevious: "
"""The marker before the text of dropped units; the model was trained with it."""


@dataclass
class Window:
    """The rows of one conversation's context, part by part.

    - `head_rows`: the number of rows of the prompt before `previous`.
    - `previous`: empty, or the marker and the text of dropped units.
    - `tail`: the ids of the prompt after `previous`.
    - `units`: the units in the context, oldest first.
    - `preserved_rows`: the number of rows before the first unit.
    - `spare_rows`: the number of rows reserved for the marker, which is added to the context with
      the first dropped text.
    """

    rules: WindowRules
    tokens: Tokens
    head_rows: int
    tail: tuple[int, ...]
    previous: tuple[int, ...] = field(default=(), init=False)
    units: list[UnitRecord] = field(default_factory=list[UnitRecord])
    preserved_rows: int = field(init=False)
    spare_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.preserved_rows = self.head_rows + len(self.tail)
        adds_mark = self.rules.sliding_window_mode is WindowMode.CONTEXT
        self.spare_rows = len(PREVIOUS_MARK) if adds_mark else 0

    @property
    def is_on(self) -> bool:
        """Whether units are ever dropped."""
        return self.rules.sliding_window_mode is not WindowMode.OFF

    @property
    def length(self) -> int:
        """The number of rows of the context."""
        return self.preserved_rows + sum(unit.row_count for unit in self.units)

    @property
    def has_unfed(self) -> bool:
        """Whether units in the context have no rows in the cache."""
        return bool(self.units) and not self.units[0].is_fed

    def slide(self, limit: int = sys.maxsize) -> Slide | None:
        """Drop old units as the rules and a `limit` of rows demand. Return the change of context.

        Returns None if there is nothing to drop or the window is off. The kept text of dropped
        units needs rows too, so the context may still exceed `limit`. Then call this again. Before
        the first fed unit, the change of context has no meaning.
        """
        rules, length, least = self.rules, self.length, 0
        match rules.sliding_window_mode:
            case WindowMode.OFF:
                return None
            case WindowMode.BASIC:
                if length <= min(limit, rules.basic_window_high_tokens):
                    return None
                limit = min(limit, rules.basic_window_low_tokens)
            case WindowMode.CONTEXT:
                least = len(self.units) - rules.context_max_units
        count, kept = 0, self.preserved_rows
        while count < len(self.units) and (count < least or length > limit):
            length -= self.units[count].row_count
            kept += self.units[count].row_count if self.units[count].is_fed else 0
            count += 1
        if not count:
            return None
        dropped, self.units = self.units[:count], self.units[count:]
        fresh = self.previous
        if rules.sliding_window_mode is WindowMode.CONTEXT:
            fresh = self._with_words_of(dropped)
        if fresh == self.previous:
            return Slide(kept, self.preserved_rows, self.preserved_rows)
        ids = (*fresh, *self.tail)
        same = _common(ids, (*self.previous, *self.tail))
        self.previous, self.preserved_rows, self.spare_rows = fresh, self.head_rows + len(ids), 0
        return Slide(kept, self.preserved_rows, self.head_rows + same, ids[same:])

    def _with_words_of(self, dropped: Sequence[UnitRecord]) -> tuple[int, ...]:
        """Return `previous` with these units' text added. Cut the oldest text if it is too long."""
        said = [
            token
            for unit in dropped
            if not unit.is_listen
            for token in unit.ids
            if token not in self.tokens.special
        ]
        if not said:
            return self.previous
        mark = self.tokens.encode(PREVIOUS_MARK)
        words = [*self.previous[len(mark) :], *said]
        surplus = max(0, len(words) - self.rules.context_previous_max_tokens)
        return (*mark, *words[surplus:])


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(ours, theirs, strict=False)
    return next(
        (index for index, (a, b) in enumerate(pairs) if a != b), min(map(len, (ours, theirs)))
    )
