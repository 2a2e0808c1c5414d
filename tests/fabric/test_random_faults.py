"""Calls survive random faults of real processes: a short run of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.run import run

SEED = 1
SECONDS = 42.0  # seven faults
EVERY_S = 6.0
FAILOVER_S = (
    "30"  # a loaded machine moves sessions slowly; the command judges the time, not the test
)


@pytest.mark.slow
async def test_no_unit_is_lost_doubled_or_out_of_order_and_no_call_is_closed(
    tmp_path: Path,
) -> None:
    outcome = await run(tmp_path, SEED, SECONDS, EVERY_S, print, "--failover-s", FAILOVER_S)
    print(*outcome.lines(), sep="\n")
    assert not any(outcome.counts.values()), outcome.counts
    assert outcome.ledger.counts["units"] > 0
    assert outcome.fault_count > 0
