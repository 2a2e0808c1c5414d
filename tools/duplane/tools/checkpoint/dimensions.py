"""The dimensions of released models, whole or scaled down, for random checkpoints like them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from duplane.tools.checkpoint.configs import ROW_MULTIPLE, model_config
from duplane.tools.checkpoint.flow_yaml import FlowDims

MINICPM_O_4_5 = "minicpm-o-4.5"
LIKENESSES = (MINICPM_O_4_5,)
VOICE_TOKENS = 125
"""Speech tokens of the random voice: 5 s."""
HEAD = 128
VOCODER_HEAD = 64
RESAMPLER_HEAD = 128
FEWEST_LAYERS = 2


@dataclass(frozen=True)
class Dimensions:
    """The dimensions of a random checkpoint: config.json and the vocoder's files."""

    config: dict[str, Any]
    flow: FlowDims
    hift: dict[str, Any]


@dataclass(frozen=True)
class _Scale:
    """Multiplies sizes by `factor`; rounds each to a given multiple, and never down to zero."""

    factor: float

    def width(self, size: int, multiple: int) -> int:
        return max(1, round(size * self.factor / multiple)) * multiple

    def layers(self, count: int) -> int:
        return max(FEWEST_LAYERS, round(count * self.factor))


def dimensions(like: str, factor: float, tokenizer: Tokenizer) -> Dimensions:
    """Return a released model's dimensions; `factor` scales all widths and numbers of layers.

    The ids of special tokens come from the tokenizer, and the vocabulary is at least as large as
    the tokenizer's. Raises ValueError for an unknown model and for factors outside (0, 2].
    """
    if like not in LIKENESSES:
        raise ValueError(f"like: {like!r} is not one of {', '.join(LIKENESSES)}")
    if not 0 < factor <= 2:
        raise ValueError(f"scale: {factor} must be above 0 and at most 2")
    scale = _Scale(factor)
    width = scale.width(512, VOCODER_HEAD)
    return Dimensions(
        config=_config(scale, tokenizer),
        flow=FlowDims(
            width=width,
            heads=width // VOCODER_HEAD,
            inner=4 * width,
            blocks=scale.layers(6),
            up_blocks=scale.layers(4),
            estimator_width=width,
            estimator_heads=width // VOCODER_HEAD,
            estimator_head_width=VOCODER_HEAD,
            estimator_depth=scale.layers(16),
        ),
        hift={
            "base_channels": scale.width(512, 32),
            "f0_cond_channels": scale.width(512, 32),
        },
    )


def _config(scale: _Scale, tokenizer: Tokenizer) -> dict[str, Any]:
    config = model_config(tokenizer)
    least = tokenizer.get_vocab_size()
    hidden = scale.width(4096, RESAMPLER_HEAD)
    key_heads = scale.width(8, 1)
    return config | {
        "name_or_path": "duplane-random",
        "hidden_size": hidden,
        "num_hidden_layers": scale.layers(36),
        "num_attention_heads": 4 * key_heads,
        "num_key_value_heads": key_heads,
        "head_dim": HEAD,
        "intermediate_size": 3 * hidden,
        "vocab_size": _rows(scale.width(151_748, 4), least),
        "rope_theta": 1_000_000.0,
        "drop_vision_last_layer": True,
        "vision_config": config["vision_config"] | _vision(scale),
        "audio_config": config["audio_config"] | _audio(scale),
        "tts_config": config["tts_config"] | _talker(scale, hidden, least),
    }


def _rows(wanted: int, least: int) -> int:
    """Return the size of a vocabulary: `wanted`, or more if the tokenizer needs `least`."""
    return wanted if wanted >= least else -(-least // ROW_MULTIPLE) * ROW_MULTIPLE


def _vision(scale: _Scale) -> dict[str, Any]:
    heads = scale.width(16, 1)
    return {
        "hidden_size": 72 * heads,
        "num_attention_heads": heads,
        "intermediate_size": 269 * heads,
        "num_hidden_layers": 1 + scale.layers(26),
        "image_size": 980,
    }


def _audio(scale: _Scale) -> dict[str, Any]:
    heads = scale.width(16, 1)
    layers = scale.layers(24)
    return {
        "d_model": 64 * heads,
        "encoder_attention_heads": heads,
        "encoder_layers": layers,
        "num_hidden_layers": layers,
        "encoder_ffn_dim": 256 * heads,
    }


def _talker(scale: _Scale, hidden: int, least: int) -> dict[str, Any]:
    heads = scale.width(12, 1)
    return {
        "hidden_size": 64 * heads,
        "intermediate_size": 256 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": scale.layers(20),
        "llm_dim": hidden,
        "num_text_tokens": _rows(scale.width(152_064, 4), least),
        "backbone_vocab_size": scale.width(32_000, 4),
    }
