"""`make fuzz`: sends mutated messages to the edge for a given time."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import uvloop
from fuzz.case_runs import Tally, run_cases
from fuzz.cases import DIALECTS
from fuzz.socket_run import SocketRun, rage

_ROUND_S = 20.0  # half of this time is for the pure sessions, half for sockets
_SHOWN_ANSWERS = 6


def main() -> int:
    """Fuzz, print a table, and return the exit code."""
    told = _arguments()
    logging.basicConfig(level=logging.CRITICAL)
    tallies = {dialect: Tally() for dialect in DIALECTS}
    sockets: list[SocketRun] = []
    print(f"seed {told.seed}, {told.minutes:g} minutes", flush=True)
    for seed, for_s in _rounds(told.seed, told.minutes * 60):
        for dialect, tally in tallies.items():
            tally.add(run_cases(seed, dialect, for_s=for_s / 2 / len(DIALECTS)))
        sockets.append(uvloop.run(rage(seed, for_s=for_s / 2)))
    _print_pure(tallies)
    _print_sockets(sockets)
    return _report(told.out, tallies, sockets)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default 1)")
    parser.add_argument(
        "--seed", default=secrets.token_hex(4), help="say the same again (default: drawn)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/fuzz"), help="where faults are written down"
    )
    return parser.parse_args()


def _rounds(seed: str, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield the seed and the duration of each round until the time is used up."""
    end = time.monotonic() + seconds
    number = 0
    while (left := end - time.monotonic()) > 0:
        yield f"{seed}.{number}", min(_ROUND_S, max(left, 2.0))
        number += 1


def _print_pure(tallies: dict[str, Tally]) -> None:
    print(f"\n{'pure':8}{'cases':>10}{'messages':>10}{'mutated':>10}{'per s':>8}  answers")
    for dialect, tally in tallies.items():
        rate = tally.message_count / max(tally.busy_s, 1e-9)
        counts = f"{tally.case_count:10}{tally.message_count:10}{tally.mutated_count:10}{rate:8.0f}"
        print(f"{dialect:8}{counts}  {_shown(tally.answers)}")


def _print_sockets(storms: list[SocketRun]) -> None:
    answers: dict[str, Counter[str]] = {}
    attacks, well_behaved_answers = Counter[str](), Counter[str]()
    for storm in storms:
        attacks += storm.attacks
        well_behaved_answers += storm.well_behaved_answers
        for dialect, told in storm.answers.items():
            answers.setdefault(dialect, Counter()).update(told)
    sessions = sum(storm.session_count for storm in storms)
    sent = sum(storm.message_count for storm in storms)
    rate = sum(storm.sent_count for storm in storms) / sum(storm.busy_s for storm in storms)
    print(f"\nsockets: {sessions} sessions, {sent} messages, {rate:.0f} per s; {_shown(attacks)}")
    for dialect, told in sorted(answers.items()):
        print(f"{dialect:8}{_shown(told)}")
    print(f"witnesses had all their answers: {_shown(well_behaved_answers)}")


def _shown(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common(_SHOWN_ANSWERS))


def _report(folder: Path, tallies: dict[str, Tally], storms: list[SocketRun]) -> int:
    """Write each fault to a file; return the exit code.

    Faults of pure sessions become transcripts.
    """
    written: list[tuple[str, str]] = []
    for dialect, tally in tallies.items():
        written += [(f"{dialect}_{fault.case.name}", fault.transcript) for fault in tally.faults]
        for fault in tally.faults:
            print(f"\nFAULT {fault}")
    for storm in storms:
        written += [(f"sockets_{storm.seed}_{at}", fault) for at, fault in enumerate(storm.faults)]
        for fault in storm.faults:
            print(f"\nFAULT {fault}")
    for name, text in written:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name.replace('/', '_')}.txt"
        file.write_text(text, encoding="utf-8", newline="")
        print(f"written to {file}")
    print(f"\n{len(written)} faults")
    return 1 if written else 0


if __name__ == "__main__":
    sys.exit(main())
