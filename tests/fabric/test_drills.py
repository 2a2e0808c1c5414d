"""One drill of the runbook; `make drills` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest
from drills import fabric_drills


@pytest.mark.slow
async def test_drill_of_workers_that_are_offline(tmp_path: Path) -> None:
    await fabric_drills.worker_offline(tmp_path)
