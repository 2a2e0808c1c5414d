"""The search for the largest number of sessions that a fabric holds. Pure."""

from __future__ import annotations

from collections.abc import Generator

_RESOLUTION = 20  # the search ends when the next number to try is less than 1/20 higher


def search(first: int, largest: int) -> Generator[int, bool, int]:
    """Yield numbers to try, and take for each whether it holds; return the largest that does.

    Numbers double until one does not hold; then the interval is halved. Returns 0 if none holds.
    """
    good, bad = 0, largest + 1  # `bad` is not tried yet while it is above `largest`
    number = min(first, largest)
    while bad - good > max(1, good // _RESOLUTION):
        if (yield number):
            good = number
        else:
            bad = number
        number = min(2 * good, largest) if bad > largest else (good + bad) // 2
    return good
