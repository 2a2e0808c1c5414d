"""Finds out whether a session depends on a field of a client's event.

The session is replayed without the field and with another value, and the results are compared. If
the session refuses the other value, this does not count as an effect: a session may check a field
and then not use it. A change of the lists of settings without effect (`ignored_init_fields`,
`ignored_fields`) does not count either.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import orjson
from support.protocols.transcript_replay import PureReplay
from support.protocols.transcripts import Step, Transcript

from duplane.edge.dialects.dialect import Phase

_IGNORED = ("ignored_init_fields", "ignored_fields")
_DRAWN = re.compile(r"(?:resp|sess)_[0-9a-f]{12}")  # ids that differ in each replay


class _Recording(PureReplay):
    """Records the messages of a session to client and worker, without comparing them."""

    def __init__(self, transcript: Transcript) -> None:
        self.sent: list[object] = []
        super().__init__(transcript)

    def _server(self, step: Step) -> None:
        pass

    def _edge(self, step: Step) -> None:
        pass

    def _ends(self, step: Step) -> None:
        self.sent.append(self.session.close_code)

    def _moved(self, step: Step, before: Phase) -> None:
        super()._moved(step, before)
        for event in self.moves[-1].told:
            self.sent.append({key: event[key] for key in event if key not in _IGNORED})
        self.sent += [str(request) for request in (*self.turns, *self.requests)]
        for queue in (self.events, self.turns, self.requests):
            queue.clear()


@cache
def _outcome(transcript: Transcript) -> str:
    recording = _Recording(transcript)
    try:
        recording.run()
    except AssertionError as error:  # the changed session contradicts a later line
        recording.sent.append(str(error))
    names: dict[str, str] = {}
    return _DRAWN.sub(
        lambda drawn: names.setdefault(drawn[0], f"id {len(names)}"), repr(recording.sent)
    )


def has_effect(transcript: Transcript, step: Step, path: str) -> bool:
    """Return whether the session depends on the field `path` of the event in `step`."""
    before = _outcome(transcript)
    if _outcome(_replaced(transcript, step, path, _removed)) != before:
        return True
    after = _outcome(_replaced(transcript, step, path, _altered))
    return after != before and after.count("error") <= before.count("error")


Change = Callable[[Any, str], None]  # changes the value of an existing key


def _replaced(transcript: Transcript, step: Step, path: str, change: Change) -> Transcript:
    """Return the transcript with one event changed at a path."""
    event = orjson.loads(step.rest)
    _apply(event, path, change)
    line = replace(step, rest=orjson.dumps(event).decode())
    steps = tuple(line if other is step else other for other in transcript.steps)
    return replace(transcript, steps=steps)


def _apply(part: Any, path: str, change: Change) -> None:
    """Apply a change at a path; `[]` stands for the items of a list."""
    first, _, rest = path.partition(".")
    key = first.removesuffix("[]")
    if not isinstance(part, dict) or key not in part:
        return
    if not rest:
        change(part, key)
        return
    for item in part[key] if key != first and isinstance(part[key], list) else [part[key]]:
        _apply(item, rest, change)


def _removed(part: dict[str, Any], key: str) -> None:
    del part[key]


def _altered(part: dict[str, Any], key: str) -> None:
    value = part[key]
    part[key] = [_other(item) for item in value] if isinstance(value, list) else _other(value)


def _other(value: Any) -> Any:
    """Return another value of the same type. JSON objects and @-words stay unchanged."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value if value.startswith("@") else f"{value}x"
    return value
