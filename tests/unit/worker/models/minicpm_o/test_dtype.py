"""The type of the model's numbers: it depends on the setting, the checkpoint and the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from duplane.tools.checkpoint.random_weights import write_random
from duplane.worker.models.minicpm_o import dtype
from duplane.worker.models.minicpm_o.dtype import choose_dtype, has_bfloat16

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random(directory, "minicpm-o-4.5", factor=0.02)
    return directory


def cpu_with(monkeypatch: pytest.MonkeyPatch, *instructions: str) -> None:
    found = dict.fromkeys(instructions, True) | {"avx2": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)


@pytest.mark.parametrize("instructions", ["avx512_bf16", "amx_bf16"])
def test_a_large_model_is_bfloat16_if_the_cpu_has_instructions_for_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, instructions: str
) -> None:
    monkeypatch.setattr(dtype, "LEAST_PARAMETERS", 1000)
    cpu_with(monkeypatch, instructions)
    assert choose_dtype("auto", checkpoint, CPU) == "bfloat16"


def test_a_small_model_is_float32(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_with(monkeypatch, "avx512_bf16")
    assert choose_dtype("auto", checkpoint, CPU) == "float32"


def test_a_large_model_is_float32_on_other_cpus(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype, "LEAST_PARAMETERS", 1000)
    cpu_with(monkeypatch)
    assert choose_dtype("auto", checkpoint, CPU) == "float32"


def test_a_dtype_that_is_set_is_used(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_with(monkeypatch)
    assert choose_dtype("bfloat16", checkpoint, CPU) == "bfloat16"
    cpu_with(monkeypatch, "avx512_bf16")
    monkeypatch.setattr(dtype, "LEAST_PARAMETERS", 1000)
    assert choose_dtype("float32", checkpoint, CPU) == "float32"


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_gpus_have_bfloat16_from_a_compute_capability_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_bfloat16(GPU) is expected
