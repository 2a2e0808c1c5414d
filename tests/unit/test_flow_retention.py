"""Which frames survive a chunk, against the plain lists that the reference cuts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duplane.worker.model.flow_retention import (
    RECENT_FRAMES,
    Moves,
    estimator_moves,
    frame_moves,
    token_moves,
)

CAPACITY, STRIDE = 1000, 2

prompts = st.integers(1, 200).map(lambda tokens: tokens * STRIDE)
chunks = st.lists(st.integers(1, 28), min_size=1, max_size=12)


def cut(entries: list[str], prompt: int) -> list[str]:
    """Cut a list as the reference cuts its caches."""
    if len(entries) > prompt + RECENT_FRAMES:
        return entries[:prompt] + entries[-RECENT_FRAMES:]
    return entries


def apply(columns: list[str], moves: Moves) -> None:
    moved = [columns[source] for source in moves.source]
    for target, entry in zip(moves.target, moved, strict=True):
        columns[target] = entry


def fresh(count: int, capacity: int) -> list[str]:
    """Columns that hold a prompt of `count` entries up to `capacity`."""
    return ["?"] * (capacity - count) + [f"p{n}" for n in range(count)] + ["?"] * 60


@given(prompts, chunks)
def test_frames_are_kept_as_the_prompt_and_the_most_recent(prompt: int, turn: list[int]) -> None:
    columns, kept = fresh(prompt, CAPACITY), [f"p{n}" for n in range(prompt)]
    for number, tokens in enumerate(turn):
        new = [f"{number}.{n}" for n in range(tokens * STRIDE)]
        columns[CAPACITY : CAPACITY + len(new)] = new
        apply(columns, frame_moves(len(kept), len(new), prompt, CAPACITY))
        kept = cut(kept + new, prompt)
        assert columns[CAPACITY - len(kept) : CAPACITY] == kept


@given(prompts, chunks)
def test_tokens_are_kept_as_if_they_were_frames_stored_twice(prompt: int, turn: list[int]) -> None:
    capacity = CAPACITY // STRIDE
    count = prompt // STRIDE
    columns, packed = fresh(count, capacity), [f"p{n}" for n in range(count)] * STRIDE
    for number, tokens in enumerate(turn):
        new = [f"{number}.{n}" for n in range(tokens)]
        columns[capacity : capacity + len(new)] = new
        seen = packed[: len(packed) // STRIDE]
        apply(columns, token_moves(len(seen), len(new), prompt, capacity, STRIDE))
        packed = cut((seen + new) * STRIDE, prompt)
        front = packed[: len(packed) // STRIDE]
        assert columns[capacity - len(front) : capacity] == front


@given(prompts, chunks)
def test_the_estimator_keeps_the_same_frames_in_any_order(prompt: int, turn: list[int]) -> None:
    columns, kept = fresh(prompt, CAPACITY), [f"p{n}" for n in range(prompt)]
    places = list(range(CAPACITY - prompt, CAPACITY))
    for number, tokens in enumerate(turn):
        new = [f"{number}.{n}" for n in range(tokens * STRIDE)]
        columns[CAPACITY : CAPACITY + len(new)] = new
        places, moves = estimator_moves(places, len(new), prompt, CAPACITY)
        apply(columns, moves)
        kept = cut(new + kept, prompt)
        assert [columns[place] for place in places] == kept
        assert sorted(places) == list(range(CAPACITY - len(kept), CAPACITY))
