"""Packed weights: they give the results of the plain ones, or are not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from duplane.worker.models.minicpm_o import packing, proof
from duplane.worker.models.minicpm_o.dtype import has_bfloat16
from duplane.worker.models.minicpm_o.layers import Product
from duplane.worker.models.minicpm_o.packing import fits_float16, pack_products

HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
needs_fbgemm = pytest.mark.skipif(not HAS_FBGEMM, reason="this CPU has no FBGEMM")
needs_bfloat16 = pytest.mark.skipif(
    not has_bfloat16(torch.device("cpu")), reason="this CPU has no instructions for bfloat16"
)
INPUTS = 48


class Network(nn.Module):
    """Two layers with one input, and one layer alone; the values are those of bfloat16."""

    def __init__(self, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(INPUTS, 32, bias=bias)
        self.second = nn.Linear(INPUTS, 16, bias=bias)
        self.alone = nn.Linear(INPUTS, 24, bias=bias)
        self.requires_grad_(False).to(torch.bfloat16).to(dtype)
        self.joined, self.single = Product(self.first, self.second), Product(self.alone)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.joined(rows), self.single(rows)


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small weights be packed, too; forget the reports."""
    monkeypatch.setattr(proof, "reports", [])
    monkeypatch.setattr(packing, "FEWEST_VALUES", 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 17, 130])
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [
        pytest.param(torch.float32, 1e-5, 1e-5, marks=needs_fbgemm),
        pytest.param(torch.bfloat16, 2e-2, 1e-2, marks=needs_bfloat16),
    ],
)
def test_packed_weights_compute_what_the_plain_ones_do(
    dtype: torch.dtype, rtol: float, atol: float, rows: int, bias: bool
) -> None:
    network, given = Network(dtype, bias=bias), torch.randn(rows, INPUTS).to(dtype)
    expected = network(given)
    pack_products(network, "network")
    assert network.joined.packed
    assert network.single.packed
    torch.testing.assert_close(network(given), expected, rtol=rtol, atol=atol)


@needs_fbgemm
def test_the_result_of_a_row_does_not_depend_on_the_other_rows() -> None:
    network, given = Network(torch.float32, bias=True), torch.randn(20, INPUTS)
    pack_products(network, "network")
    assert network.joined(given)[7:8].equal(network.joined(given[7:8]))


@needs_fbgemm
def test_packed_weights_take_half_of_the_memory() -> None:
    network = Network(torch.float32, bias=False)
    shapes = {name: tensor.shape for name, tensor in network.named_parameters()}
    held = sum(tensor.nbytes for tensor in network.parameters())
    pack_products(network, "network")
    assert {name: tensor.shape for name, tensor in network.named_parameters()} == shapes
    assert sum(tensor.nbytes for tensor in network.parameters()) == held / 2
    assert {tensor.device.type for tensor in network.parameters()} == {"meta"}


def test_small_weights_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "FEWEST_VALUES", INPUTS * 48 + 1)
    network = Network(torch.float32, bias=False)
    pack_products(network, "network")
    assert network.joined.packed is None
    assert network.single.packed is None


@pytest.mark.parametrize("value", [1e-9, 1e6, float("nan"), 1.0001])
def test_weights_that_float16_would_change_stay_as_they_are(value: float) -> None:
    network = Network(torch.float32, bias=False)
    network.requires_grad_(False)
    network.first.weight.fill_(value)
    network.alone.weight.fill_(value)
    assert not fits_float16(network.joined.weight)
    given = torch.randn(2, INPUTS)
    expected = network(given)
    pack_products(network, "network")
    assert network.joined.packed is None
    assert network.single.packed is None
    torch.testing.assert_close(network(given), expected, equal_nan=True)


@pytest.mark.parametrize("fault", ["raises", "differs"])
@needs_fbgemm
def test_a_packed_weight_that_fails_its_check_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(product: Product) -> Any:
        if fault == "raises":
            raise RuntimeError("no such operator")
        return lambda rows: product.multiply(rows) * 1.01

    monkeypatch.setattr(packing, "_in_float16", make)
    network, given = Network(torch.float32, bias=True), torch.randn(3, INPUTS)
    expected = network(given)
    pack_products(network, "network")
    torch.testing.assert_close(network(given), expected)
    (report,) = proof.reports
    assert set(report.faults) == {"48 x 48", "24 x 48"}
    (line,) = caplog.messages
    assert line.startswith("2 of 2 packed weights of the network are switched off")
