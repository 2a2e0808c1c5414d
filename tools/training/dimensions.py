"""The dimensions of the default model, as the contents of its config files."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from duplane.tools.checkpoint.configs import model_config

HIDDEN = 192
TALKER_WIDTH = 128
CODES = 1024
"""Number of speech tokens, without the token that marks the end of speech."""
ENCODER_POSITIONS = 250
"""Positions of the audio encoder. With this many positions, its cache holds four units."""
WINDOW_UNITS = 4

PICTURE_ROWS = 4
"""Embeddings of a picture."""
PICTURE_SIDE = 112
"""Pictures are scaled to about the area of a square with this side, in pixels."""

GENERATION: dict[str, Any] = {
    "sliding_window_mode": "basic",
    "basic_window_high_tokens": 260,
    "basic_window_low_tokens": 180,
}
"""Additional generation settings, for the context window."""
PREPROCESSING: dict[str, Any] = {
    "scale_resolution": PICTURE_SIDE,
    "max_slice_nums": 1,
    "image_feature_size": PICTURE_ROWS,
}
"""Settings of the preparation of pictures: no picture is sliced."""


def default_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of config.json."""
    config = model_config(tokenizer)
    return config | {
        "name_or_path": "duplane-default",
        "version": "default",
        "torch_dtype": "float16",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 512,
        "rope_theta": 10000.0,
        "image_size": PICTURE_SIDE,
        "query_num": PICTURE_ROWS,
        "slice_config": config["slice_config"] | {"scale_resolution": PICTURE_SIDE},
        "vision_config": config["vision_config"]
        | {
            "hidden_size": 128,
            "image_size": PICTURE_SIDE,
            "intermediate_size": 384,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
        },
        "audio_config": config["audio_config"]
        | {
            "d_model": 256,
            "encoder_layers": 5,
            "num_hidden_layers": 5,
            "encoder_attention_heads": 8,
            "encoder_ffn_dim": 1024,
            "max_source_positions": ENCODER_POSITIONS,
        },
        "tts_config": config["tts_config"]
        | {
            "hidden_size": TALKER_WIDTH,
            "intermediate_size": 384,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "llm_dim": HIDDEN,
            "num_audio_tokens": CODES + 1,
        },
    }
