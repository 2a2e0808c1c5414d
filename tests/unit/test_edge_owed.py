"""One answer for every append, whatever becomes of its units."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.owed import Owed
from duplane.fabric.v1 import session_pb2


def delta(ordinal: int) -> session_pb2.Delta:
    return session_pb2.Delta(sequence=ordinal, context_token_count=100 + ordinal)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_every_append_is_answered_once_whichever_units_were_dropped(
    unit_counts: list[int], data: st.DataObject
) -> None:
    owed, unit_count = Owed(), sum(unit_counts)
    answered = sorted(data.draw(st.sets(st.integers(0, max(0, unit_count - 1)))))
    if unit_count:  # the newest is never dropped
        answered = sorted({*answered, unit_count - 1})
    end = 0
    for count in unit_counts:
        end += count
        owed.add(end)
    answers = list(owed.take())
    for ordinal in answered if unit_count else []:
        owed.answered(ordinal, delta(ordinal))
        answers += owed.take()
    assert len(answers) == len(unit_counts)
    deltas = [answer for answer in answers if isinstance(answer, session_pb2.Delta)]
    contexts = [answer.context_token_count for answer in deltas]
    assert contexts == sorted(contexts)


def test_a_worker_that_never_answers_owes_no_more_than_the_bound() -> None:
    owed = Owed()
    for end in range(3000):
        owed.add(end + 1)
    assert len(list(owed.take())) == 3000 - 1024
