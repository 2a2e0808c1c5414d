"""The ledger of `make chaos` finds every kind of wrong answer, and computes the gaps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from chaos.callers import Units, Wait, WrongAnswerError
from chaos.faults import KINDS, Fault, kinds
from chaos.run import gaps_of

from duplane.tools.talk.dialects import UnitReply

CONTEXT = (19, 31, 43, 55)  # tokens after each unit


def reply(unit: int, tokens: int, text: str = "", audio: str = "") -> UnitReply:
    return UnitReply(
        unit, is_speech=bool(text), is_whole=True, text=text, audio=audio, context=tokens
    )


LISTEN, SPEAK, THIRD = reply(0, CONTEXT[0]), reply(1, CONTEXT[1], "two "), reply(2, CONTEXT[2])


def units(sent_count: int = 4) -> Units:
    found = Units([False, True, False, False])
    found.sent_s = [10.0, 11.0, 12.0, 13.0][:sent_count]
    return found


def test_answers_in_order_are_accepted_with_their_parts() -> None:
    ledger = units()
    sound = reply(1, CONTEXT[1], audio="AAAA")
    assert [ledger.answered(one) for one in (LISTEN, SPEAK, sound, THIRD)] == [10, 11, None, 12]
    assert ledger.answered_count == 3


@pytest.mark.parametrize(
    ("answers", "kind", "count"),
    [
        ((LISTEN, LISTEN), "doubled", 1),
        ((LISTEN, SPEAK, LISTEN), "doubled", 1),
        ((LISTEN, THIRD), "lost", 1),  # B names the unit
        ((LISTEN, reply(1, CONTEXT[2])), "lost", 1),  # A and C: the context shows it
        ((reply(3, CONTEXT[3]),), "lost", 3),
        ((reply(0, CONTEXT[0], "one "),), "out of order", 1),
        ((LISTEN, reply(1, CONTEXT[1])), "out of order", 1),
        ((LISTEN, reply(1, CONTEXT[0], "one ")), "out of order", 1),
    ],
)
def test_wrong_answer_is_found(answers: Sequence[UnitReply], kind: str, count: int) -> None:
    ledger = units()
    for answer in answers[:-1]:
        ledger.answered(answer)
    with pytest.raises(WrongAnswerError) as wrong:
        ledger.answered(answers[-1])
    assert (wrong.value.kind, wrong.value.count) == (kind, count)


def test_answer_to_a_unit_that_was_not_sent_is_surplus() -> None:
    ledger = units(sent_count=1)
    ledger.answered(LISTEN)
    with pytest.raises(WrongAnswerError, match="again"):
        ledger.answered(SPEAK)


def test_gaps_are_the_longest_waits_of_as_many_callers_as_were_hit() -> None:
    faults = [Fault("kill worker", 20.0, 2), Fault("kill etcd", 30.0, 0)]
    waits = [
        Wait(caller=0, sent_s=19.5, seconds=1.5),  # was on its way when the worker was killed
        Wait(caller=0, sent_s=21.0, seconds=0.5),
        Wait(caller=1, sent_s=20.2, seconds=0.3),
        Wait(caller=2, sent_s=20.4, seconds=0.1),  # was at another worker
        Wait(caller=3, sent_s=10.0, seconds=9.0),  # before the fault
        Wait(caller=3, sent_s=30.0, seconds=9.0),  # after the next one
    ]
    assert gaps_of(faults, waits) == {"kill worker": [1.5, 0.3]}


def test_same_seed_gives_the_same_faults_and_each_kind_once() -> None:
    count = len(KINDS)
    first, second = (kinds(random.Random(7)) for _ in range(2))
    drawn = [next(first) for _ in range(2 * count)]
    assert drawn == [next(second) for _ in range(2 * count)]
    assert all(kind in drawn[:count] for kind in KINDS)
