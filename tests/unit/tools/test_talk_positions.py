"""What `duplane talk` prints while it waits in the queue."""

from __future__ import annotations

from typing import Any

import pytest

from duplane.tools.talk.duplex import print_position


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"position": 2, "estimated_wait_s": 12.5}, "queued: position 2, about 12.5 s\n"),
        (
            {"position": 1, "estimated_wait_s": 0.0, "reason": "no worker serves"},
            "queued: position 1, no worker serves\n",
        ),
    ],
)
def test_a_wait_without_an_estimate_is_explained(
    event: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_position(event)
    assert capsys.readouterr().err == said
