"""Loads the vocoder's files: flow.yaml, flow.pt, hift.pt and, if present, hift_dims.json.

The file formats are those of the package `stepaudio2` in minicpmo-utils 1.0.6; hift_dims.json is
specific to duplane and holds dimensions that differ from the released model.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, read_json, section
from duplane.worker.models.minicpm_o.vocoder.flow import Flow, FlowConfig
from duplane.worker.models.minicpm_o.vocoder.hift import HiFT, HiFTConfig

FLOW_CONFIG = "flow.yaml"
FLOW_WEIGHTS = "flow.pt"
HIFT_CONFIG = "hift_dims.json"
HIFT_WEIGHTS = "hift.pt"
HIFT_PREFIX = "generator."

# Names of the magnitude and direction of a weight-normed tensor, in new and old torch versions.
WEIGHT_NORM_NAMES = (
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    (".weight_g", ".weight_v"),
)


class _PlainLoader(yaml.SafeLoader):
    """Reads `!new:module.Class` mappings as plain mappings, without importing the class."""


def _plain_mapping(loader: _PlainLoader, suffix: str, node: yaml.Node) -> dict[Any, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise yaml.YAMLError(f"!new:{suffix} is not a mapping")
    return loader.construct_mapping(node, deep=True)


cast("Any", _PlainLoader).add_multi_constructor("!new:", _plain_mapping)


def read_flow_config(directory: Path) -> FlowConfig:
    """Read flow.yaml. Raises `CheckpointError` that names the file and the fault."""
    path = directory / FLOW_CONFIG
    try:
        # This is safe, because the loader derives from SafeLoader.
        value: object = yaml.load(path.read_text(), Loader=_PlainLoader)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a mapping")
    try:
        return FlowConfig.from_yaml(section(cast("dict[str, Any]", value), "flow"))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_hift_config(directory: Path) -> HiFTConfig:
    """Read hift_dims.json. Without this file the dimensions are those of the released model."""
    path = directory / HIFT_CONFIG
    if not path.exists():
        return HiFTConfig()
    try:
        return HiFTConfig.from_json(read_json(path))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_state(path: Path) -> dict[str, Tensor]:
    """Read a torch state dictionary, memory-mapped if possible. No code in the file is run."""
    try:
        try:
            state: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files of torch before 1.6 cannot be mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not a state dictionary")
    entries = cast("dict[object, object]", state)
    wrong = [repr(k) for k, v in entries.items() if not (type(k) is str and isinstance(v, Tensor))]
    if wrong:
        raise CheckpointError(f"{path}: not tensors: {', '.join(wrong[:10])}")
    return cast("dict[str, Tensor]", entries)


def fold_weight_norm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace each magnitude g and direction v by the weight g * v / norm(v).

    The norm is over all dimensions but the first. A magnitude or direction without its counterpart
    is kept, so that `fill` reports it as an unknown name.
    """
    folded = dict(state)
    for magnitude_name, direction_name in WEIGHT_NORM_NAMES:
        for name in state:
            stem = name.removesuffix(magnitude_name)
            if stem == name or stem + direction_name not in state:
                continue
            magnitude, direction = folded.pop(name), folded.pop(stem + direction_name)
            folded[stem + ".weight"] = _normed(magnitude.float(), direction.float())
    return folded


def _normed(magnitude: Tensor, direction: Tensor) -> Tensor:
    """Return the weight for a magnitude and a direction, computed with torch's own kernel.

    Another order of operations would change the last bit of the pitch f0. The phase of the source
    is a running sum of f0, so after a second the third digit of a sample would differ.
    """
    holder = nn.Module()
    holder.register_parameter("weight", nn.Parameter(direction, requires_grad=False))
    weight_norm(holder)
    with torch.no_grad():
        holder.get_parameter("parametrizations.weight.original0").copy_(magnitude)
        return cast("Tensor", holder.weight)


def fill(module: nn.Module, state: Mapping[str, Tensor], path: Path, device: torch.device) -> None:
    """Load the parameters of `module`, built on the meta device, as float32 to `device`.

    Raises one `CheckpointError` that lists all missing, misshapen and unknown tensors.
    """
    wanted = module.state_dict()
    faults = [f"{name} is missing" for name in wanted if name not in state]
    faults += [f"{name} is not in the model" for name in state if name not in wanted]
    faults += [
        f"{name} has shape {list(state[name].shape)}, expected {list(target.shape)}"
        for name, target in wanted.items()
        if name in state and state[name].shape != target.shape
    ]
    if faults:
        raise CheckpointError(f"{path}: " + "; ".join(sorted(faults)))
    filled = {name: tensor.to(device, torch.float32, copy=True) for name, tensor in state.items()}
    module.load_state_dict(filled, assign=True)
    module.requires_grad_(False).eval()


def load_flow(directory: Path, *, steps: int, device: torch.device) -> Flow:
    """Load the flow model from flow.yaml and flow.pt."""
    with torch.device("meta"):
        flow = Flow(read_flow_config(directory), steps)
    path = directory / FLOW_WEIGHTS
    fill(flow, read_state(path), path, device)
    return flow


def load_hift(directory: Path, *, device: torch.device) -> HiFT:
    """Load the HiFT generator from hift.pt, where tensor names may start with `generator.`."""
    with torch.device("meta"):
        hift = HiFT(read_hift_config(directory))
    path = directory / HIFT_WEIGHTS
    state = {name.removeprefix(HIFT_PREFIX): value for name, value in read_state(path).items()}
    fill(hift, fold_weight_norm(state), path, device)
    return hift
