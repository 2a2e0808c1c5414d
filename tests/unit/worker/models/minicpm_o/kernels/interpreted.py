"""The kernels beside their forms in torch, on a CPU; `test_kernels.py` runs these tests.

Triton decides when it is imported whether it interprets kernels, so a process of its own runs them.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duplane.worker.models.minicpm_o.llm import operations
from duplane.worker.models.minicpm_o.llm.operations import Operations, use_kernels
from duplane.worker.models.minicpm_o.llm.triton_silu import silu_times_up

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""The interpreter cuts float32 off to bfloat16, where a device rounds."""
DTYPES = list(TOLERANCES)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(1, 2100), st.sampled_from(DTYPES), st.integers(0, 9))
def test_silu_times_up_is_that_of_torch(
    rows: int, inner: int, dtype: torch.dtype, seed: int
) -> None:
    states = (4 * random(seed, rows, 2 * inner)).to(dtype)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        silu_times_up(states), operations.silu_times_up(states), rtol=tolerance, atol=1e-6
    )
    alone = torch.cat([silu_times_up(row) for row in states.split(1)])
    assert torch.equal(silu_times_up(states), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_kernels_are_accepted(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    chosen = Operations()
    use_kernels(chosen, torch.zeros(1, dtype=dtype), inner=24, name="LLM")
    assert not caplog.records
    assert chosen.silu_times_up is silu_times_up
