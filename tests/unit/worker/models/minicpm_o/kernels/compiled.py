"""Compiles the kernels for CUDA devices, without one; `test_kernels.py` runs these tests."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest

from duplane.worker.models.minicpm_o.llm.triton_silu import silu_times_up_block

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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_silu_times_up(architecture: int) -> None:
    types = {"states": "*bf16", "results": "*bf16"}
    assert (
        "cubin" in compiled(silu_times_up_block, architecture, types, inner=12288, block=1024).asm
    )
