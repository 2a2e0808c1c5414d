"""The vocoder's files: flow.yaml, flow.pt, hift.pt and, where dimensions differ, hift_dims.json.

Knows formats and says what is wrong with a file; builds the two models on a device.
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

from duplane.worker.model.checkpoint import CheckpointError, read_json, section
from duplane.worker.model.flow import Flow, FlowConfig
from duplane.worker.model.hift import HiFT, HiFTConfig

FLOW_CONFIG = "flow.yaml"
FLOW_WEIGHTS = "flow.pt"
HIFT_CONFIG = "hift_dims.json"
HIFT_WEIGHTS = "hift.pt"
HIFT_PREFIX = "generator."

# Magnitude and direction of a weight-normed tensor, in the two forms that torch has written.
WEIGHT_NORM_NAMES = (
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    (".weight_g", ".weight_v"),
)


class _PlainLoader(yaml.SafeLoader):
    """Reads `!new:module.Class` mappings as plain mappings: nothing is imported or built."""


def _plain_mapping(loader: _PlainLoader, suffix: str, node: yaml.Node) -> dict[Any, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise yaml.YAMLError(f"!new:{suffix} is not a mapping")
    return loader.construct_mapping(node, deep=True)


cast("Any", _PlainLoader).add_multi_constructor("!new:", _plain_mapping)


def read_flow_config(directory: Path) -> FlowConfig:
    """Read flow.yaml, or raise `CheckpointError` naming the file and what is wrong."""
    path = directory / FLOW_CONFIG
    try:
        # The loader is a SafeLoader.
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
    """Read hift_dims.json; without one, the generator has the released model's dimensions."""
    path = directory / HIFT_CONFIG
    if not path.exists():
        return HiFTConfig()
    try:
        return HiFTConfig.from_json(read_json(path))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_state(path: Path) -> dict[str, Tensor]:
    """Read a torch state dictionary without running anything in it, mapped where possible."""
    try:
        try:
            state: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
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
    """Replace every magnitude and direction by the weight they make: g * v / norm of v.

    The norm is over all dimensions but the first. A half without its other half is left as it is,
    to be reported as a name that nothing asked for.
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
    """Compute the weight with torch's own kernel.

    Rounded in another order it makes another f0 in the last bit, and over a second the phase of
    the source adds that up to what can be seen in the third digit of a sample.
    """
    holder = nn.Module()
    holder.register_parameter("weight", nn.Parameter(direction, requires_grad=False))
    weight_norm(holder)
    with torch.no_grad():
        holder.get_parameter("parametrizations.weight.original0").copy_(magnitude)
        return cast("Tensor", holder.weight)


def fill(module: nn.Module, state: Mapping[str, Tensor], path: Path, device: torch.device) -> None:
    """Give `module`, built on the meta device, its parameters in float32 on `device`.

    Raises one `CheckpointError` that lists everything missing, misshapen or without a place.
    """
    wanted = module.state_dict()
    faults = [f"{name} is missing" for name in wanted if name not in state]
    faults += [f"{name} has no place in the model" for name in state if name not in wanted]
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
    """Build the flow model from flow.yaml and flow.pt."""
    with torch.device("meta"):
        flow = Flow(read_flow_config(directory), steps)
    path = directory / FLOW_WEIGHTS
    fill(flow, read_state(path), path, device)
    return flow


def load_hift(directory: Path, *, device: torch.device) -> HiFT:
    """Build the generator from hift.pt, its names with or without their prefix."""
    with torch.device("meta"):
        hift = HiFT(read_hift_config(directory))
    path = directory / HIFT_WEIGHTS
    state = {name.removeprefix(HIFT_PREFIX): value for name, value in read_state(path).items()}
    fill(hift, fold_weight_norm(state), path, device)
    return hift
