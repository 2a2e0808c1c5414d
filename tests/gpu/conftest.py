"""The device of these tests: a CUDA device, or the fake device if there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.model.checkpoints import write_speaking_checkpoint
from support.model.fake_cuda import elsewhere


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    with elsewhere():
        yield


@pytest.fixture(scope="session")
def speaking_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("speaking") / "checkpoint"
    write_speaking_checkpoint(directory)
    return directory
