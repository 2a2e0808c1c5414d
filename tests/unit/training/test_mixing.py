"""`python -m training mix`: weights between those of two checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from training.export import mix_checkpoints
from training.listener.starting import TOKENIZER_FILE

NAME = "llm.model.norm.weight"


def checkpoint(directory: Path, value: float, **other: torch.Tensor) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(f'{{"value": {value}}}')
    (directory / TOKENIZER_FILE).write_text("{}")
    tensors = {NAME: torch.full((3,), value, dtype=torch.float16), **other}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.25, 2.0), (1.0, 5.0)])
def test_weights_lie_between_those_of_two_checkpoints(
    tmp_path: Path, share: float, value: float
) -> None:
    tower = "vpm.post_layernorm.weight"
    first, second = (
        checkpoint(tmp_path / name, value, **{tower: torch.full((1,), value).half()})
        for name, value in (("first", 1.0), ("second", 5.0))
    )
    mix_checkpoints(tmp_path / "made", first, second, share)
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    assert tensors[tower].tolist() == [5.0]
    made = tensors[NAME]
    assert (made.dtype, made.tolist()) == (torch.float16, [value] * 3)
    assert (tmp_path / "made" / "config.json").read_text() == '{"value": 5.0}'


def test_audio_encoder_may_lie_elsewhere(tmp_path: Path) -> None:
    name = "apm.conv1.bias"
    first, second = (
        checkpoint(tmp_path / folder, value, **{name: torch.full((1,), value).half()})
        for folder, value in (("first", 1.0), ("second", 5.0))
    )
    mix_checkpoints(tmp_path / "made", first, second, 1.0, encoder_share=0.25)
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    assert tensors[name].tolist() == [2.0]
    assert tensors[NAME].tolist() == [5.0] * 3


def test_checkpoints_with_other_tensors_are_refused(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "first", 1.0)
    second = checkpoint(tmp_path / "second", 5.0, other=torch.zeros(2))
    with pytest.raises(ValueError, match="different tensors"):
        mix_checkpoints(tmp_path / "made", first, second, 0.5)
    assert not (tmp_path / "made").exists()


def test_checkpoints_with_other_tokenizers_are_refused(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "first", 1.0)
    second = checkpoint(tmp_path / "second", 5.0)
    (second / TOKENIZER_FILE).write_text('{"other": 1}')
    with pytest.raises(ValueError, match="different tokenizers"):
        mix_checkpoints(tmp_path / "made", first, second, 0.5)
    assert not (tmp_path / "made").exists()
