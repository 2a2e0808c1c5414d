"""The requests to speak of a scripted conversation: each unit speaks one word of the oldest one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import orjson

from duplane.worker.models.types import (
    MAX_SPEECH_REQUESTS,
    SpeechOutcome,
    SpeechResult,
    Unit,
    UnitOutput,
    too_many,
)

Waiting = list[tuple[int, list[str]]]

STATE = b"scripted"
"""The state of a unit. Requests that are not finished follow, as JSON."""


def unfinished(state: bytes) -> Waiting:
    """Return the requests in the state of a unit."""
    rest = state.removeprefix(STATE)
    return orjson.loads(rest) if rest.startswith(b"[") else []


@dataclass
class ScriptedSpeech:
    """The requests of one conversation that are not finished, each with its words that are left.

    They wait and end as those of MiniCPM-o, but a turn of the model itself has no end.
    """

    waiting: Waiting = field(default_factory=Waiting)

    def apply(
        self, unit: Unit, output: UnitOutput, speak: Callable[[str], UnitOutput]
    ) -> UnitOutput:
        """Return the model's own `output`, or else what it says if it has to `speak` a word."""
        waiting = self.waiting
        if not (waiting or unit.speech):
            return output
        results: list[SpeechResult] = []
        if unit.force_listen:
            interrupted = SpeechOutcome.INTERRUPTED
            results += [SpeechResult(number, interrupted) for number, _ in waiting]
            waiting.clear()
        for request in unit.speech:
            if len(waiting) < MAX_SPEECH_REQUESTS:
                waiting.append((request.number, request.text.split()))
            else:
                results.append(too_many(request.number))
        if waiting and not unit.force_listen:
            number, words = waiting[0]
            output = replace(speak(f"{words.pop(0)} "), speech_request=number)
            if not words:
                del waiting[0]
                output = replace(output, end_of_turn=True)
                results.append(SpeechResult(number, SpeechOutcome.SPOKEN))
        state = STATE + orjson.dumps(waiting) if waiting else STATE
        return replace(output, state=state, speech_results=tuple(results))
