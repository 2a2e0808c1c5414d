from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duplane.worker.models.minicpm_o import model as models
from duplane.worker.models.minicpm_o import precision
from duplane.worker.models.minicpm_o.model import DuplexModel


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


@pytest.mark.parametrize("has_tf32", [False, True])
def test_only_the_vocoder_is_captured_with_tf32(
    has_tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision.configure(torch.device("cuda:0"))
    found: dict[str, bool] = {}

    def part(name: str) -> Any:
        def capture(*, is_replayed: bool = True) -> None:
            assert is_replayed
            found[name] = flags()[1:] == (True, True)

        return SimpleNamespace(capture=capture)

    monkeypatch.setattr(models, "TalkBlock", lambda talker: talker)
    parts = SimpleNamespace(audio=part("audio"), talker=part("talker"), vocoder=part("vocoder"))
    model: Any = SimpleNamespace(llm=part("llm"), parts=parts)
    DuplexModel.capture(model, has_tf32_vocoder=has_tf32)
    assert found == {"llm": False, "audio": False, "talker": False, "vocoder": has_tf32}
    assert flags() == (False, False, False)
