"""Loading the vocoder's files: valid files, and the error for each kind of invalid file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.paths import GOLDEN
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.vocoder.conformer import ConformerConfig
from duplane.worker.models.minicpm_o.vocoder.dit import DiTConfig
from duplane.worker.models.minicpm_o.vocoder.files import (
    fold_weight_norm,
    load_flow,
    load_hift,
    read_flow_config,
    read_hift_config,
)
from duplane.worker.models.minicpm_o.vocoder.flow import Flow, FlowConfig
from duplane.worker.models.minicpm_o.vocoder.hift import HiFT, HiFTConfig

FILES = GOLDEN / "token2wav"
CPU = torch.device("cpu")

State = dict[str, Tensor]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("flow.yaml", "flow.pt", "hift.pt", "hift_dims.json"):
        shutil.copyfile(FILES / name, tmp_path / name)
    return tmp_path


def load(directory: Path) -> None:
    load_flow(directory, steps=5, device=CPU)
    load_hift(directory, device=CPU)


def rewrite(path: Path, change: Callable[[State], object]) -> None:
    state: State = dict(torch.load(path, weights_only=True))
    change(state)
    torch.save(state, path)


def test_the_files_load(files: Path) -> None:
    load(files)


def test_one_error_lists_all_faults_of_the_tensors(files: Path) -> None:
    def damage(state: State) -> None:
        del state["encoder_proj.bias"]
        state["encoder_proj.weight"] = torch.zeros(3, 4)
        state["surprise"] = torch.zeros(1)

    rewrite(files / "flow.pt", damage)
    with pytest.raises(CheckpointError) as raised:
        load(files)
    assert "flow.pt: encoder_proj.bias is missing" in str(raised.value)
    assert "encoder_proj.weight has shape [3, 4], expected [80, 32]" in str(raised.value)
    assert "surprise is not in the model" in str(raised.value)


def test_a_weight_norm_direction_without_its_magnitude_is_reported(files: Path) -> None:
    name = "generator.conv_pre.parametrizations.weight.original0"
    rewrite(files / "hift.pt", lambda state: state.pop(name))
    with pytest.raises(CheckpointError, match=r"hift.pt: conv_pre.*original1 is not in.*miss"):
        load(files)


@pytest.mark.parametrize("name", ["flow.yaml", "flow.pt", "hift.pt"])
def test_a_missing_file_is_reported_by_name(files: Path, name: str) -> None:
    (files / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} does not exist"):
        load(files)


@pytest.mark.parametrize("name", ["flow.pt", "hift.pt"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"\x80\x02garbage", None])
def test_a_damaged_file_is_reported_by_name(files: Path, name: str, content: bytes | None) -> None:
    whole = (files / name).read_bytes()
    (files / name).write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        load(files)


def test_a_file_with_other_values_than_tensors_is_refused(files: Path) -> None:
    torch.save({"weight": [1, 2, 3]}, files / "flow.pt")
    with pytest.raises(CheckpointError, match=r"flow.pt: not tensors: 'weight'"):
        load(files)


def test_code_in_a_file_is_not_run(files: Path) -> None:
    torch.save({"weight": nn.Linear(2, 2)}, files / "flow.pt")
    with pytest.raises(CheckpointError, match=r"flow.pt cannot be read"):
        load(files)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("flow: !new:", "flow: !apply:", "cannot be read"),
        ("in_channels: 320", "in_channels: 240", "in_channels is not 4"),
        ("in_channels: 320", "in_channels: many", "'in_channels' is 'many', not int"),
        ("'linear'", "'conv2d'", "input_layer 'conv2d' is not supported"),
        ("up_scale_factor: 2", "up_scale_factor: 3", "up_scale_factor differs"),
        ("  encoder:", "  coder:", "lacks the object 'encoder'"),
    ],
)
def test_an_unsupported_configuration_is_refused(
    files: Path, before: str, after: str, message: str
) -> None:
    text = (files / "flow.yaml").read_text()
    assert before in text
    (files / "flow.yaml").write_text(text.replace(before, after))
    with pytest.raises(CheckpointError, match=rf"flow.yaml.*{message}"):
        read_flow_config(files)


def test_the_default_dimensions_are_those_of_the_released_model(files: Path) -> None:
    (files / "hift_dims.json").unlink()
    assert read_hift_config(files) == HiFTConfig()


def test_invalid_dimensions_are_reported_by_name(files: Path) -> None:
    (files / "hift_dims.json").write_text('{"upsample_rates": [8, 5]}')
    with pytest.raises(CheckpointError, match=r"hift_dims.json: upsample_rates is .* 3 whole"):
        read_hift_config(files)


@pytest.mark.parametrize(
    "names",
    [
        ("parametrizations.weight.original0", "parametrizations.weight.original1"),
        ("weight_g", "weight_v"),
    ],
)
def test_folded_weight_norm_equals_that_of_torch(names: tuple[str, str]) -> None:
    normed = weight_norm(nn.ConvTranspose1d(6, 4, 3))
    halves = [normed.get_parameter(f"parametrizations.weight.original{half}") for half in range(2)]
    with torch.no_grad():
        halves[0].mul_(1.7)
        folded = fold_weight_norm(
            {f"up.{name}": half for name, half in zip(names, halves, strict=True)}
        )
        assert list(folded) == ["up.weight"]
        assert torch.equal(folded["up.weight"], torch.as_tensor(normed.weight))


def test_the_parameter_counts_are_those_of_the_released_model() -> None:
    encoder = ConformerConfig(512, 512, 3, 6, 4, 2, 8, True, 2048)
    estimator = DiTConfig(320, 80, 4.0, 16, 8, 64, 512)
    config = FlowConfig(512, 80, 192, 6561, 0.7, encoder, estimator)
    with torch.device("meta"):
        flow = Flow(config, 5)
        hift = HiFT(HiFTConfig())
    assert round(sum(p.numel() for p in flow.parameters()) / 1e6, 1) == 155.8
    # The released 20.8 M parameters include magnitudes and directions, which are joined here.
    assert round(sum(p.numel() for p in hift.parameters()) / 1e6, 1) == 20.8
