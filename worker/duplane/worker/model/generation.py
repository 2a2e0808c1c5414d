"""The text of a batch of units: choose, take, feed, until every unit is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from duplane.worker.model.faults import alive, attempt, each
from duplane.worker.model.language_model import LanguageModel
from duplane.worker.model.probe import Probe
from duplane.worker.model.running_unit import RunningUnit
from duplane.worker.model.sampling import Decision, TextSampling
from duplane.worker.model.types import UnitFailure


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
        self._feed(units, [unit.rules.interrupt() for unit in units])

    def run(self, units: Sequence[RunningUnit], logits: Tensor) -> Iterator[RunningUnit]:
        """Generate from `logits` [units, ids]; yield each unit as soon as it is over, or lost."""
        while units:
            chosen = self._choose(units, logits)
            fed = [
                None if unit.failure else unit.rules.take(chosen.get(unit.slot)) for unit in units
            ]
            yield from (unit for unit, token in zip(units, fed, strict=True) if token is None)
            going = [
                (unit, token) for unit, token in zip(units, fed, strict=True) if token is not None
            ]
            units = [unit for unit, _ in going]
            logits = self._feed(units, [token for _, token in going])
            yield from (unit for unit in units if unit.failure)
            units = alive(units)

    def _choose(self, units: Sequence[RunningUnit], logits: Tensor) -> dict[int, int]:
        """The model's choice by slot, for every unit whose rules leave it one."""
        asking = [unit for unit in alive(units) if unit.rules.wants_choice]
        rows = {unit.slot: row for row, unit in enumerate(units)}

        def decide(some: Sequence[RunningUnit]) -> list[tuple[int, Decision]]:
            own = logits if len(some) == len(units) else logits[[rows[u.slot] for u in some]]
            sources = [unit.conversation.uniforms for unit in some]
            return self._sampling.choose([unit.slot for unit in some], own, sources)

        chosen: dict[int, int] = {}
        for unit, (token, decision) in each(attempt("choice", asking, decide)):
            if decision is Decision.NOT_FINITE:
                message = "the logits are not finite"
                unit.failure = UnitFailure(unit.slot, "NOT_FINITE", message, is_fatal=True)
            chosen[unit.slot] = token
            if self._probe is not None:
                self._probe.decided(unit.slot, logits[rows[unit.slot]], token)
        return chosen

    def _feed(self, units: Sequence[RunningUnit], ids: Sequence[int]) -> Tensor:
        """Feed one id per unit; the logits that follow for those it went well for, [units, ids]."""
        tokens = {unit.slot: token for unit, token in zip(units, ids, strict=True)}

        def feed(some: Sequence[RunningUnit]) -> tuple[Tensor, Tensor]:
            counts = [(unit.slot, 1) for unit in some]
            return self._llm.feed(counts, self._llm.embed([tokens[unit.slot] for unit in some]))

        done = attempt("decode", units, feed, cache=self._llm.cache)
        for unit, state in each((some, hidden.unbind()) for some, (hidden, _) in done):
            if len(unit.rules.said) > len(unit.hidden):
                unit.hidden.append(state)
            if self._probe is not None:
                self._probe.fed(unit.slot, tokens[unit.slot], state)
        return joined([logits for _, (_, logits) in done])


def joined(logits: Sequence[Tensor]) -> Tensor:
    """The rows of all of these, [rows, ids]; without a copy where it is one."""
    if not logits:
        return torch.empty(0)
    return logits[0] if len(logits) == 1 else torch.cat(list(logits))
