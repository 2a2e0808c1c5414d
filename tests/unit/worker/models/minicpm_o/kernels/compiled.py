"""Compiles the kernels for CUDA devices, without one; `test_kernels.py` runs these tests."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest

from duplane.worker.models.minicpm_o.llm.attention import TILE
from duplane.worker.models.minicpm_o.llm.triton_kernels import (
    SPLIT,
    attend_split,
    combine_splits,
    place_head,
    silu_times_up_block,
)

ARCHITECTURES = (80, 90)
"""A100, H100 and H200."""


def compiled(kernel: Any, architecture: int, types: Mapping[str, str], **constants: Any) -> Any:
    """Compile a kernel for arguments of these types and these constants."""
    compiler: Any = import_module("triton.compiler")
    target: Any = import_module("triton.backends.compiler").GPUTarget
    names = [parameter.name for parameter in kernel.params]
    assert {*types, *constants} == {*names}
    source = compiler.ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    return compiler.compile(source, target=target("cuda", architecture, 32))


SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""The most shared memory of a program, by architecture."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "block"), [("bf16", 64), ("fp32", 32)])
@pytest.mark.parametrize(("heads", "group", "width"), [(32, 4, 128), (12, 1, 64)])
def test_attention(
    architecture: int, dtype: str, block: int, heads: int, group: int, width: int
) -> None:
    sizes = {"heads": heads, "width": width, "wide": width, "splits": 9, "split": SPLIT}
    partial = {"positions": "*i64", "sums": "*fp32", "maxima": "*fp32", "totals": "*fp32"}
    inputs = dict.fromkeys(("queries", "keys", "values"), f"*{dtype}")
    one = compiled(
        attend_split,
        architecture,
        {**partial, **inputs, "table": "*i32", "tiles": "*i64", "scale": "fp32"},
        **sizes,
        query_stride=2 * heads * width,
        head_stride=256 * 2113 * width,
        group=group,
        page_rows=256,
        pages_per_slot=33,
        block=block,
        tile=TILE,
    )
    other = compiled(combine_splits, architecture, {**partial, "results": f"*{dtype}"}, **sizes)
    for kernel in (one, other):
        assert "cubin" in kernel.asm
        assert kernel.metadata.shared <= SHARED_BYTES[architecture]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_silu_times_up(architecture: int) -> None:
    types = {"states": "*bf16", "results": "*bf16"}
    assert (
        "cubin" in compiled(silu_times_up_block, architecture, types, inner=12288, block=1024).asm
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("heads", "group", "width"), [(32, 4, 128), (12, 1, 64)])
def test_heads(architecture: int, dtype: str, heads: int, group: int, width: int) -> None:
    states = ("heads", "query_weights", "key_weights", "queries", "keys", "values")
    types = {"cosines": "*fp32", "sines": "*fp32", "places": "*i64", "epsilon": "fp32"}
    kernel = compiled(
        place_head,
        architecture,
        {**types, **dict.fromkeys(states, f"*{dtype}")},
        head_stride=256 * 2113 * width,
        query_heads=heads,
        key_heads=heads // group,
        width=width,
        wide=width,
        has_norm=group > 1,
    )
    assert "cubin" in kernel.asm
