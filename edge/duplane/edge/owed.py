"""Exactly one answer for every append, in order, however many units it completed. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from duplane.fabric.v1 import session_pb2

Outcome = session_pb2.Delta | session_pb2.Failed


class Owed:
    """Appends that wait for their answer, and the answers of units that wait for their append.

    An append is answered when the last unit it completed is; one that completed none when all
    before it are, by having listened. So is one whose units were dropped. Beyond the bound the
    oldest is answered so as well.
    """

    _LIMIT = 1024

    def __init__(self) -> None:
        self._ends: deque[int] = deque()  # the ordinal after the last unit, for each append
        self._outcomes: deque[tuple[int, Outcome]] = deque()
        self._answered_end = 0
        self._context_token_count = 0

    @property
    def is_full(self) -> bool:
        """Whether another append is more than the bound."""
        return len(self._ends) >= self._LIMIT

    def add(self, end: int) -> None:
        """Take an append, after which `end` units are complete."""
        self._ends.append(end)

    def answered(self, ordinal: int, outcome: Outcome) -> None:
        """Take the answer of one unit."""
        self._outcomes.append((ordinal, outcome))
        self._answered_end = max(self._answered_end, ordinal + 1)

    def take(self) -> Iterator[Outcome]:
        """Yield the answer of each append that has one now."""
        while self._ends and (self._ends[0] <= self._answered_end or len(self._ends) > self._LIMIT):
            end = self._ends.popleft()
            parts: list[Outcome] = []
            while self._outcomes and self._outcomes[0][0] < end:
                parts.append(self._outcomes.popleft()[1])
            outcome = join(parts, self._context_token_count)
            if isinstance(outcome, session_pb2.Delta):
                self._context_token_count = outcome.context_token_count
            yield outcome


def join(parts: Sequence[Outcome], context_token_count: int) -> Outcome:
    """Return one outcome for several units: a failure if one failed, else all they said.

    For none it is to have listened, at `context_token_count`.
    """
    deltas: list[session_pb2.Delta] = []
    for part in parts:
        if isinstance(part, session_pb2.Failed):
            return part
        deltas.append(part)
    if len(deltas) == 1:
        return deltas[0]
    joined = session_pb2.Delta(listen=session_pb2.Listen(), context_token_count=context_token_count)
    speeches = [delta.speech for delta in deltas if delta.WhichOneof("outcome") == "speech"]
    for delta in deltas:
        joined.sequence = delta.sequence
        joined.context_token_count = delta.context_token_count
        joined.end_of_turn |= delta.end_of_turn
        joined.dropped_unit_count += delta.dropped_unit_count
        _add_counts(joined.token_counts, delta.token_counts)
        _add_times(joined.stage_times, delta.stage_times)
    if speeches:
        joined.speech.text = "".join(speech.text for speech in speeches)
        joined.speech.audio = b"".join(speech.audio for speech in speeches)
    return joined


def _add_counts(total: session_pb2.TokenCounts, counts: session_pb2.TokenCounts) -> None:
    for field, count in counts.ListFields():
        setattr(total, field.name, getattr(total, field.name) + count)


def _add_times(total: session_pb2.StageTimes, times: session_pb2.StageTimes) -> None:
    for field, time in times.ListFields():
        stage = getattr(total, field.name)
        stage.FromNanoseconds(stage.ToNanoseconds() + time.ToNanoseconds())
