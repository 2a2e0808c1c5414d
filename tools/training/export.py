"""Writes the trained networks as a checkpoint in the public format, in float16."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import torch
from tokenizers import Tokenizer
from torch import Tensor

from duplane.tools.checkpoint.configs import write_configs
from duplane.tools.checkpoint.tokenizer_files import write_tokenizer
from duplane.tools.checkpoint.weights import save_safetensors
from duplane.worker.models.minicpm_o.checkpoint import SINGLE_FILE
from duplane.worker.models.minicpm_o.preparer_parts import GENERATION_FILE, VOCODER_FOLDER
from duplane.worker.models.minicpm_o.vision.preprocessing import RULES_FILE
from duplane.worker.models.minicpm_o.vocoder import harmonic
from duplane.worker.models.minicpm_o.vocoder.harmonic import HarmonicNetwork
from training.dimensions import GENERATION, PREPROCESSING
from training.listener.starting import ENCODER, LISTENER, TOKENIZER_FILE
from training.torch_calls import load_weights


def write_checkpoint(
    directory: Path,
    tokenizer: Tokenizer,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    vocoder: HarmonicNetwork,
) -> None:
    """Write all files of a checkpoint; `tensors` have their names in the public format."""
    write_settings(directory, tokenizer, config)
    _write(tensors, directory / SINGLE_FILE)
    folder = directory / VOCODER_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    content = {"type": harmonic.KIND, **asdict(vocoder.config)}
    config_bytes = orjson.dumps(content, option=orjson.OPT_INDENT_2)
    (folder / harmonic.CONFIG).write_bytes(config_bytes)
    _write(vocoder.state_dict(), folder / harmonic.WEIGHTS)


def mix_checkpoints(
    directory: Path, first: Path, second: Path, share: float, encoder_share: float | None = None
) -> None:
    """Write the checkpoint `second`, with a listener between that of `first` and its own.

    A `share` of 0 is `first`, 1 is `second`. `encoder_share` is that of the audio encoder, if it is
    another one. Raises ValueError if they have different tensors, or
    different tokenizers.
    """
    texts = [(path / TOKENIZER_FILE).read_bytes() for path in (first, second)]
    if texts[0] != texts[1]:
        raise ValueError(f"{first} and {second} have different tokenizers")
    before, after = (load_weights(path / SINGLE_FILE) for path in (first, second))
    if {name: value.shape for name, value in before.items()} != {
        name: value.shape for name, value in after.items()
    }:
        raise ValueError(f"{first} and {second} have different tensors")
    shutil.copytree(second, directory, dirs_exist_ok=True)
    shares = {
        name: share if encoder_share is None or not name.startswith(ENCODER) else encoder_share
        for name in after
        if name.startswith(LISTENER)
    }
    mixed = after | {
        name: before[name].float().lerp(after[name].float(), own) for name, own in shares.items()
    }
    _write(mixed, directory / SINGLE_FILE)


def write_settings(directory: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Write the files without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, directory, bad_ids=())
    write_configs(config, directory)
    _change(directory / GENERATION_FILE, GENERATION)
    _change(directory / RULES_FILE, PREPROCESSING)


def _change(path: Path, settings: dict[str, Any]) -> None:
    content = orjson.loads(path.read_bytes()) | settings
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_safetensors(
        {name: value.detach().to(torch.float16).contiguous() for name, value in tensors.items()},
        path,
    )
