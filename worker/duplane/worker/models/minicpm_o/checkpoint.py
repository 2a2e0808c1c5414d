"""Reads a checkpoint directory: its config.json, and its tensors by name, one at a time.

This module depends on the file formats, but not on the torch modules that it fills.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from duplane.worker.models.interface import LoadError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MODEL_TYPE = "minicpmo"
VERSIONS = ("4.5", "default")
"""Versions of the model that duplane runs: the released one, and that of its own small model."""

_DIGESTED = frozenset((".json", ".npz", ".onnx", ".pt", ".safetensors", ".txt", ".wav", ".yaml"))
_PART_BYTES = 1 << 16
_PARTS = 64

log = logging.getLogger(__name__)

T = TypeVar("T", int, float, bool, str)


class CheckpointError(LoadError):
    """The checkpoint cannot be used. The message names the file, and the field or tensors."""


def field(config: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Read one value of a configuration and check its type.

    If `kind` is float, a whole number is accepted too. Raises `CheckpointError` if the field is
    absent (or null) and has no default, or is of another type.
    """
    value = config.get(name)
    if value is None:
        if default is None:
            raise CheckpointError(f"configuration lacks {name!r}")
        return default
    if kind is float and type(value) is int:
        return cast("T", float(value))
    if type(value) is not kind:
        raise CheckpointError(f"configuration field {name!r} is {value!r}, not {kind.__name__}")
    return value


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read one nested object of a configuration, e.g. `audio_config`."""
    value = config.get(name)
    if not isinstance(value, dict):
        raise CheckpointError(f"configuration lacks the object {name!r}")
    return cast("dict[str, Any]", value)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `CheckpointError` that names the file."""
    try:
        value: object = orjson.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return cast("dict[str, Any]", value)


