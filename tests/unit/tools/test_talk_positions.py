"""What `duplane talk` prints while it waits in the queue."""

from __future__ import annotations

import pytest

from duplane.client import QueuePlace
from duplane.tools.talk.duplex import print_position


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (QueuePlace(2, 2, 12.5), "queued: position 2, about 12.5 s\n"),
        (
            QueuePlace(1, 1, None, reason="no worker serves"),
            "queued: position 1, no worker serves\n",
        ),
        (QueuePlace(1, 1, None), "queued: position 1, for an unknown time\n"),
    ],
)
def test_a_wait_without_an_estimate_is_explained(
    place: QueuePlace, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_position(place)
    assert capsys.readouterr().err == said
