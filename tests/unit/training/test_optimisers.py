"""The optimisers of all stages: the rates of a run, and which tensors count as matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training.optimisers import Optimisers, orthogonalised, rate_factor


def test_rate_rises_and_ends_at_zero() -> None:
    factors = [rate_factor(step, 10, warm_up=2, decay_share=0.5) for step in range(11)]
    assert factors == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
    assert rate_factor(9, 10, warm_up=1, decay_share=0.0) == 1.0


def test_only_matrices_that_are_no_tables_have_a_momentum() -> None:
    matrix, table, bias, added = (
        nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (4, 3), (3,), (5, 5))
    )
    made = Optimisers(
        [matrix, table, bias], tables=[table], added=[added], rate=0.1, matrix_rate=0.1
    )
    assert [one.shape for one in made.state_dict()["momenta"]] == [(2, 3)]
    made.step(matrix.sum() + table.sum() + bias.sum() + added.sum(), 1.0)
    for tensor in (matrix, table, bias, added):
        assert not torch.equal(tensor, torch.ones_like(tensor))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0.35), (torch.bfloat16, 0.4)])
@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_orthogonalised_matrix_has_nearly_equal_singular_values(
    shape: tuple[int, int], dtype: torch.dtype, most: float
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    found = orthogonalised(matrix, dtype)
    assert found.shape == shape
    values = torch.linalg.svdvals(found.float())
    assert (values - 1).abs().max() < most
