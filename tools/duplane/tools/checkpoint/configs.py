"""Writes config.json and the other config files of a small model, in the public format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from duplane.tools.checkpoint.tokenizer_files import token_id

HIDDEN = 128
TALKER_WIDTH = 64
ROW_MULTIPLE = 64


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of config.json for a tokenizer."""

    rows = -(-tokenizer.get_vocab_size() // ROW_MULTIPLE) * ROW_MULTIPLE
    return {
        "architectures": ["MiniCPMO"],
        "model_type": "minicpmo",
        "version": "4.5",
        "name_or_path": "duplane-tiny",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "vocab_size": rows,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "bos_token_id": token_id(tokenizer, "<|im_start|>"),
        "eos_token_id": token_id(tokenizer, "<|im_end|>"),
        "pad_token_id": None,
        "vision_config": _VISION,
        "audio_config": _AUDIO,
        "tts_config": {
            **_TALKER,
            "llm_dim": HIDDEN,
            "num_text_tokens": rows,
            "audio_bos_token_id": token_id(tokenizer, "<focus>"),
            "text_eos_token_id": token_id(tokenizer, "</perception>"),
        },
        "slice_config": {"max_slice_nums": 1, "patch_size": 14, "scale_resolution": 448},
        "query_num": 64,
        "drop_vision_last_layer": False,
        "audio_pool_step": 5,
        "audio_chunk_length": 1.0,
        "stream_input": True,
        "image_size": 448,
        "patch_size": 14,
        "slice_mode": True,
        "init_vision": True,
        "init_audio": True,
        "init_tts": True,
        "vision_batch_size": 16,
        "batch_vision_input": True,
        "use_image_id": True,
        "listen_speak_type": "asr",
        "use_cache": True,
    }


_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "image_size": 224,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_channels": 3,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "attention_dropout": 0.0,
}

_AUDIO = {
    "model_type": "whisper",
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
    "activation_function": "gelu",
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "scale_embedding": False,
}

_TALKER = {
    "model_type": "minicpmtts",
    "hidden_size": TALKER_WIDTH,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "num_audio_tokens": 6562,
    "num_vq": 1,
    "condition_type": "hidden_text_merge",
    "backbone_model": "llama",
    "audio_tokenizer_type": "s3tokenizer_step_audio",
    "audio_tokenizer_sample_rate": 16000,
    "normalize_projected_hidden": True,
    "interleaved": False,
    "attention_type": "full_attention",
    "recomputed_chunks": 1,
    "window_size": 2,
    "projector_type": "mlp",
    "streaming": True,
    "top_p": 0.85,
    "top_k": 25,
    "repetition_penalty": 1.05,
    "temperature": 0.8,
    "backbone_vocab_size": 64,
    "s3_stream_chunk_size": 25,
    "s3_stream_generate": False,
    "s3_stream_n_timesteps": 10,
    "s3_stream_prelook_size": 3,
}

_PREPROCESSOR = {
    "version": 4.5,
    "image_processor_type": "MiniCPMVImageProcessor",
    "feature_extractor_type": "MiniCPMAAudioProcessor",
    "processor_class": "MiniCPMOProcessor",
    "patch_size": 14,
    "scale_resolution": 448,
    "max_slice_nums": 9,
    "slice_mode": True,
    "use_image_id": True,
    "image_feature_size": 64,
    "norm_mean": [0.5, 0.5, 0.5],
    "norm_std": [0.5, 0.5, 0.5],
    "audio_pool_step": 5,
    "unk": "<unk>",
    "im_start": "<image>",
    "im_end": "</image>",
    "slice_start": "<slice>",
    "slice_end": "</slice>",
    "im_id_start": "<image_id>",
    "im_id_end": "</image_id>",
}


def write_configs(config: dict[str, Any], directory: Path) -> None:
    """Write config.json, generation_config.json and preprocessor_config.json."""
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    }
    files = {
        "config.json": config,
        "generation_config.json": generation,
        "preprocessor_config.json": _PREPROCESSOR,
    }
    for name, content in files.items():
        (directory / name).write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))
