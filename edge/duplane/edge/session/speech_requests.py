"""The texts that a client wants the model to speak, from the client's event to their end. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from duplane.edge.dialects.actions import Speak
from duplane.fabric.bounds import MAX_SPEECH_REQUESTS
from duplane.fabric.v1 import session_pb2

UNSUPPORTED = "UNSUPPORTED"
_MAX_ENDED = 16  # requests with an end that another edge may have to tell again


class SpeechEnd(NamedTuple):
    """The end of a request."""

    speak: Speak
    result: session_pb2.SpeechResult


class SpeechNews(NamedTuple):
    """What an outcome says about requests: those that are now in the conversation, and ends."""

    added: Sequence[Speak] = ()
    ended: Sequence[SpeechEnd] = ()


NO_NEWS = SpeechNews()


@dataclass(slots=True)
class SpeechRequest:
    """A request without an end.

    `sequence` is the number of the unit that was sent with it; None if it waits for a unit. A
    request that `is_added` is part of the conversation, and of its journal.
    """

    speak: Speak
    sequence: int | None = None
    is_added: bool = False


class NotedSpeech(NamedTuple):
    """A request of units that another edge has sent, without its text, which the worker has.

    `ended` is the number of the unit with its end; None if it has none.
    """

    number: int
    sequence: int
    kind: str
    input_id: str | None
    ended: int | None = None


class SpeechRequests:
    """The requests of one conversation without an end: at most `MAX_SPEECH_REQUESTS`.

    A request is sent with the next unit. If the session leaves a worker, the requests of units
    without an outcome are sent again.
    """

    def __init__(self) -> None:
        self.unfinished: dict[int, SpeechRequest] = {}  # by their number at the worker
        self._next_number = 0
        self._ended: deque[NotedSpeech] = deque(maxlen=_MAX_ENDED)

    @property
    def is_full(self) -> bool:
        """Whether another request would exceed the bound."""
        return len(self.unfinished) >= MAX_SPEECH_REQUESTS

    def add(self, speak: Speak) -> None:
        """Add a request, unless `is_full`."""
        self.unfinished[self._next_number] = SpeechRequest(speak)
        self._next_number += 1

    def attach(self, unit: session_pb2.Unit) -> None:
        """Add the requests that wait to a unit that is sent for the first time."""
        for number, request in self.unfinished.items():
            if request.sequence is None:
                request.sequence = unit.sequence
                unit.speech_requests.add(number=number, text=request.speak.text)

    def answered(self, outcome: session_pb2.Delta | session_pb2.Failed) -> SpeechNews:
        """Return what the outcome of a unit says, and forget the requests that have ended.

        If a unit fails, its requests fail, too. Older units without an outcome were dropped by the
        worker, which has kept their requests for the next unit, and reports them if that one fails.
        """
        before = dict(self.unfinished)
        news = self._news(outcome)
        ended = before.keys() - self.unfinished.keys()
        self._ended += (_noted(one, before[one], outcome.sequence) for one in sorted(ended))
        return news

    def _news(self, outcome: session_pb2.Delta | session_pb2.Failed) -> SpeechNews:
        if isinstance(outcome, session_pb2.Failed):
            return SpeechNews(ended=[*self._reported(outcome), *self._failed(outcome)])
        ended: list[SpeechEnd] = []
        for result in outcome.speech_results:
            if request := self.unfinished.get(result.number):
                ended.append(SpeechEnd(request.speak, result))
                if result.outcome == session_pb2.SPEECH_OUTCOME_REFUSED:
                    request.is_added = True  # it is not reported as added
        added: list[Speak] = []
        for request in self.unfinished.values():
            is_there = request.sequence is not None and request.sequence <= outcome.sequence
            if is_there and not request.is_added:
                request.is_added = True
                added.append(request.speak)
        for result in outcome.speech_results:
            self.unfinished.pop(result.number, None)
        return SpeechNews(added, ended)

    def _reported(self, failed: session_pb2.Failed) -> Iterator[SpeechEnd]:
        for result in failed.speech_results:
            if request := self.unfinished.pop(result.number, None):
                yield SpeechEnd(request.speak, result)

    def _failed(self, failed: session_pb2.Failed) -> Sequence[SpeechEnd]:
        numbers = [
            number
            for number, request in self.unfinished.items()
            if request.sequence == failed.sequence and not request.is_added
        ]
        return [self._refuse(number, failed.reason, failed.message) for number in numbers]

    def refuse_all(self) -> Sequence[SpeechEnd]:
        """End all requests, because the model cannot speak given texts."""
        fault = "the model cannot speak given texts"
        return [self._refuse(number, UNSUPPORTED, fault) for number in list(self.unfinished)]

    def _refuse(self, number: int, reason: str, message: str) -> SpeechEnd:
        refused = session_pb2.SPEECH_OUTCOME_REFUSED
        result = session_pb2.SpeechResult(
            number=number, outcome=refused, reason=reason, message=message
        )
        return SpeechEnd(self.unfinished.pop(number).speak, result)

    def noted(self) -> tuple[int, Sequence[NotedSpeech]]:
        """Return the next number, and the requests that were sent, for a note to another edge."""
        open_ones = (_noted(*one) for one in self.unfinished.items())
        return self._next_number, [*self._ended, *(one for one in open_ones if one.sequence >= 0)]

    def restore(self, next_number: int, noted: Sequence[NotedSpeech], begin: int) -> None:
        """Go on with the requests of another edge, before the outcome of unit `begin`."""
        self._next_number = next_number
        for one in noted:
            if one.ended is None or one.ended >= begin:
                speak = Speak("", one.kind, one.input_id)
                self.unfinished[one.number] = SpeechRequest(
                    speak, one.sequence, is_added=one.sequence < begin
                )

    def forget_failed(self) -> None:
        """Forget requests of another edge whose units have failed: all outcomes have come."""
        self.unfinished = {number: one for number, one in self.unfinished.items() if one.is_added}

    def take_back(self, kept: Collection[int | None]) -> None:
        """Let the requests of lost units wait again: of units without an outcome, except `kept`."""
        for request in self.unfinished.values():
            if not request.is_added and request.sequence not in kept:
                request.sequence = None


def _noted(number: int, request: SpeechRequest, ended: int | None = None) -> NotedSpeech:
    sequence = -1 if request.sequence is None else request.sequence
    return NotedSpeech(number, sequence, request.speak.kind, request.speak.input_id, ended)
