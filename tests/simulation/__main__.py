"""Simulates fabrics: `python -m simulation --seeds 1000`, or `--seed 7` to repeat one of them."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import sys
import time

from simulation.runs import failure_of, simulate


def collect_rarely() -> None:
    """Let the garbage collector ignore all present objects and examine later objects less often."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def main() -> int:
    """Simulate the seeds of the command line; return 1 if a law is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="simulate this seed only")
    parser.add_argument("--seeds", type=int, default=1000, help="simulate this many, from 1")
    parser.add_argument("--processes", type=int, help="run so many at once; default: one per core")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.seed is not None:
        simulate(options.seed)
        return 0
    begin = time.monotonic()
    with multiprocessing.Pool(options.processes, initializer=collect_rarely) as pool:
        seeds = range(1, options.seeds + 1)
        failures = [one for one in pool.imap_unordered(failure_of, seeds, 8) if one]
    minutes = (time.monotonic() - begin) / 60
    sys.stdout.write("".join(f"{failure}\n" for failure in failures))
    rate = f"{options.seeds / minutes:.0f} seeds a minute"
    sys.stdout.write(f"{options.seeds} seeds, {len(failures)} failures, {rate}\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
