"""Pending replies: every append gets exactly one reply, in the order of the appends. Pure.

Only dialect C replies to appends; A and B reply to units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from duplane.fabric.v1 import session_pb2

Outcome = session_pb2.Delta | session_pb2.Failed


class PendingReplies:
    """The appends without a reply, and the outcomes of their units so far.

    An append gets its reply when the last unit that it completed has an outcome. An append gets a
    listening reply if it completed no unit, or if all its units were dropped; this reply, too,
    waits for the replies of all earlier appends. If more appends wait than the bound allows, the
    oldest one gets its reply immediately.
    """

    LIMIT = 1024

    def __init__(self) -> None:
        self._ends: deque[int] = deque()  # for each append: number of units complete after it
        self._outcomes: deque[tuple[int, Outcome]] = deque()
        self._finished_count = 0  # number of units up to the last one with an outcome
        self.context_token_count = 0  # tokens at the last outcome, or at the opening

    @property
    def is_full(self) -> bool:
        """Whether another append would exceed the bound."""
        return len(self._ends) >= self.LIMIT

    @property
    def held_count(self) -> int:
        """The number of appends without a reply, or of outcomes that wait if they are more."""
        return max(len(self._ends), len(self._outcomes))

    @property
    def ends(self) -> Sequence[int]:
        """For each append without a reply, the number of units that were complete after it."""
        return tuple(self._ends)

    def restore(self, ends: Sequence[int], finished_count: int) -> None:
        """Begin with appends without a reply; `finished_count` units have an outcome."""
        self._ends = deque(ends)
        self._finished_count = finished_count

    def add_append(self, unit_count: int) -> None:
        """Add an append. After it, `unit_count` units are complete in total."""
        self._ends.append(unit_count)

    def recut(self, counts: Sequence[int]) -> None:
        """Follow a new cut of all units: where n units were complete, now `counts[n]` are."""
        self._ends = deque(counts[end] for end in self._ends)

    def add_outcome(self, ordinal: int, outcome: Outcome) -> None:
        """Add the outcome of one unit."""
        self._outcomes.append((ordinal, outcome))
        self._finished_count = max(self._finished_count, ordinal + 1)

    def ready(self) -> list[Outcome]:
        """Remove and return the replies that are complete now."""
        replies: list[Outcome] = []
        while self._ends and (
            self._ends[0] <= self._finished_count or len(self._ends) > self.LIMIT
        ):
            end = self._ends.popleft()
            parts: list[Outcome] = []
            while self._outcomes and self._outcomes[0][0] < end:
                parts.append(self._outcomes.popleft()[1])
            is_one = len(parts) == 1
            outcome = parts[0] if is_one else join_outcomes(parts, self.context_token_count)
            if isinstance(outcome, session_pb2.Delta):
                self.context_token_count = outcome.context_token_count
            replies.append(outcome)
        return replies


def join_outcomes(parts: Sequence[Outcome], context_token_count: int) -> Outcome:
    """Return one outcome for several units: the first failure, or else their joined output.

    Without units the outcome is to listen, with `context_token_count` tokens in the context.
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
        joined.speech.sample_count = sum(speech.sample_count for speech in speeches)
    return joined


def _add_counts(total: session_pb2.TokenCounts, counts: session_pb2.TokenCounts) -> None:
    for field, count in counts.ListFields():
        setattr(total, field.name, getattr(total, field.name) + count)


def _add_times(total: session_pb2.StageTimes, times: session_pb2.StageTimes) -> None:
    for field, time in times.ListFields():
        stage = getattr(total, field.name)
        stage.FromNanoseconds(stage.ToNanoseconds() + time.ToNanoseconds())
