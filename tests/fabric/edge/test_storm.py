"""Sends thousands of mutated messages and bad bytes over sockets, the same in every run.

`make fuzz` sends other messages in each run.
"""

from __future__ import annotations

import pytest
from fuzz.socket_run import rage


@pytest.mark.parametrize("seed", ["ci-1", "ci-2"])
async def test_witnesses_miss_nothing_in_a_storm_and_nothing_is_left(seed: str) -> None:
    storm = await rage(seed, sent_count=1600)
    assert not storm.faults, "\n\n".join(storm.faults)
    assert storm.sent_count >= 1600
    assert set(storm.answers) == {"A", "B", "B chat", "C", "D", "E", "H", "L"}
    assert all(storm.attacks[kind] for kind in ("frames", "handshake", "request"))
