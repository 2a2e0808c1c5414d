"""The replies that `duplane talk` reads from server events."""

from __future__ import annotations

from typing import Any

from duplane.tools.talk.dialects import DialectE


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
