"""Transfers between the host and the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.model.fake_cuda import DEVICE, elsewhere
from torch import Tensor

from duplane.worker.models.minicpm_o.transfer import PINNED_BYTES, download, upload


def test_only_large_uploads_to_a_gpu_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        pinned.append(tensor.nbytes)
        return tensor

    with elsewhere():
        monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
        for count in (16, PINNED_BYTES // 4, PINNED_BYTES // 4 + 1):
            values = np.arange(count, dtype=np.float32)
            np.testing.assert_array_equal(download(upload(values, torch.device(DEVICE))), values)
        upload(np.zeros(PINNED_BYTES, np.float32), torch.device("cpu"))
    assert pinned == [PINNED_BYTES + 4]
