"""One run with random faults: starts a fabric, calls it, breaks it, and adds up what happened."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from chaos.callers import FAULTS, UNIT_S, Caller, Ledger, Wait
from chaos.fabric import SETTLE_S, WORKER_COUNT, ChaosFabric
from chaos.faults import Fault, Faults
from support.time_limits import until

from duplane.tools.bench.report import percentile

CALLERS = 12
_DIALECTS = ("A", "B", "C")  # an answer in L does not name its unit
_SPARE_SLOTS = 2  # for calls that begin while other slots are being cleaned
# Two workers are enough for all calls, because a fault takes one of them.
_SLOTS = -(-(CALLERS + _SPARE_SLOTS) // (WORKER_COUNT - 1))
# Kinds of keys that stay: at most one for each slot, or a fixed number, or for the time that leases
# can last.
_KEPT_KEYS = frozenset({"arrivals", "barrier", "report", "signing", "slot"})


@dataclass(frozen=True)
class Outcome:
    """What happened in a run. `gaps_s` has, for each kind of fault, the gaps of the calls it hit.

    The gap of a call is its longest time from a unit to the answer, after a worker was lost.
    """

    ledger: Ledger
    fault_count: int
    gaps_s: Mapping[str, Sequence[float]]
    left: str  # slots, leases, tickets and keys that are not clean at the end; empty if all are

    @property
    def counts(self) -> Mapping[str, int]:
        """The counts that must be 0."""
        return {kind: self.ledger.counts[kind] for kind in FAULTS} | {"unclean": bool(self.left)}

    @property
    def gap_p99_s(self) -> float:
        """The 99th percentile of all gaps; 0 without gaps."""
        return _percentile([gap for gaps in self.gaps_s.values() for gap in gaps], 0.99)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        yield f"{'gaps (s)':32}{'calls':>6}{'p50':>7}{'p99':>7}{'longest':>9}"
        every = [gap for gaps in self.gaps_s.values() for gap in gaps]
        for name, gaps in (*sorted(self.gaps_s.items()), ("all", every)):
            shown = "".join(f"{_percentile(gaps, share):7.2f}" for share in (0.5, 0.99))
            yield f"{name:32}{len(gaps):6}{shown}{_percentile(gaps, 1.0):9.2f}"
        longest_s = max((wait.seconds for wait in self.ledger.waits), default=0.0)
        yield f"longest time to an answer: {longest_s:.2f} s"
        counts = self.ledger.counts
        yield f"{counts['units']} units of {counts['calls']} calls, {self.fault_count} faults"
        yield f"units lost {counts['lost']}, doubled {counts['doubled']}," + (
            f" out of order {counts['out of order']}; calls closed {counts['closed']}"
        )
        yield from self.ledger.faults
        yield f"at the end: {self.left or 'slots and keys are clean'}"


def _percentile(values: Sequence[float], share: float) -> float:
    return percentile(sorted(values), share) if values else 0.0


def gaps_of(faults: Sequence[Fault], waits: Sequence[Wait]) -> Mapping[str, Sequence[float]]:
    """Return the gaps of the calls that each kind of fault has hit.

    A client cannot see whether its worker was hit. So as many callers as the workers had are
    chosen: those that waited longest until the next fault.
    """
    gaps_s: dict[str, list[float]] = {}
    for fault, following in pairwise([*faults, Fault("", float("inf"), 0)]):
        longest_s: dict[int, float] = {}
        for wait in waits:
            if fault.at_s - UNIT_S <= wait.sent_s < following.at_s - UNIT_S:
                longest_s[wait.caller] = max(wait.seconds, longest_s.get(wait.caller, 0.0))
        if fault.session_count:
            hit = sorted(longest_s.values(), reverse=True)[: fault.session_count]
            gaps_s.setdefault(fault.name, []).extend(hit)
    return gaps_s


async def run(
    folder: Path,
    seed: int,
    seconds: float,
    every_s: float,
    say: Callable[[str], None],
    *edge_flags: str,
) -> Outcome:
    """Run for `seconds`, with a fault every `every_s`. `folder` gets the logs of the processes."""
    chooser = random.Random(seed)
    ledger = Ledger()
    async with ChaosFabric.running(folder, _SLOTS, *edge_flags) as fabric:
        before = await fabric.keys()
        faults = Faults(fabric, random.Random(chooser.getrandbits(32)), say)
        urls = [f"ws://{edge.address}" for edge in fabric.edges]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(faults.run(seconds - every_s, every_s))
            for index in range(CALLERS):
                dialect = _DIALECTS[index // len(urls) % len(_DIALECTS)]
                own = random.Random(chooser.getrandbits(32))
                caller = Caller(index, urls[index % len(urls)], dialect, own, ledger)
                tasks.create_task(caller.run(time.monotonic() + seconds))
        left = await _left(fabric, before)
    return Outcome(ledger, len(faults.done), gaps_of(faults.done, ledger.waits), left)


async def _left(fabric: ChaosFabric, before: Counter[str]) -> str:
    """Return what is not clean after the last call; an empty text if all is."""
    try:
        await fabric.until_free()
    except TimeoutError:
        return "not all slots are free, or there are leases or tickets"
    left: dict[str, int] = {}

    async def is_clean() -> bool:
        more = await fabric.keys() - before
        left.clear()
        left.update({kind: count for kind, count in more.items() if kind not in _KEPT_KEYS})
        return not left

    with contextlib.suppress(TimeoutError):
        await until(is_clean, SETTLE_S)
    return ", ".join(f"{count} keys {kind}/ too many" for kind, count in left.items())
