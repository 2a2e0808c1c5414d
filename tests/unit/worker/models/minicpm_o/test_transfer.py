"""Transfers between the host and the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.model.fake_cuda import DEVICE, Way, elsewhere
from torch import Tensor

from duplane.worker.models.minicpm_o.transfer import (
    PINNED_BYTES,
    Download,
    download,
    refill,
    upload,
)


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


def test_the_host_waits_for_a_download_only_when_it_reads_the_result() -> None:
    with elsewhere() as border:
        there = torch.zeros(3, dtype=torch.long, device=DEVICE)
        refill(there, np.array([1, 2, 3]))
        begun = Download(there)
        there.zero_()
        assert [crossing.way for crossing in border.crossings] == [Way.UP, Way.SENT]
        np.testing.assert_array_equal(begun.result(), [1, 2, 3])
        assert [crossing.way for crossing in border.crossings][2:] == [Way.DOWN]


def test_on_a_cpu_a_download_copies_nothing() -> None:
    here = torch.ones(3)
    assert np.shares_memory(Download(here).result(), here.numpy())
