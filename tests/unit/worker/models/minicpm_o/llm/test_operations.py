"""Kernels replace operations in torch only where both agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.model.decoders import QWEN
from torch import Tensor

from duplane.tools.bench.launches import attend_to_pages
from duplane.worker.models.minicpm_o.llm import operations
from duplane.worker.models.minicpm_o.llm.decoder import Decoder

CONFIG = replace(QWEN, layers=2)


def raising(states: Tensor) -> Tensor:
    raise RuntimeError("Failed to find C compiler.\nPlease specify it.")


def wrong(states: Tensor) -> Tensor:
    return operations.silu_times_up(states) * 1.05


def infinite(states: Tensor) -> Tensor:
    return operations.silu_times_up(states) / 0.0


def states_of(decoder: Decoder) -> Tensor:
    rows = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    result = decoder(rows, decoder.cache.extend([(0, 2), (3, 3)]))
    for slot in (0, 3):
        decoder.cache.reset(slot)
    return result


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the kernels that are used, which a test may replace."""
    played = SimpleNamespace(
        attend=attend_to_pages,
        place_heads=operations.place_heads,
        silu_times_up=operations.silu_times_up,
    )
    monkeypatch.setattr(operations, "kernels", lambda: played)
    return played


def build() -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(CONFIG, 4, 64, torch.device("cpu"), torch.float32).requires_grad_(False)
    for parameter in decoder.parameters():
        parameter.normal_(0.0, 0.1)
    return decoder


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (raising, "Failed to find C compiler."),
        (wrong, r"differs by 0\.05, 0\.0001 is allowed"),
        (infinite, r"differs by inf, 0\.0001 is allowed"),
    ],
)
def test_a_faulty_kernel_is_named_and_torch_serves(
    kernel: Callable[[Tensor], Tensor],
    reason: str,
    kernels: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder = build()
    expected = states_of(decoder)
    kernels.silu_times_up = kernel
    decoder.use_kernels("LLM")
    torch.testing.assert_close(states_of(decoder), expected)
    (record,) = caplog.records
    line = r"1 of 3 kernels of the LLM are switched off, which costs speed: silu times up: "
    assert re.fullmatch(line + reason, record.getMessage())


def write_elsewhere(heads: Tensor, norms: Any, angles: Any, places: Any, *pools: Tensor) -> Tensor:
    """Place heads, but write all values to the row of the first one."""
    queries = operations.place_heads(heads, norms, angles, places, *pools)
    pools[1][:, places] = pools[1][:, places][:, :1].clone()
    return queries


def without_norm(heads: Tensor, norms: Any, *arguments: Any) -> Tensor:
    return operations.place_heads(heads, None, *arguments)


@pytest.mark.parametrize("kernel", [write_elsewhere, without_norm])
def test_heads_that_differ_are_placed_by_torch(
    kernel: Callable[..., Tensor],
    kernels: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder = build()
    expected = states_of(decoder)
    kernels.place_heads = kernel
    decoder.use_kernels("LLM")
    torch.testing.assert_close(states_of(decoder), expected)
    (record,) = caplog.records
    assert "1 of 3 kernels of the LLM are switched off" in record.getMessage()
    assert ": heads: differs by" in record.getMessage()
    assert not decoder.cache.keys.any()
    assert not decoder.cache.values.any()


def test_a_kernel_that_agrees_serves(
    kernels: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = build()
    expected = states_of(decoder)
    calls: list[torch.Size] = []

    def kernel(states: Tensor) -> Tensor:
        calls.append(states.shape)
        return operations.silu_times_up(states)

    kernels.silu_times_up = kernel
    decoder.use_kernels("LLM")
    calls.clear()
    assert decoder.cache.kernel is attend_to_pages
    torch.testing.assert_close(states_of(decoder), expected)
    assert calls == [(5, 160)] * CONFIG.layers
    assert not caplog.records


def test_attention_that_differs_is_not_used(
    kernels: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel does not see the first row of each context."""
    decoder = build()
    expected = states_of(decoder)

    def blind(*arguments: Any) -> Tensor:
        queries, keys, values, pages, positions, tiles = arguments
        values = values.clone()
        values[:, [held[0] * pages.page_rows for held in pages.held if held]] = 0
        return attend_to_pages(queries, keys, values, pages, positions, tiles)

    kernels.attend = blind
    decoder.use_kernels("LLM")
    assert decoder.cache.kernel is None
    assert torch.equal(states_of(decoder), expected)
    (record,) = caplog.records
    assert "switched off, which costs speed: attention: differs by" in record.getMessage()
    assert not decoder.cache.keys.any()
    assert all(decoder.cache.is_clean(slot) for slot in range(4))
