"""Passes of fixed sizes of the LLM: any rows of any slots, each launch with one upload."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.model.fake_cuda import DEVICE, Way, elsewhere

from duplane.tools.bench.launches import attend_to_pages
from duplane.worker.models.minicpm_o.llm import language_model
from duplane.worker.models.minicpm_o.llm.language_model import LanguageModel
from duplane.worker.models.minicpm_o.llm.pages import CacheFullError

IDS, SLOTS, CAPACITY = 50, 4, 40
CONFIG = {
    "vocab_size": IDS,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def build(device: str = "cpu") -> LanguageModel:
    torch.manual_seed(3)
    llm = LanguageModel(CONFIG, SLOTS, CAPACITY, torch.device("cpu"), torch.float32)
    for name, parameter in llm.requires_grad_(False).named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    if device == "cpu":
        return llm
    there = LanguageModel(CONFIG, SLOTS, CAPACITY, torch.device(device), torch.float32)
    for own, other in zip(there.requires_grad_(False).parameters(), llm.parameters(), strict=True):
        own.copy_(other)
    return there


@pytest.fixture(scope="module")
def small() -> Iterator[LanguageModel]:
    """Return an LLM with passes of at most 8 rows and 3 slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "PASS_ROWS", (2, 8))
        patch.setattr(language_model, "PASS_SLOTS", 3)
        llm = build()
        llm.cache.kernel = attend_to_pages
        with torch.inference_mode():
            llm.capture(is_replayed=False)
        yield llm


@st.composite
def launches(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Draw passes of rows that fit into the contexts."""
    found: list[list[tuple[int, int]]] = []
    left = [CAPACITY] * SLOTS
    for _ in range(draw(st.integers(1, 3))):
        slots = sorted(draw(st.sets(st.sampled_from(range(SLOTS)), min_size=1)))
        found.append([(slot, draw(st.integers(1, min(13, left[slot])))) for slot in slots])
        for slot, rows in found[-1]:
            left[slot] -= rows
    return found


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(launches(), st.booleans(), st.booleans())
@torch.inference_mode()
def test_any_rows_have_the_states_that_passes_of_their_size_give(
    small: LanguageModel,
    launches: list[list[tuple[int, int]]],
    are_ids: bool,
    is_appended: bool,
) -> None:
    plain = build()
    for slot in range(SLOTS):
        small.cache.reset(slot)
    for counts in launches:
        ids = [7 * row % IDS for row in range(sum(rows for _, rows in counts))]
        inputs = ids if are_ids else plain.embed(ids)
        if is_appended:
            got, expected = small.append(counts, inputs), plain.append(counts, inputs)
            torch.testing.assert_close(got, expected)
        else:
            for one, other in zip(
                small.feed(counts, inputs), plain.feed(counts, inputs), strict=True
            ):
                torch.testing.assert_close(one, other)
    for slot in range(SLOTS):
        for one, other in zip(small.cache.read(slot), plain.cache.read(slot), strict=True):
            torch.testing.assert_close(one, other)


@torch.inference_mode()
def test_rows_that_do_not_fit_change_nothing(small: LanguageModel) -> None:
    for slot in range(SLOTS):
        small.cache.reset(slot)
    small.feed([(1, CAPACITY - 1)], [1] * (CAPACITY - 1))
    before = small.cache.read(1)
    with pytest.raises(CacheFullError):
        small.feed([(0, 12), (1, 2)], [1] * 14)
    assert [small.cache.length(slot) for slot in (0, 1)] == [0, CAPACITY - 1]
    for one, other in zip(small.cache.read(1), before, strict=True):
        assert torch.equal(one, other)


@torch.inference_mode()
def test_a_launch_has_one_upload_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "PASS_ROWS", (2, 8))
    plain = build()
    with elsewhere() as border:
        llm = build(DEVICE)
        llm.cache.kernel = attend_to_pages
        llm.capture()
        for one in (llm, plain):
            one.feed([(0, 3), (1, 1), (3, 2)], [5, 6, 7, 8, 9, 10])  # takes pages
        border.crossings.clear()
        counts, ids = [(0, 1), (3, 4)], [1, 2, 3, 4, 5]
        hidden, logits = llm.feed(counts, ids)
        assert [(one.way, one.where) for one in border.crossings] == [
            (Way.UP, "transfer.py refill")
        ]
        got = hidden.cpu(), logits.cpu()
    for one, expected in zip(got, plain.feed(counts, ids), strict=True):
        torch.testing.assert_close(one, expected)
