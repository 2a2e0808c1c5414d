"""The search for the largest number of sessions that a fabric holds. Pure."""

from __future__ import annotations

from collections.abc import Generator

_RESOLUTION = 20  # the search ends when the interval is less than 1/20 of the number


def search(first: int, largest: int) -> Generator[int, bool, int]:
    """Yield numbers of sessions to try; return the largest number that the fabric holds, or 0.

    After each number, the caller sends back whether the fabric held so many sessions. The number
    doubles until the fabric does not hold it. Then each number is halfway between the largest that
    it held and the smallest that it did not hold.
    """
    good = 0
    bad = largest + 1  # a `bad` above `largest` has not been tried
    number = min(first, largest)
    while bad - good > max(1, good // _RESOLUTION):
        if (yield number):
            good = number
        else:
            bad = number
        number = min(2 * good, largest) if bad > largest else (good + bad) // 2
    return good
