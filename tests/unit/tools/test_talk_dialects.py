"""The replies that `duplane talk` reads from server events."""

from __future__ import annotations

from typing import Any

import pytest

from duplane.tools.talk.dialects import DialectB


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