# What the configuration classes of MiniCPM-o 4.5 have where a checkpoint's file has no value: those
# of its `configuration_minicpmo.py`, and `Qwen3Config` and `WhisperConfig` of transformers 4.51.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "audio_pool_step": 5,
    "audio_chunk_length": 1.0,
}
_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "audio_config": {
        "num_mel_bins": 80,
        "d_model": 384,
        "encoder_layers": 4,
        "encoder_attention_heads": 6,
        "encoder_ffn_dim": 1536,
        "max_source_positions": 1500,
    },
    "tts_config": {
        "llm_dim": 2560,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 20,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "num_text_tokens": 21_178,
        "num_audio_tokens": 4097,
        "audio_bos_token_id": 21_132,
        "text_eos_token_id": 21_133,
    },
}
_VISION: Mapping[str, Any] = {
    "hidden_size": 1152,
    "image_size": 980,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the reference's defaults for the fields that it lacks."""
    filled = {"vision_config": dict(_VISION), **_DEFAULTS, **_given(config)}
    for name, defaults in _SECTIONS.items():
        part: object = filled.get(name, {})
        if isinstance(part, dict):
            filled[name] = {**defaults, **_given(cast("dict[str, Any]", part))}
    return filled


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json of a checkpoint, with the reference's defaults.

    Raises `CheckpointError` for another kind or version of model.
    """
    config = read_json(directory / "config.json")
    kind = field(config, "model_type", str, MODEL_TYPE)
    if kind != MODEL_TYPE:
        raise CheckpointError(
            f"{directory} is a model of type {kind!r}; duplane runs {MODEL_TYPE!r} (MiniCPM-o 4.5)"
        )
    version = str(config.get("version") or VERSIONS[0])  # a text or a number
    if version not in VERSIONS:
        raise CheckpointError(
            f"{directory} is version {version!r} of {MODEL_TYPE!r}; duplane runs version "
            f"{VERSIONS[0]!r} (MiniCPM-o 4.5)"
        )
    return with_defaults(config)


class Checkpoint:
    """One checkpoint directory in the public format: config.json and (sharded) safetensors."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_config(directory)
        self._file_of = _index(directory)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensors."""
        return tuple(sorted(set(self._file_of.values())))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by name; reads only the files' headers."""
        found: dict[str, tuple[int, ...]] = {}
        for path in self.files:
            try:
                with cast("Any", safe_open(path, framework="pt")) as file:
                    for name in file.keys():  # noqa: SIM118  the file is not a mapping
                        found[name] = tuple(file.get_slice(name).get_shape())
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return found

    @property
    def parameter_count(self) -> int:
        """The number of values in all tensors; reads only the files' headers."""
        return sum(map(math.prod, self.shapes().values()))

    def digest(self) -> str:
        """Return a digest of the files that decide the output. Equal files have equal digests.

        Of a large file only its size and some parts are read.
        """
        digest = hashlib.blake2b(digest_size=16)
        paths = (path for path in self.directory.rglob("*") if path.suffix in _DIGESTED)
        for path in sorted(paths):
            size = path.stat().st_size
            digest.update(f"{path.relative_to(self.directory).as_posix()} {size}\n".encode())
            starts = range(0, size, max(_PART_BYTES, size // _PARTS))
            with path.open("rb") as file:
                for start in starts:
                    file.seek(start)
                    digest.update(file.read(_PART_BYTES))
        return digest.hexdigest()

    def load_into(self, module: nn.Module, prefix: str) -> tuple[str, ...]:
        """Fill one module with the tensors `prefix + name`, as `load_all` does.

        Returns the names of tensors with this `prefix` that the module does not use.
        """
        unused = self.load_all({prefix: module})
        return tuple(name for name in unused if name.startswith(prefix))

    def load_all(self, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
        """Fill the parameters and persistent buffers of modules from the tensors `prefix + name`.

        Tensors are read one at a time, file after file, and converted to the dtype and device of
        the parameter. So the whole checkpoint is never in memory. Raises one `CheckpointError` that
        lists all missing and misshapen tensors. Returns the names of tensors that no module uses;
        these are not read.
        """
        wanted = {
            prefix + name: tensor
            for prefix, module in modules.items()
            for name, tensor in module.state_dict().items()
        }
        faults = [f"{name} is missing" for name in wanted if name not in self._file_of]
        with torch.no_grad():
            for name, tensor in self._read(name for name in wanted if name in self._file_of):
                target = wanted[name]
                if tensor.shape != target.shape:
                    faults.append(
                        f"{name} has shape {list(tensor.shape)}, expected {list(target.shape)}"
                    )
                    continue
                target.copy_(tensor)
        if faults:
            raise CheckpointError(f"{self.directory}: " + "; ".join(sorted(faults)))
        return tuple(sorted(name for name in self._file_of if name not in wanted))

    def _read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of one file after the other. An open file keeps its pages mapped."""
        groups = groupby(sorted(names, key=self._place), key=self._file_of.__getitem__)
        for number, (path, group) in enumerate(groups, start=1):
            name = ""
            try:
                with cast("Any", safe_open(path, framework="pt")) as file:
                    megabytes = path.stat().st_size / 1e6
                    log.info("weights: file %d of %d, %.0f MB", number, len(self.files), megabytes)
                    for name in group:
                        yield name, cast("torch.Tensor", file.get_tensor(name))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error

    def _place(self, name: str) -> tuple[Path, str]:
        return self._file_of[name], name


def _index(directory: Path) -> dict[str, Path]:
    """Map every tensor name to its file."""
    if (directory / INDEX_FILE).exists():
        entries = section(read_json(directory / INDEX_FILE), "weight_map")
        outside = sorted({str(file) for file in entries.values() if Path(file).name != file})
        if outside:
            raise CheckpointError(f"{directory / INDEX_FILE} names files elsewhere: {outside}")
        return {name: directory / file for name, file in entries.items()}
    path = directory / SINGLE_FILE
    if not path.exists():
        raise CheckpointError(f"{directory} has neither {INDEX_FILE} nor {SINGLE_FILE}")
    try:
        with cast("Any", safe_open(path, framework="pt")) as file:
            return dict.fromkeys(file.keys(), path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
