"""`checkpoint replay`: every check of a directory of recorded traces, one line each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from duplane.tools.golden_replay import audio, chat, duplex, token2wav, tts, vision
from duplane.tools.golden_replay.check import Check, Verdict, rounded
from duplane.tools.golden_replay.target import CPU_TARGET, ReplayTarget
from duplane.worker.models.minicpm_o import precision

Checks = Callable[[Path, ReplayTarget], Iterator[Check]]

PARTS: Mapping[str, Checks] = {
    "audio": audio.checks,
    "vision": vision.checks,
    "tts": tts.checks,
    "token2wav": token2wav.checks,
    "duplex": duplex.checks,
    "chat": chat.checks,
}

UNFORCED = ("chat",)
"""Parts that use the ids that the model itself chooses: after an id that rounding has changed, all
that follows is different. The other parts are not affected, or are forced to the recorded ids."""

log = logging.getLogger(__name__)


def replay_traces(
    golden: Path, parts: Mapping[str, Checks] = PARTS, target: ReplayTarget = CPU_TARGET
) -> int:
    """Run all parts over the directory, print a line per check, return the exit code.

    The directory holds `checkpoint/ audio/ units/ sessions/ token2wav/`, or some of these folders.
    The exit code is 1 if a check fails, if a part cannot run, or if there is nothing to check.
    Tolerances are for float32. In another dtype the relative errors have a bound of their own, and
    the parts that are `UNFORCED` print their errors and do not fail.
    """
    # Loading the whole model would configure the precision, but most parts are loaded alone.
    precision.configure(target.device)
    counts = dict.fromkeys(Verdict, 0)
    print(f"{'check':<56} {'error':>9} {'allowed':>9}  verdict")
    for name, checks in parts.items():
        for check in _run(name, checks, golden, target):
            counts[check.verdict] += 1
            print(_line(check), flush=True)
    total = sum(counts.values()) - counts[Verdict.SKIPPED]
    if total == 0:
        print(f"nothing to check in {golden}")
        return 1
    print(f"{total} checks: " + ", ".join(f"{n} {kind.value}" for kind, n in counts.items()))
    return 1 if counts[Verdict.FAIL] else 0


def _run(name: str, checks: Checks, golden: Path, target: ReplayTarget) -> Iterator[Check]:
    try:
        for check in checks(golden, target):
            if not target.is_exact and name not in UNFORCED:
                check = rounded(check, target.relative_tolerance)
            elif not target.is_exact and check.verdict is Verdict.FAIL:
                check = replace(check, verdict=Verdict.ROUNDED)
            yield check
    except Exception as error:  # an unexpected error ends this part only
        log.exception("%s broke off", name)
        note = f"broke off: {type(error).__name__}: {error}"
        yield Check(name, float("inf"), 0.0, Verdict.FAIL, note[:300])


def _line(check: Check) -> str:
    numbers = f"{check.error:>9.2e} {check.tolerance:>9.1e}"
    return f"{check.name:<56} {numbers}  {check.verdict.value:<17} {check.note}".rstrip()
