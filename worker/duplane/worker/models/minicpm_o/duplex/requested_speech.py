"""Texts that callers ask a conversation to speak: their ids, and what of them is not spoken yet.

The model divides a text into units itself: it decides after each id whether the text of the unit
ends. So the words keep the pace of its speech.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from duplane.worker.models.minicpm_o.duplex.unit_state import (
    MAX_UNIT_CHARACTERS,
    TurnState,
    UnitState,
)
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.types import (
    INVALID_FIELD,
    MAX_SPEECH_REQUESTS,
    SpeechOutcome,
    SpeechRequest,
    SpeechResult,
    StateChange,
    Unit,
    refused_speech,
    too_many,
)

MIN_TOKENS = 3
"""Lowest limit of the tokens of a unit with which a text can be spoken: a unit begins and ends with
a mark."""
_REPLACEMENT = "\ufffd"


class UnspeakableError(ValueError):
    """A text cannot be spoken. The message says why."""


def speech_ids(tokens: Tokens, text: str) -> tuple[int, ...]:
    """Return the ids with which the model speaks `text`. Raises `UnspeakableError`.

    These are ids that the model can choose itself. Each other id, and each id that would not fit
    into a unit, is replaced by the ids of its characters.
    """
    ids = tokens.encode(" ".join(text.split()))
    if marks := [token for token in ids if token in tokens.marks]:
        name = tokens.decode(marks[:1], skip_special=False)
        raise UnspeakableError(f"has the name of a special token, {name}")
    spelled = [part for token in ids for part in _spelled(tokens, token)]
    if not spelled:
        raise UnspeakableError("is empty")
    return tuple(spelled)


def _spelled(tokens: Tokens, token: int) -> Iterable[int]:
    text = tokens.decode([token])
    if token not in tokens.unspeakable and len(text) < MAX_UNIT_CHARACTERS:
        return (token,)
    parts = [part for character in text for part in tokens.encode(character)]
    if _REPLACEMENT in text or any(part in tokens.unspeakable for part in parts):
        raise UnspeakableError(f"has characters that the model cannot speak, {text!r}")
    return parts


def prepared_speech(tokens: Tokens, unit: Unit) -> Unit:
    """Return a unit whose requests have their ids. Those that cannot be spoken are refused."""
    accepted: list[SpeechRequest] = []
    results: list[SpeechResult] = []
    for index, request in enumerate(unit.speech):
        try:
            ids = speech_ids(tokens, request.text)
        except UnspeakableError as error:
            path = f"speech_requests[{index}].text"
            results.append(refused_speech(request.number, INVALID_FIELD, str(error), path))
        else:
            accepted.append(replace(request, ids=ids))
    return replace(unit, speech=tuple(accepted), speech_results=(*unit.speech_results, *results))


class Required(NamedTuple):
    """The id that a unit must have next. If `may_end`, the model may end the unit before it."""

    token: int
    may_end: bool = False


@dataclass
class RequestedSpeech:
    """The requests of one conversation that are not finished, oldest first.

    Each has its number and the ids that are not spoken yet, with the end of the turn. `is_begun`
    means that the open turn speaks the oldest one. At most `MAX_SPEECH_REQUESTS` are kept; more are
    refused.
    """

    requests: deque[tuple[int, tuple[int, ...]]] = field(
        default_factory=deque[tuple[int, tuple[int, ...]]]
    )
    is_begun: bool = False

    def add(
        self, tokens: Tokens, turn: TurnState, requests: Iterable[SpeechRequest]
    ) -> Iterator[SpeechResult]:
        """Add requests. Yield the results of those that are refused."""
        for request in requests:
            if turn.max_tokens < MIN_TOKENS:
                fault = f"are not possible with at most {turn.max_tokens} tokens per unit"
                yield refused_speech(request.number, INVALID_FIELD, fault, "speech_requests")
            elif len(self.requests) >= MAX_SPEECH_REQUESTS:
                yield too_many(request.number)
            else:
                self.requests.append((request.number, (*request.ids, tokens.turn_eos)))

    def end(self) -> list[SpeechResult]:
        """End all requests because of a forced listen."""
        results = [SpeechResult(number, SpeechOutcome.INTERRUPTED) for number, _ in self.requests]
        self.requests.clear()
        self.is_begun = False
        return results

    def due(self, turn: TurnState) -> int | None:
        """Return the number of the request that the next unit speaks; None if there is none.

        A request waits until the model has ended a turn of its own.
        """
        is_due = self.requests and (self.is_begun or not turn.is_open)
        return self.requests[0][0] if is_due else None

    def required(self, tokens: Tokens, unit: UnitState) -> Required:
        """Return the next id of a unit that speaks the oldest request.

        The unit has at least one id of the text, so that each unit makes progress.
        """
        if not unit.token_ids:
            return Required(tokens.speak)
        if unit.end_of_turn:
            return Required(tokens.chunk_eos)
        return Required(self.requests[0][1][len(unit.text_ids)], may_end=bool(unit.text_ids))

    def spoken(self, count: int) -> list[SpeechResult]:
        """Remove the first `count` ids of the oldest request, which a unit has spoken.

        Returns the result of the request if it has no more ids.
        """
        number, ids = self.requests.popleft()
        self.is_begun = count < len(ids)
        if not self.is_begun:
            return [SpeechResult(number, SpeechOutcome.SPOKEN)]
        self.requests.appendleft((number, ids[count:]))
        return []

    def repeat(self, tokens: Tokens, change: StateChange, text_ids: Sequence[int]) -> bool:
        """Apply what a past unit has changed. `text_ids` is its text.

        Returns False if no unit can have changed this.
        """
        if change.ended_requests:
            self.end()
        for number, ids in change.requests:
            *text, last = ids or (-1,)
            is_text = text and max(text) < len(tokens)
            if not is_text or tokens.unspeakable.intersection(text) or last != tokens.turn_eos:
                return False
            if len(self.requests) >= MAX_SPEECH_REQUESTS:
                return False
            self.requests.append((number, ids))
        if not change.was_requested:
            return True
        count = len(text_ids)
        is_next = self.requests and self.requests[0][1][:count] == tuple(text_ids)
        if not (is_next and count):
            return False
        self.spoken(count)
        return True
