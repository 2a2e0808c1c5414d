"""A bad checkpoint or device is found before torch is imported, which takes seconds."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from duplane.fabric.process import Shutdown, StartError
from duplane.worker import start_check
from duplane.worker.service import serve
from duplane.worker.settings import WorkerSettings
from duplane.worker.start_check import check_start


@pytest.mark.parametrize(
    ("directory", "device", "message"),
    [
        ("missing", "cpu", r"^checkpoint: \S+missing is not a directory"),
        (".", "cpu", r"^checkpoint: \S+ has no config\.json"),
        ("checkpoint", "gpu", r"^device is 'gpu', must be cpu or cuda:N"),
        ("checkpoint", "cuda:1", r"^device cuda:1 is not there: this machine has 1 CUDA devices"),
    ],
)
def test_worker_names_the_fault_without_torch(
    directory: str,
    device: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/config.json").touch()
    monkeypatch.setattr(start_check, "cuda_device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "duplane.worker.models.torch_device", None)
    settings = WorkerSettings(checkpoint=tmp_path / directory, device=device)
    with pytest.raises(StartError, match=message):
        asyncio.run(serve(settings, Shutdown()))


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:1"])
def test_devices_of_the_machine_are_accepted(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(start_check, "cuda_device_count", lambda: 2)
    check_start(WorkerSettings(checkpoint=tmp_path, device=device), is_built=False)
    (tmp_path / "config.json").touch()
    check_start(WorkerSettings(checkpoint=tmp_path, device=device))


def test_other_families_check_their_own_checkpoint_and_device(tmp_path: Path) -> None:
    check_start(WorkerSettings(checkpoint=tmp_path, device="npu", family="other"))
    check_start(WorkerSettings(checkpoint="scripted", device="none"))


def test_without_a_driver_there_is_no_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", no_library)
    assert start_check.cuda_device_count() == 0
