"""Mixed precision: matrix products in bfloat16, attention in float32."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from training import torch_calls
from training.torch_calls import mixed_precision


def test_attention_stays_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_calls, "has_bfloat16", lambda _: True)
    states = torch.randn(1, 2, 5, 8)
    with mixed_precision(is_allowed=True):
        product = states @ states.mT
        half = states.bfloat16()
        attended = functional.scaled_dot_product_attention(half, half, half, is_causal=True)
    assert (product.dtype, attended.dtype) == (torch.bfloat16, torch.float32)
    exact = half.float()
    wanted = functional.scaled_dot_product_attention(exact, exact, exact, is_causal=True)
    torch.testing.assert_close(attended, wanted)


@pytest.mark.parametrize(("is_allowed", "has_instructions"), [(True, False), (False, True)])
def test_all_stays_in_float32_otherwise(
    is_allowed: bool, has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_calls, "has_bfloat16", lambda _: has_instructions)
    states = torch.randn(3, 3)
    with mixed_precision(is_allowed=is_allowed):
        assert (states @ states).dtype == torch.float32
