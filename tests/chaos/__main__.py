"""`make chaos`: calls a fabric of real processes while random faults happen to it.

Exits with 1 if a unit was lost, doubled or out of order, if a call was closed, if slots or keys
were left, or if a gap was too long; with 2 if there is no etcd.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import sys
from pathlib import Path

import pytest
from chaos.run import run

GAP_S = 2.5
"""Limit of the 99th percentile of the gaps, for a quiet machine."""


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    """Run, print the ledger, and return the exit code."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default 600)")
    parser.add_argument("--every-s", type=float, default=10.0, help="from fault to fault")
    parser.add_argument("--seed", type=int, help="repeat these faults (default: drawn)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/chaos"), help="folder of the processes' logs"
    )
    told = parser.parse_args()
    seed = secrets.randbits(32) if told.seed is None else told.seed
    shutil.rmtree(told.out, ignore_errors=True)
    told.out.mkdir(parents=True)
    _say(f"seed {seed}, {told.seconds:g} s, logs in {told.out}")
    try:
        outcome = asyncio.run(run(told.out, seed, told.seconds, told.every_s, _say))
    except pytest.skip.Exception as missing:  # there is no etcd
        _say(str(missing))
        return 2
    for line in outcome.lines():
        _say(line)
    if outcome.gap_p99_s > GAP_S:
        _say(f"the 99th percentile of the gaps is over {GAP_S:g} s")
    return 1 if any(outcome.counts.values()) or outcome.gap_p99_s > GAP_S else 0


if __name__ == "__main__":
    sys.exit(main())
