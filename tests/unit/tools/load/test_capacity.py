"""The search finds the largest number of sessions that a fabric holds, with few tries."""

from __future__ import annotations

import pytest

from duplane.tools.bench.load.capacity import search


def found(first: int, largest: int, capacity: int) -> tuple[int, list[int]]:
    """Search with a fabric that holds `capacity` sessions; return the result and the tries."""
    searching = search(first, largest)
    tried: list[int] = []
    try:
        number = next(searching)
        while True:
            tried.append(number)
            number = searching.send(number <= capacity)
    except StopIteration as end:
        return end.value, tried


def test_numbers_double_and_then_halve() -> None:
    assert found(1, 1000, 11) == (11, [1, 2, 4, 8, 16, 12, 10, 11])


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 19, 40, 99, 100, 250])
@pytest.mark.parametrize("first", [1, 10, 64])
def test_result_is_within_a_twentieth(capacity: int, first: int) -> None:
    result, tried = found(first, 100, capacity)
    possible = min(capacity, 100)
    assert possible - max(0, possible // 20) <= result <= possible
    assert len(tried) == len(set(tried)) <= 14
    assert result == 0 or result in tried


def test_first_number_is_within_the_largest() -> None:
    assert found(50, 20, 30) == (20, [20])
