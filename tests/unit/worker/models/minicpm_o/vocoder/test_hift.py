"""The generator's convolutions and its inverse transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model.fake_cuda import DEVICE, elsewhere
from support.paths import GOLDEN
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from duplane.worker.models.minicpm_o.transfer import Download
from duplane.worker.models.minicpm_o.vocoder.files import load_hift
from duplane.worker.models.minicpm_o.vocoder.hift import same_conv
from duplane.worker.models.minicpm_o.vocoder.hift_stream import HiFTStream, MelChunk

CPU = torch.device("cpu")


class Operations(TorchDispatchMode):
    """Records the names of all torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kernel", "dilation"), [(3, 1), (7, 3), (11, 5)])
@torch.no_grad()
def test_convolutions_run_with_channels_last_on_a_cpu(kernel: int, dilation: int) -> None:
    convolution = same_conv(16, 16, kernel, dilation)
    x = torch.randn(2, 16, 300)
    margin = dilation * (kernel // 2)
    expected = functional.conv1d(
        x, convolution.weight, convolution.bias, padding=margin, dilation=dilation
    )
    convolution.prepare()
    result = convolution(x)
    assert result.stride() == (16 * 300, 1, 16)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    with Operations() as operations:
        convolution(result)
    assert not operations.names & {"aten::copy_", "aten::clone", "aten::contiguous"}


@torch.inference_mode()
def test_the_generator_never_reads_a_value_on_the_host() -> None:
    hift = load_hift(GOLDEN / "token2wav", device=CPU)
    hift.prepare()
    mel = torch.randn(2, 80, 20)
    with Operations() as operations:
        samples = hift(mel, hift.source(mel, None))
    assert samples.shape == (2, 20 * 480)
    assert not operations.names & {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}


@torch.inference_mode()
def test_the_inverse_transform_equals_that_wait() -> None:
    hift = load_hift(GOLDEN / "token2wav", device=CPU)
    hift.prepare()
    x = torch.randn(3, hift.config.n_fft + 2, 50) * 0.3
    bins = hift.config.n_fft // 2 + 1
    spectrum = torch.polar(x[:, :bins].exp(), x[:, bins:].sin())
    inverse: Any = torch.istft
    expected = inverse(spectrum, hift.config.n_fft, hift.config.hop_len, window=hift.window)
    limit = hift.config.audio_limit
    torch.testing.assert_close(hift._samples(x), expected.clamp(-limit, limit))


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_only_on_a_cpu_are_weights_stored_with_channels_last(device: str) -> None:
    with elsewhere(), torch.inference_mode():
        convolution = same_conv(16, 16, 3)
        convolution.weight = nn.Parameter(torch.zeros(16, 16, 3, device=device), False)
        convolution.prepare()
        stride = convolution.weight.stride()
    assert stride == ((48, 1, 16) if device == "cpu" else (48, 3, 1))


@torch.inference_mode()
def test_all_groups_of_a_batch_are_launched_before_the_host_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = HiFTStream(load_hift(GOLDEN / "token2wav", device=CPU), 3, CPU)
    calls: list[str] = []

    def result(download: Download) -> Any:
        calls.append("download")
        return wait(download)

    def generate(mel: Tensor, *rest: Any) -> Tensor:
        calls.append("launch")
        return torch.zeros(len(mel), mel.shape[2] * 480)

    wait = Download.result
    monkeypatch.setattr(Download, "result", result)
    monkeypatch.setattr(stream.hift, "forward", generate)
    lengths = (10, 20, 10)
    chunks = [
        MelChunk(slot, torch.zeros(length, 80), True, True, None)
        for slot, length in enumerate(lengths)
    ]
    samples = stream.decode(chunks)
    assert calls == ["launch", "launch", "download", "download"]
    assert [len(each) for each in samples] == [480 * length for length in lengths]
