"""The search for the largest number of sessions that a fabric holds. Pure."""

from __future__ import annotations

from collections.abc import Generator

_RESOLUTION = 20  # the search ends when the interval is less than 1/20 of the number


def search(first: int, largest: int) -> Generator[int, bool, int]:
    """Yield numbers of sessions to try; return the largest number that holds, or 0.

    The caller sends back whether each number holds. The number doubles until a number does not
    hold. Then each number is halfway between the largest that held and the smallest that did not.
    """
    good, bad = 0, largest + 1  # a `bad` above `largest` has not been tried
    number = min(first, largest)
    while bad - good > max(1, good // _RESOLUTION):
        if (yield number):
            good = number
        else:
            bad = number
        number = min(2 * good, largest) if bad > largest else (good + bad) // 2
    return good
