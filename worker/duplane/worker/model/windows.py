"""Context windows: which units leave a context that has grown, and what stays of them.

Pure bookkeeping over row counts and ids; the rows themselves are moved by the decoder's cache.

A conversation's context is `[prompt head][previous][prompt tail][units]`. `basic` drops the
oldest units when the context has more rows than a high mark, until it has at most as many as a
low mark. `context` keeps a number of units; what was said in those it drops is kept as text, the
`previous`, behind a marker, and the newest part of it where it grows too long.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from duplane.worker.model.checkpoint import CheckpointError
from duplane.worker.model.checkpoint import field as read_field
from duplane.worker.model.duplex import UnitRecord
from duplane.worker.model.tokens import Tokens
from duplane.worker.model.types import ConversationOptions, OptionError, WindowMode

PREVIOUS_MARK = "\n\nprevious: "
"""What stands before the text of dropped units; the model was trained with it."""


@dataclass(frozen=True)
class WindowRules:
    """How one conversation's context is kept small; the names are those of the options."""

    sliding_window_mode: WindowMode = WindowMode.OFF
    basic_window_high_tokens: int = 4000
    basic_window_low_tokens: int = 3500
    context_max_units: int = 24
    context_previous_max_tokens: int = 500

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> WindowRules:
        """Read what generation_config.json has of the names; raises `CheckpointError`."""
        default = cls()
        mode = read_field(config, "sliding_window_mode", str, default.sliding_window_mode.value)
        numbers = {name: read_field(config, name, int, getattr(default, name)) for name in _NUMBERS}
        try:
            rules = cls(WindowMode(mode), **numbers)
            ConversationOptions(**{name: getattr(rules, name) for name in _NAMES})
            rules.check()
        except ValueError as error:
            raise CheckpointError(f"generation_config.json: {error}") from error
        return rules

    def chosen(self, options: ConversationOptions) -> WindowRules:
        """These rules with what `options` say otherwise; raises `OptionError`."""
        said = {name: getattr(options, name) for name in _NAMES}
        rules = WindowRules(
            **{name: getattr(self, name) if said[name] is None else said[name] for name in _NAMES}
        )
        rules.check()
        return rules

    def check(self) -> None:
        """Raise `OptionError` for marks that contradict each other."""
        if self.basic_window_low_tokens > self.basic_window_high_tokens:
            raise OptionError(
                "basic_window_low_tokens",
                f"is {self.basic_window_low_tokens}, more than basic_window_high_tokens, "
                f"{self.basic_window_high_tokens}",
            )


_NAMES = tuple(entry.name for entry in fields(WindowRules))
_NUMBERS = _NAMES[1:]


@dataclass(frozen=True)
class Slide:
    """One change of a context: the rows from `kept` on move to `target`, then `ids` are fed.

    `ids` take the rows from `start` to `target`; none means that nothing else changed.
    """

    kept: int
    target: int
    start: int
    ids: tuple[int, ...] = ()


@dataclass
class Window:
    """The rows of one conversation's context, part by part.

    `head_rows` and `tail` are the prompt before and behind the place of `previous`, which holds
    the marker and what follows it, or nothing. `units` are those in the context, oldest first.
    """

    rules: WindowRules
    tokens: Tokens
    head_rows: int
    tail: tuple[int, ...]
    previous: tuple[int, ...] = ()
    units: list[UnitRecord] = field(default_factory=list[UnitRecord])

    @property
    def is_on(self) -> bool:
        """Whether units are ever dropped."""
        return self.rules.sliding_window_mode is not WindowMode.OFF

    @property
    def spare_rows(self) -> int:
        """Rows that the marker may yet take, before the text it introduces replaces more."""
        is_marked = self.rules.sliding_window_mode is not WindowMode.CONTEXT or self.previous
        return 0 if is_marked else len(PREVIOUS_MARK)

    @property
    def preserved_rows(self) -> int:
        """Rows before the first unit."""
        return self.head_rows + len(self.previous) + len(self.tail)

    @property
    def length(self) -> int:
        """All rows of the context."""
        return self.preserved_rows + sum(unit.row_count for unit in self.units)

    def slide(self, limit: int = sys.maxsize) -> Slide | None:
        """Drop the units that have to go, for the rules and for at most `limit` rows.

        None if there is nothing to drop, or nothing is dropped in this conversation. What is
        kept of their text may take up to as many rows as they had, so there may be more to do.
        """
        count = self._surplus(limit)
        if not count:
            return None
        kept = self.preserved_rows + sum(unit.row_count for unit in self.units[:count])
        dropped, self.units = self.units[:count], self.units[count:]
        before = self.previous
        if self.rules.sliding_window_mode is WindowMode.CONTEXT:
            self.previous = self._with_words_of(dropped)
        if self.previous == before:
            return Slide(kept, self.preserved_rows, self.preserved_rows)
        fresh = (*self.previous, *self.tail)
        same = _common(fresh, (*before, *self.tail))
        return Slide(kept, self.preserved_rows, self.head_rows + same, fresh[same:])

    def _surplus(self, limit: int) -> int:
        """How many of the oldest units have to go."""
        rules, length, count, least = self.rules, self.length, 0, 0
        match rules.sliding_window_mode:
            case WindowMode.OFF:
                return 0
            case WindowMode.BASIC:
                if length <= min(limit, rules.basic_window_high_tokens):
                    return 0
                limit = min(limit, rules.basic_window_low_tokens)
            case WindowMode.CONTEXT:
                least = len(self.units) - rules.context_max_units
        while count < len(self.units) and (count < least or length > limit):
            length -= self.units[count].row_count
            count += 1
        return count

    def _with_words_of(self, dropped: Sequence[UnitRecord]) -> tuple[int, ...]:
        """The previous text, with what was said in these units behind it."""
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
    """How many ids are the same at the beginning of both."""
    pairs = zip(ours, theirs, strict=False)
    return next(
        (index for index, (a, b) in enumerate(pairs) if a != b), min(map(len, (ours, theirs)))
    )
