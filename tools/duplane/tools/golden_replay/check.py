"""One check of `checkpoint replay`: the name of the comparison, its error and its tolerance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from duplane.worker.models.minicpm_o.transfer import download


class Verdict(Enum):
    """The result of one check."""

    OK = "ok"
    FAIL = "FAIL"
    DIFFERS = "differs by design"
    ROUNDED = "not float32"
    SKIPPED = "not replayed"


@dataclass(frozen=True)
class Check:
    """One comparison with a recorded trace.

    `error` is the largest absolute difference, or `inf` if the shapes differ. In an exact check,
    `error` is 0.0 if the values are equal and `inf` if not. `note` may hold the reason. `relative`
    is the root mean square of the differences as a share of that of the recorded values, or None if
    the check failed and compares no values.
    """

    name: str
    error: float
    tolerance: float
    verdict: Verdict
    note: str = ""
    relative: float | None = None


def compare(name: str, got: ArrayLike | Tensor, want: ArrayLike, tolerance: float) -> Check:
    """Compare two arrays of any shape. The check fails if the shapes differ or a value is NaN."""
    if isinstance(got, Tensor):
        got = download(got.double())
    ours, theirs = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if ours.shape != theirs.shape:
        note = f"shape {ours.shape}, recorded {theirs.shape}"
        return Check(name, float("inf"), tolerance, Verdict.FAIL, note)
    error = float(np.max(np.abs(ours - theirs))) if ours.size else 0.0
    verdict = Verdict.OK if error <= tolerance else Verdict.FAIL
    size = max(float(np.linalg.norm(theirs)), 1e-9)
    relative = float(np.linalg.norm(ours - theirs)) / size
    return Check(name, error, tolerance, verdict, relative=relative)


def same(name: str, got: object, want: object) -> Check:
    """Compare two values that must be equal: ids, lengths, texts, flags."""
    if got == want:
        return Check(name, 0.0, 0.0, Verdict.OK)
    return Check(name, float("inf"), 0.0, Verdict.FAIL, f"got {got!r}, recorded {want!r}"[:300])


def same_texts(name: str, got: Sequence[str], want: Sequence[str]) -> Check:
    """Compare the parts of a text.

    The whole text must be the same. But each boundary between two parts may be off by one
    character: if a character has several tokens, either part may contain it.
    """
    if list(got) == list(want) or len(got) != len(want) or "".join(got) != "".join(want):
        return same(name, list(got), list(want))
    cuts = zip(
        itertools.accumulate(map(len, got)), itertools.accumulate(map(len, want)), strict=True
    )
    if all(abs(ours - theirs) <= 1 for ours, theirs in cuts):
        return differs(name, "a character of several tokens is in another part")
    return same(name, list(got), list(want))


def rounded(check: Check, allowed: float) -> Check:
    """Judge a check that fails in float32 by the largest relative error of another dtype.

    A check of values that must be equal still fails, and so do values that are not finite.
    """
    if check.verdict is not Verdict.FAIL or check.relative is None:
        return check
    verdict = Verdict.ROUNDED if check.relative <= allowed else Verdict.FAIL
    note = f"relative error {check.relative:.2g}, {allowed:g} is allowed; {check.note}"
    return replace(check, verdict=verdict, note=note.rstrip("; "))


def skipped(name: str, reason: str) -> Check:
    """Return a check that was skipped; `reason` says what the trace needs."""
    return Check(name, 0.0, 0.0, Verdict.SKIPPED, reason)


def differs(name: str, reason: str) -> Check:
    """Return a check whose values differ from the trace on purpose."""
    return Check(name, 0.0, 0.0, Verdict.DIFFERS, reason)


def worst(name: str, checks: Sequence[Check]) -> Check:
    """Combine many checks into one: the first that failed, else the one with the largest error."""
    failed = [check for check in checks if check.verdict is Verdict.FAIL]
    if failed:
        first = failed[0]
        note = f"{len(failed)} of {len(checks)} differ, first {first.name}: {first.note}"
        shares = [check.relative for check in failed]
        exact = any(share is None for share in shares)
        relative = None if exact else max(share for share in shares if share is not None)
        return Check(name, first.error, first.tolerance, Verdict.FAIL, note, relative)
    error = max((check.error for check in checks), default=0.0)
    tolerance = max((check.tolerance for check in checks), default=0.0)
    return Check(name, error, tolerance, Verdict.OK, f"{len(checks)} compared")
