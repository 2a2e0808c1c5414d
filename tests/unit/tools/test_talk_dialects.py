"""The replies that `duplane talk` reads from server events."""

from __future__ import annotations

from typing import Any

import pytest

from duplane.tools.talk.dialects import DialectB, DialectE


def event(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "response.output.delta", "kind": kind, **more}


REPLIES = [
    (0, event("listen")),
    (1, event("text", text="a", response_id="r")),
    (1, event("audio", audio="", response_id="r")),
    (2, event("text", text="b", response_id="r")),
    (2, event("audio", audio="", response_id="r")),
    (2, event("listen", response_id="r")),
    (3, event("listen")),
]


@pytest.mark.parametrize("is_echoed", [True, False])
def test_units_are_distinguished_with_and_without_echoed_ids(*, is_echoed: bool) -> None:
    dialect = DialectB("", None)
    units = []
    for number, received in REPLIES:
        echo = {"input_id": str(number)} if is_echoed else {}
        units += [reply.unit for reply in dialect.replies(received | echo)]
    assert units == [number for number, _ in REPLIES]


def test_sound_of_e_belongs_to_the_newest_unit_and_the_end_of_a_turn_to_the_last_sound() -> None:
    dialect = DialectE("", None)
    silence = "AAAA" * 16  # 48 bytes: 12 samples
    text = {"type": "response.output_audio_transcript.delta", "delta": "hi"}
    sound = {"type": "response.output_audio.delta", "delta": "AAAA" * 100}

    def done(status: str) -> dict[str, Any]:
        return {"type": "response.done", "response": {"status": status}}

    told: list[tuple[int, str, bool]] = []
    for number, events in enumerate(
        [
            [done("completed")],
            [text, sound],
            [sound],
            [done("completed")],
            [sound, done("cancelled")],
        ]
    ):
        dialect.unit(number, silence, [])
        for event in events:
            told += [(r.unit, r.text, r.end_of_turn) for r in dialect.replies(event)]
    assert told == [
        (1, "hi", False),
        (2, "", False),
        (2, "", True),
        (4, "", False),
        (4, "", False),
    ]
