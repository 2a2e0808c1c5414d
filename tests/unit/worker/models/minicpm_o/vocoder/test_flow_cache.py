"""The frames in the caches after a chunk, compared with the lists of the reference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duplane.worker.models.minicpm_o.vocoder.flow_cache import (
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
    """Return cache columns whose prompt of `count` entries ends at column `capacity`."""
    return ["?"] * (capacity - count) + [f"p{n}" for n in range(count)] + ["?"] * 60


@given(prompts, chunks)
def test_frame_layers_keep_the_prompt_and_recent_frames(prompt: int, turn: list[int]) -> None:
    columns = fresh(prompt, CAPACITY)
    kept = [f"p{n}" for n in range(prompt)]
    for number, tokens in enumerate(turn):
        new = [f"{number}.{n}" for n in range(tokens * STRIDE)]
        columns[CAPACITY : CAPACITY + len(new)] = new
        apply(columns, frame_moves(len(kept), len(new), prompt, CAPACITY))
        kept = cut(kept + new, prompt)
        assert columns[CAPACITY - len(kept) : CAPACITY] == kept


@given(prompts, chunks)
def test_token_layers_keep_the_first_part_of_the_repeated_tokens(
    prompt: int, turn: list[int]
) -> None:
    capacity = CAPACITY // STRIDE
    count = prompt // STRIDE
    columns = fresh(count, capacity)
    packed = [f"p{n}" for n in range(count)] * STRIDE
    for number, tokens in enumerate(turn):
        new = [f"{number}.{n}" for n in range(tokens)]
        columns[capacity : capacity + len(new)] = new
        seen = packed[: len(packed) // STRIDE]
        apply(columns, token_moves(len(seen), len(new), prompt, capacity, STRIDE))
        packed = cut((seen + new) * STRIDE, prompt)
        front = packed[: len(packed) // STRIDE]
        assert columns[capacity - len(front) : capacity] == front


@given(prompts, chunks)
def test_the_estimator_keeps_the_frames_of_the_reference(prompt: int, turn: list[int]) -> None:
    columns = fresh(prompt, CAPACITY)
    kept = [f"p{n}" for n in range(prompt)]
    listed = list(range(CAPACITY - prompt, CAPACITY))
    for number, tokens in enumerate(turn):
        new = [f"{number}.{n}" for n in range(tokens * STRIDE)]
        columns[CAPACITY : CAPACITY + len(new)] = new
        listed, moves = estimator_moves(listed, len(new), prompt, CAPACITY)
        apply(columns, moves)
        kept = cut(new + kept, prompt)
        assert [columns[column] for column in listed] == kept
        assert sorted(listed) == list(range(CAPACITY - len(kept), CAPACITY))
