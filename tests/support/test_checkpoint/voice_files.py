"""Writes the tiny vocoder: a random flow, a HiFT that hums at a speaking pitch, and a voice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from support.test_checkpoint.weights import Array, Tensors, random_tensors
from torch import nn

from duplane.tools.checkpoint.flow_yaml import FlowDims, flow_yaml
from duplane.tools.checkpoint.vocoder_files import (
    FOLDER,
    MEL_BINS,
    SPEECH_TOKENS,
    random_voice,
    weight_normed,
)
from duplane.tools.checkpoint.weights import random_numbers, save_safetensors
from duplane.worker.models.minicpm_o.types import OUTPUT_SAMPLE_RATE
from duplane.worker.models.minicpm_o.vocoder.files import read_flow_config, read_hift_config
from duplane.worker.models.minicpm_o.vocoder.flow import Flow
from duplane.worker.models.minicpm_o.vocoder.hift import HiFT
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder, VocoderChunk, VocoderVoice

VOICE_TOKENS = 25

PITCH = 140.0
"""Pitch of the voice in Hz, approximately."""
PITCH_RANGE = 40.0
HARMONICS = (2.0, 2.0, 1.8, 1.6, 1.3, 1.0, 0.8, 0.6, 0.5)
WAVE = 0.11
LOUDNESS = -2.3
LOUDNESS_RANGE = 0.4
LEVEL = 0.06
LISTENING_S = 4
SILENCE = -9.0
NOTHING = 1e-3

_FLOW_DIMS = FlowDims(
    width=32,
    heads=4,
    inner=96,
    blocks=2,
    up_blocks=1,
    estimator_width=48,
    estimator_heads=2,
    estimator_head_width=24,
    estimator_depth=1,
)

_HIFT_DIMS: dict[str, Any] = {
    "in_channels": 80,
    "base_channels": 32,
    "f0_cond_channels": 32,
    "nb_harmonics": 8,
    # The product of these rates and the hop is 480 samples per mel frame, as in the released model.
    # The longer hop and the later upsampling save most of the computation.
    "upsample_rates": [2, 5, 6],
    "upsample_kernel_sizes": [4, 11, 12],
    "istft": {"n_fft": 32, "hop_len": 8},
}


def write_vocoder(directory: Path, seed: int) -> None:
    """Write assets/token2wav: both models, their dimensions, and the built-in voice."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "flow.yaml").write_text(flow_yaml(_FLOW_DIMS), encoding="utf-8")
    (folder / "hift_dims.json").write_bytes(orjson.dumps(_HIFT_DIMS))
    with torch.device("meta"):
        flow, hift = Flow(read_flow_config(folder), steps=1), HiFT(read_hift_config(folder))
    _save(_tuned_flow(_random(flow, seed)), folder / "flow.pt")
    voice, generator = random_voice(seed, VOICE_TOKENS), _tuned_hift(_random(hift, seed))
    save_safetensors(_torch(voice), folder / "voice.safetensors")
    _save(weight_normed(generator), folder / "hift.pt")
    # The loudness depends on the random weights: measure it, then set the level. The change is
    # rounded, because the last digits of the loudness differ between processors.
    change = math.log(LEVEL / _loudness(folder, voice, seed))
    generator["conv_post.bias"][:2] += round(change, 1)
    _save(weight_normed(generator), folder / "hift.pt")


def _random(module: nn.Module, seed: int) -> Tensors:
    shapes = ((name, tuple(tensor.shape)) for name, tensor in module.state_dict().items())
    return random_tensors(shapes, seed)


def _tuned_flow(tensors: Tensors) -> Tensors:
    """Make the mel depend more on the tokens than on the solver's noise."""
    estimator = "decoder.estimator."
    noise, mean = slice(MEL_BINS), slice(MEL_BINS, 2 * MEL_BINS)
    tensors[estimator + "in_proj.weight"][:, noise] *= 0.1
    tensors[estimator + "in_proj.weight"][:, mean] *= 2.0
    tensors[estimator + "final_layer.linear.weight"] *= 2.0
    return tensors


def _tuned_hift(tensors: Tensors) -> Tensors:
    """Make HiFT sound like a voice: a tone at a speaking pitch that follows the mel.

    Random layers alone give noise at full scale. Here the residual blocks add little. The last
    layer has four input channels. Two of them carry the source's wave and its inverse: both are
    needed, because an activation before the layer reduces negative values. These two channels raise
    one of the two lowest bins of the spectrum and lower the other. With zero phase, these bins have
    opposite signs, so the sum oscillates about zero. The other two channels come from the mel and
    change both bins equally. No weight is exactly zero, because weight norm divides by the length
    of a row.
    """
    for name, tensor in tensors.items():
        if "convs2" in name and name.endswith("weight"):
            tensor *= 0.1
    tensors["f0_predictor.classifier.weight"] *= PITCH_RANGE
    tensors["f0_predictor.classifier.bias"][:] = PITCH
    tensors["m_source.l_linear.weight"][:] = HARMONICS
    tensors["m_source.l_linear.bias"][:] = 0.0

    wave, inverse = 0, 3
    down, up = tensors["source_downs.2.weight"], tensors["ups.2.weight"]
    down[:] = 0.0
    down[wave, 0], down[inverse, 0] = WAVE, -WAVE
    up[:, [wave, inverse]] *= NOTHING
    for level in (0, 1):  # only the mel determines the loudness
        tensors[f"source_downs.{level}.weight"] *= NOTHING
    for layer in ("source_downs.2", "ups.2"):
        tensors[layer + ".bias"][:] = 0.0

    last, levels = tensors["conv_post.weight"], tensors["conv_post.bias"]
    bins, middle = _HIFT_DIMS["istft"]["n_fft"] // 2 + 1, last.shape[-1] // 2
    last *= NOTHING
    for row, sign in ((0, 1.0), (1, -1.0)):
        last[row, wave, middle], last[row, inverse, middle] = sign, -sign
        last[row, 1], last[row, 2] = LOUDNESS_RANGE, -LOUDNESS_RANGE
    levels[:] = 0.0
    levels[:2] = LOUDNESS
    levels[2:bins] = SILENCE
    return tensors


def _loudness(folder: Path, voice: dict[str, np.ndarray], seed: int) -> float:
    """Return the median loudness (RMS of 20 ms) of some seconds of random speech tokens."""
    vocoder = Vocoder.load(folder, slot_count=1)
    vocoder.prime(0, VocoderVoice(**voice))
    vocoder.start_turn(0)
    count = vocoder.window + vocoder.lookahead
    random = random_numbers("tokens", seed)
    heard: list[Array] = []
    for _ in range(LISTENING_S):
        tokens: list[int] = random.integers(0, SPEECH_TOKENS, count).tolist()
        heard += vocoder.decode([VocoderChunk(0, tokens, is_last=False)])
    frames = np.concatenate(heard)[OUTPUT_SAMPLE_RATE:].reshape(-1, OUTPUT_SAMPLE_RATE // 50)
    return float(np.median(frames.std(axis=1)))


def _save(tensors: Tensors, path: Path) -> None:
    torch.save(_torch(tensors), path)


def _torch(tensors: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in tensors.items()}
