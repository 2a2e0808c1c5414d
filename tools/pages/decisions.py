"""The section of the protocol page about the decisions of the model in each unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

_HEAD = """\
## Why the model listens, and when to drop speech

In each unit the model decides whether it listens or speaks. `listen_probability` is the
probability, from 0 to 1, that the first draw of the unit chooses to listen, with all settings of
the session. It is absent if the unit had to listen (`force_listen`, or one of the first
`force_listen_count` units), if nothing is drawn (`decode_mode` `greedy`), and from models that do
not report it. In an open turn the model cannot listen before its turn has ended, so there a draw of
listening continues the turn.

If the model listens before the speech of its turn is complete, the turn has ended, and the rest of
its speech never comes. A client should then drop the speech that it has not played yet. After the
usual end of a turn it should play the rest. The table shows where each dialect tells this.
"""


class _Shown(NamedTuple):
    probability: str = "not shown"
    end: str = "not shown"
    interruption: str = "not shown"


_SHOWN: Mapping[str, _Shown] = {
    "A": _Shown(
        "`metrics.listen_probability` of `response.listen` and `response.output_audio.delta`",
        "`end_of_turn` of `response.output_audio.delta`",
        "`interrupted` of `response.listen`, with `end_of_turn`",
    ),
    "B": _Shown(
        "`metrics.listen_probability` of each `response.output.delta`",
        "a `listen` with `response_id`",
        "a `listen` with `response_id` and `interrupted`",
    ),
    "B chat": _Shown("no units", "`response.done`", "no units"),
    "C": _Shown(
        "`listen_probability` of `result`",
        "`end_of_turn` of a `result` with speech",
        "`interrupted` of `result`, with `is_listen` and `end_of_turn`",
    ),
    "D": _Shown("no units", "`done`", "no units"),
    "E": _Shown(
        "not shown",
        "`response.done` with the status `completed`",
        "`response.done` with the reason `turn_detected`",
    ),
    "H": _Shown("no units", "`turn_done`", "no units"),
    "L": _Shown("not shown", "no turns", "no turns: silence follows"),
    "gRPC": _Shown(
        "`Delta.listen_probability`; `Listen.is_forced` if the unit had to listen",
        "`Delta.end_of_turn`",
        "`Delta.interrupted_turn`, with `end_of_turn`",
    ),
}


def decision_section(names: Iterable[str]) -> Iterator[str]:
    """Yield the section, with a row for each of these dialects and for the gRPC contract."""
    yield _HEAD
    yield "| dialect | probability of listening | end of a turn | drop what is not played |"
    yield "| --- | --- | --- | --- |"
    for name in (*names, "gRPC"):
        yield f"| {' | '.join((name.replace(' ', ', '), *_SHOWN.get(name, _Shown())))} |"
    yield (
        "\nIn traces, the spans `edge.unit` and `worker.unit` have these attributes:"
        " `duplane.unit.listen_probability`, `duplane.unit.is_forced` (true if the unit had to"
        " listen) and `duplane.unit.is_interruption` (true if the model listened amid its turn).\n"
    )
