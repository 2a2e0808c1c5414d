"""One line of `checkpoint replay`: the name of the comparison, its error and its tolerance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from duplane.worker.model.transfer import download


class Verdict(Enum):
    """How one check ended."""

    OK = "ok"
    FAIL = "FAIL"
    DIFFERS = "differs by design"
    ROUNDED = "not float32"
    SKIPPED = "not replayed"


@dataclass(frozen=True)
class Check:
    """One comparison with a recorded trace.

    `error` is the largest absolute difference. It is 0.0 for equal and `inf` for unequal values of
    exact checks, and `inf` for arrays of different shapes. `note` may hold the reason.
    """

    name: str
    error: float
    tolerance: float
    verdict: Verdict
    note: str = ""


def compare(name: str, got: ArrayLike | Tensor, want: ArrayLike, tolerance: float) -> Check:
    """Compare two arrays of any shape; different shapes or NaN fail."""
    if isinstance(got, Tensor):
        got = download(got.double())
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


def same_texts(name: str, got: Sequence[str], want: Sequence[str]) -> Check:
    """Compare the parts of a text.

    A character of several tokens becomes text with its last token. So a cut between two parts may
    be before or after it: the whole text must be the same, each cut may be off by one character.
    """
    if list(got) == list(want) or len(got) != len(want) or "".join(got) != "".join(want):
        return same(name, list(got), list(want))
    cuts = zip(
        itertools.accumulate(map(len, got)), itertools.accumulate(map(len, want)), strict=True
    )
    if all(abs(ours - theirs) <= 1 for ours, theirs in cuts):
        return differs(name, "an incomplete character is held back at another place")
    return same(name, list(got), list(want))


def skipped(name: str, reason: str) -> Check:
    """Return the check of a recorded trace that was skipped, with what the trace needs."""
    return Check(name, 0.0, 0.0, Verdict.SKIPPED, reason)


def differs(name: str, reason: str) -> Check:
    """Return the check of a trace from which the model differs on purpose."""
    return Check(name, 0.0, 0.0, Verdict.DIFFERS, reason)


def worst(name: str, checks: Sequence[Check]) -> Check:
    """Combine many checks into one: the first failure, else the largest error."""
    failed = [check for check in checks if check.verdict is Verdict.FAIL]
    if failed:
        first = failed[0]
        note = f"{len(failed)} of {len(checks)} differ, first {first.name}: {first.note}"
        return Check(name, first.error, first.tolerance, Verdict.FAIL, note)
    error = max((check.error for check in checks), default=0.0)
    tolerance = max((check.tolerance for check in checks), default=0.0)
    return Check(name, error, tolerance, Verdict.OK, f"{len(checks)} compared")
