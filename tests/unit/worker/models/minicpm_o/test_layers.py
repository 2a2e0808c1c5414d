"""Packed linear layers."""

from __future__ import annotations

import torch
from torch import nn

from duplane.worker.models.minicpm_o.layers import pack_linear


def test_packed_layers_give_the_results_of_each_layer() -> None:
    layers = [nn.Linear(6, 4), nn.Linear(6, 3, bias=False), nn.Linear(6, 5)]
    states = torch.randn(2, 6)
    expected = torch.cat([layer(states) for layer in layers], -1)
    weight, bias = pack_linear(layers)
    torch.testing.assert_close(nn.functional.linear(states, weight, bias), expected)
    torch.testing.assert_close(torch.cat([layer(states) for layer in layers], -1), expected)


def test_values_assigned_to_the_layers_reach_the_packed_weight() -> None:
    layers = [nn.Linear(3, 2), nn.Linear(3, 2)]
    weight, bias = pack_linear(layers)
    with torch.no_grad():
        layers[1].state_dict()["weight"].fill_(7.0)
        layers[1].state_dict()["bias"].fill_(8.0)
    assert weight[2:].eq(7.0).all()
    assert bias[2:].eq(8.0).all()
    pointers = [layer.weight.untyped_storage().data_ptr() for layer in layers]
    assert pointers == [weight.untyped_storage().data_ptr()] * 2
