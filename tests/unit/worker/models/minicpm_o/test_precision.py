from collections.abc import Iterator

import pytest
import torch

from duplane.worker.models.minicpm_o import precision


def flags() -> tuple[bool, bool, bool | str]:
    return (
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
    )


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    attention, convolutions, products = flags()
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.enable_cudnn_sdp(attention)
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cuda.matmul.allow_tf32 = products


def test_cuda_has_neither_cudnn_attention_nor_tf32() -> None:
    precision.configure(torch.device("cuda:0"))
    assert flags() == (False, False, False)


def test_a_cpu_changes_nothing() -> None:
    precision.configure(torch.device("cpu"))
    assert flags() == (True, True, True)
