"""What `duplane talk` makes of what servers say."""

from __future__ import annotations

from typing import Any

import pytest

from duplane.tools.talk_dialects import DialectB


def event(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "response.output.delta", "kind": kind, **more}


SAID = [
    (0, event("listen")),
    (1, event("text", text="a", response_id="r")),
    (1, event("audio", audio="", response_id="r")),
    (2, event("text", text="b", response_id="r")),
    (2, event("audio", audio="", response_id="r")),
    (2, event("listen", response_id="r")),
    (3, event("listen")),
]


@pytest.mark.parametrize("is_echoed", [True, False])
def test_units_are_told_apart_whether_the_server_echoes_their_names_or_not(
    *, is_echoed: bool
) -> None:
    dialect = DialectB("", None)
    units = []
    for number, told in SAID:
        echo = {"input_id": str(number)} if is_echoed else {}
        units += [reply.unit for reply in dialect.replies(told | echo)]
    assert units == [number for number, _ in SAID]
