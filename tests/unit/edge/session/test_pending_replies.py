"""Every append gets one answer, even if its units are dropped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.session.pending_replies import PendingReplies
from duplane.fabric.v1 import session_pb2


def delta(ordinal: int) -> session_pb2.Delta:
    return session_pb2.Delta(sequence=ordinal, context_token_count=100 + ordinal)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_every_append_is_answered_once_whichever_units_were_dropped(
    unit_counts: list[int], data: st.DataObject
) -> None:
    replies = PendingReplies()
    unit_count = sum(unit_counts)
    answered = sorted(data.draw(st.sets(st.integers(0, max(0, unit_count - 1)))))
    if unit_count:  # the newest unit is never dropped
        answered = sorted({*answered, unit_count - 1})
    end = 0
    for count in unit_counts:
        end += count
        replies.add_append(end)
    answers = replies.ready()
    for ordinal in answered if unit_count else []:
        replies.add_outcome(ordinal, delta(ordinal))
        answers += replies.ready()
    assert len(answers) == len(unit_counts)
    deltas = [answer for answer in answers if isinstance(answer, session_pb2.Delta)]
    contexts = [answer.context_token_count for answer in deltas]
    assert contexts == sorted(contexts)


def test_units_of_one_append_are_joined_in_one_answer() -> None:
    replies = PendingReplies()
    replies.add_append(4)
    listened = session_pb2.Delta(sequence=0, listen=session_pb2.Listen(), context_token_count=3)
    spoken = [
        session_pb2.Delta(
            sequence=sequence,
            speech=session_pb2.Speech(text=text, audio=bytes([sequence]) * 4, sample_count=1),
            context_token_count=10 + sequence,
            token_counts=session_pb2.TokenCounts(output_text_token_count=sequence),
        )
        for sequence, text in ((1, "a "), (2, "word"))
    ]
    last = session_pb2.Delta(
        sequence=3, listen=session_pb2.Listen(), end_of_turn=True, context_token_count=20
    )
    for ordinal, outcome in enumerate((listened, *spoken)):
        replies.add_outcome(ordinal, outcome)
        assert replies.ready() == []
    replies.add_outcome(3, last)
    assert replies.ready() == [
        session_pb2.Delta(
            sequence=3,
            speech=session_pb2.Speech(
                text="a word", audio=bytes([1]) * 4 + bytes([2]) * 4, sample_count=2
            ),
            end_of_turn=True,
            context_token_count=20,
            token_counts=session_pb2.TokenCounts(output_text_token_count=3),
        )
    ]


def test_append_whose_units_all_listened_is_a_listening_answer() -> None:
    replies = PendingReplies()
    replies.add_append(2)
    for ordinal in range(2):
        replies.add_outcome(ordinal, delta(ordinal))
    (answer,) = replies.ready()
    assert answer.HasField("listen")


def test_a_worker_that_never_answers_owes_no_more_than_the_bound() -> None:
    replies = PendingReplies()
    for end in range(3000):
        replies.add_append(end + 1)
    assert len(replies.ready()) == 3000 - 1024
