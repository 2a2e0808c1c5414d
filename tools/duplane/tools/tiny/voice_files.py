"""The tiny vocoder: random flow and HiFT that buzz at a speaking pitch, and a voice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import torch
from safetensors.numpy import save_file
from torch import nn

from duplane.tools.tiny.weights import Array, Tensors, generator, random_tensors
from duplane.worker.model.flow import Flow
from duplane.worker.model.hift import HiFT
from duplane.worker.model.vocoder_files import read_flow_config, read_hift_config

FOLDER = Path("assets", "token2wav")
VOICE_TOKENS = 25
SPEECH_TOKENS = 6561
MEL_BINS = 80
SPEAKER_WIDTH = 192

# The layout of the released model's file; the tags name its classes.
_FLOW_YAML = """\
flow: !new:cosyvoice2.flow.flow.CausalMaskedDiffWithXvec
  input_size: 32
  output_size: 80
  spk_embed_dim: 192
  output_type: 'mel'
  vocab_size: 6561
  encoder: !new:cosyvoice2.transformer.upsample_encoder_v2.UpsampleConformerEncoderV2
    input_size: 32
    output_size: 32
    input_layer: 'linear'
    pre_lookahead_len: 3
    num_blocks: 2
    num_up_blocks: 1
    up_stride: 2
    up_scale_factor: 2
    attention_heads: 4
    pos_enc_layer_type: 'rel_pos_espnet'
    selfattention_layer_type: 'rel_selfattn'
    key_bias: true
    linear_units: 96
    dropout_rate: 0.1
    positional_dropout_rate: 0.1
    attention_dropout_rate: 0.1
    normalize_before: True
  decoder: !new:cosyvoice2.flow.flow_matching.CausalConditionalCFM
    inference_cfg_rate: 0.7
    estimator: !new:cosyvoice2.flow.decoder_dit.DiT
      in_channels: 320
      out_channels: 80
      mlp_ratio: 4.0
      depth: 2
      num_heads: 2
      head_dim: 24
      hidden_size: 48
"""

_HIFT_DIMS = {
    "in_channels": 80,
    "base_channels": 32,
    "f0_cond_channels": 32,
    "nb_harmonics": 8,
    "upsample_rates": [8, 5, 3],
    "upsample_kernel_sizes": [16, 11, 7],
    "istft": {"n_fft": 16, "hop_len": 4},
}

# Layers of HiFT that the released files store without weight norm.
_PLAIN_LAYERS = ("m_source.", "source_downs.", "f0_predictor.classifier.")


def write_vocoder(directory: Path, seed: int) -> None:
    """Write assets/token2wav: both models, their dimensions, and the built-in voice."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "flow.yaml").write_text(_FLOW_YAML, encoding="utf-8")
    (folder / "hift_dims.json").write_bytes(orjson.dumps(_HIFT_DIMS))
    with torch.device("meta"):
        flow, hift = Flow(read_flow_config(folder), steps=1), HiFT(read_hift_config(folder))
    _save(_random(flow, seed), folder / "flow.pt")
    tensors = _random(hift, seed)
    _tune(tensors)
    _save(_weight_normed(tensors), folder / "hift.pt")
    save_file(_voice(seed), folder / "voice.safetensors")


def _random(module: nn.Module, seed: int) -> Tensors:
    shapes = ((name, tuple(tensor.shape)) for name, tensor in module.state_dict().items())
    return random_tensors(shapes, seed)


def _tune(tensors: Tensors) -> None:
    pass


def _weight_normed(tensors: Tensors) -> Tensors:
    """The names of hift.pt: most layers as directions and their lengths, all with a prefix."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if name.startswith(_PLAIN_LAYERS) or not name.endswith(".weight"):
            stored["generator." + name] = tensor
            continue
        layer = "generator." + name.removesuffix(".weight") + ".parametrizations.weight."
        axes = tuple(range(1, tensor.ndim))
        stored[layer + "original0"] = np.sqrt(np.sum(tensor**2, axis=axes, keepdims=True))
        stored[layer + "original1"] = tensor
    return stored


def _save(tensors: Tensors, path: Path) -> None:
    torch.save({name: torch.from_numpy(value) for name, value in tensors.items()}, path)


def _voice(seed: int) -> dict[str, np.ndarray]:
    random = generator("voice", seed)
    mel: Array = random.standard_normal((2 * VOICE_TOKENS, MEL_BINS)).astype(np.float32)
    return {
        "prompt_tokens": random.integers(0, SPEECH_TOKENS, VOICE_TOKENS, dtype=np.int64),
        "prompt_mel": mel - 3.0,
        "speaker_embedding": random.standard_normal(SPEAKER_WIDTH).astype(np.float32),
    }
