"""The text of a batch of units: choose, take, feed, until every unit is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from duplane.worker.model.conversation import Conversation
from duplane.worker.model.duplex import UnitRules
from duplane.worker.model.intake import UnitContent
from duplane.worker.model.language_model import LanguageModel
from duplane.worker.model.probe import Probe
from duplane.worker.model.sampling import Decision, TextSampling


@dataclass
class RunningUnit:
    """One unit on its way through a batch.

    `is_interrupting` means that it cuts off a turn. `hidden` holds one state per id of
    `rules.said`. `is_broken` means that the model's output was not finite, so the unit and its
    conversation are lost.
    """

    slot: int
    conversation: Conversation
    rules: UnitRules
    content: UnitContent
    is_interrupting: bool = False
    hidden: list[Tensor] = field(default_factory=list[Tensor])
    is_broken: bool = False


class TextGeneration:
    """Runs the decode steps of several slots together."""

    def __init__(
        self, llm: LanguageModel, sampling: TextSampling, probe: Probe | None = None
    ) -> None:
        self._llm = llm
        self._sampling = sampling
        self._probe = probe

    def interrupt(self, units: Sequence[RunningUnit]) -> None:
        """Close the open turns of these units."""
        if units:
            self._feed(units, [unit.rules.interrupt() for unit in units])

    def run(self, units: Sequence[RunningUnit], logits: Tensor) -> Iterator[RunningUnit]:
        """Generate from `logits` [units, ids]; yield each unit as soon as it is over."""
        while units:
            chosen = self._choose(units, logits)
            fed = [
                None if unit.is_broken else unit.rules.take(token)
                for unit, token in zip(units, chosen, strict=True)
            ]
            yield from (unit for unit, token in zip(units, fed, strict=True) if token is None)
            going = [
                (unit, token) for unit, token in zip(units, fed, strict=True) if token is not None
            ]
            units = [unit for unit, _ in going]
            if units:
                logits = self._feed(units, [token for _, token in going])

    def _choose(self, units: Sequence[RunningUnit], logits: Tensor) -> list[int | None]:
        """The model's choice for every unit, None where the rules leave it none."""
        asking = [row for row, unit in enumerate(units) if unit.rules.wants_choice]
        chosen: list[int | None] = [None] * len(units)
        if not asking:
            return chosen
        rows = logits if len(asking) == len(units) else logits[asking]
        decisions = self._sampling.choose(
            [units[row].slot for row in asking],
            rows,
            [units[row].conversation.uniforms for row in asking],
        )
        for place, (row, (token, decision)) in enumerate(zip(asking, decisions, strict=True)):
            units[row].is_broken = decision is Decision.NOT_FINITE
            chosen[row] = token
            if self._probe is not None:
                self._probe.decided(units[row].slot, rows[place], token)
        return chosen

    def _feed(self, units: Sequence[RunningUnit], ids: Sequence[int]) -> Tensor:
        """Feed one id per unit; the logits that follow, [units, ids]."""
        counts = [(unit.slot, 1) for unit in units]
        hidden, logits = self._llm.feed(counts, self._llm.embed(ids))
        for unit, token, state in zip(units, ids, hidden.unbind(), strict=True):
            if len(unit.rules.said) > len(unit.hidden):
                unit.hidden.append(state)
            if self._probe is not None:
                self._probe.fed(unit.slot, token, state)
        return logits
