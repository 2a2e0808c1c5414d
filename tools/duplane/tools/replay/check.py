"""One line of `checkpoint replay`: what was compared, how far off it was, what was allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike


class Verdict(Enum):
    """How one check ended."""

    OK = "ok"
    FAIL = "FAIL"
    DIFFERS = "differs by design"
    SKIPPED = "not replayed"


@dataclass(frozen=True)
class Check:
    """One comparison with a recorded trace.

    `error` is the largest absolute difference (0.0 for exact things that agree, `inf` for
    those that do not, and for arrays of different shapes); `note` says why, where that helps.
    """

    name: str
    error: float
    tolerance: float
    verdict: Verdict
    note: str = ""


def compare(name: str, got: ArrayLike, want: ArrayLike, tolerance: float) -> Check:
    """Compare two arrays of any shape; different shapes or NaN fail."""
    ours, theirs = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if ours.shape != theirs.shape:
        note = f"shape {ours.shape}, recorded {theirs.shape}"
        return Check(name, float("inf"), tolerance, Verdict.FAIL, note)
    error = float(np.max(np.abs(ours - theirs))) if ours.size else 0.0
    verdict = Verdict.OK if error <= tolerance else Verdict.FAIL
    return Check(name, error, tolerance, verdict)


def same(name: str, got: object, want: object) -> Check:
    """Compare two values that must be equal: ids, lengths, texts, flags."""
    if got == want:
        return Check(name, 0.0, 0.0, Verdict.OK)
    return Check(name, float("inf"), 0.0, Verdict.FAIL, f"got {got!r}, recorded {want!r}"[:300])


def skipped(name: str, reason: str) -> Check:
    """Say that a recorded trace was not looked at, and what it would need."""
    return Check(name, 0.0, 0.0, Verdict.SKIPPED, reason)


def differs(name: str, reason: str) -> Check:
    """Say that the model rightly does not do what the trace records."""
    return Check(name, 0.0, 0.0, Verdict.DIFFERS, reason)


def worst(name: str, checks: Sequence[Check]) -> Check:
    """Fold many checks into one line: the first failure, else the largest error."""
    failed = [check for check in checks if check.verdict is Verdict.FAIL]
    if failed:
        first = failed[0]
        note = f"{len(failed)} of {len(checks)} differ, first {first.name}: {first.note}"
        return Check(name, first.error, first.tolerance, Verdict.FAIL, note)
    error = max((check.error for check in checks), default=0.0)
    tolerance = max((check.tolerance for check in checks), default=0.0)
    return Check(name, error, tolerance, Verdict.OK, f"{len(checks)} compared")
