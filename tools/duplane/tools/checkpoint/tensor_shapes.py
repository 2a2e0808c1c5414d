"""The names and shapes of all tensors of the main checkpoint, as config.json implies them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def tensor_shapes(config: dict[str, Any]) -> Shapes:
    """Return name and shape of every tensor of the public format, prefix by prefix."""
    yield from _language("llm.", config)
    is_cut = config.get("drop_vision_last_layer", False)
    layers = config["vision_config"]["num_hidden_layers"] - is_cut
    yield from _vision("vpm.", config["vision_config"], layers)
    yield from _resampler("resampler.", config)
    yield from _audio("apm.", config["audio_config"])
    width = config["audio_config"]["d_model"]
    hidden = config["hidden_size"]
    yield from _projector("audio_projection_layer.", width, hidden)
    yield from _talker("tts.", config["tts_config"])


def _language(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, rows = config["hidden_size"], config["vocab_size"]
    yield prefix + "model.embed_tokens.weight", (rows, hidden)
    yield from _decoder(prefix + "model.", config, config["head_dim"])
    for layer in range(config["num_hidden_layers"]):
        for norm in ("q_norm", "k_norm"):
            name = f"{prefix}model.layers.{layer}.self_attn.{norm}.weight"
            yield name, (config["head_dim"],)
    yield prefix + "lm_head.weight", (rows, hidden)


def _decoder(prefix: str, config: dict[str, Any], head_dim: int) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    for index in range(config["num_hidden_layers"]):
        layer = f"{prefix}layers.{index}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "self_attn.q_proj.weight", (queries, hidden)
        yield layer + "self_attn.k_proj.weight", (keys, hidden)
        yield layer + "self_attn.v_proj.weight", (keys, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, queries)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        yield layer + "mlp.gate_proj.weight", (inner, hidden)
        yield layer + "mlp.up_proj.weight", (inner, hidden)
        yield layer + "mlp.down_proj.weight", (hidden, inner)
    yield prefix + "norm.weight", (hidden,)


def _talker(prefix: str, config: dict[str, Any]) -> Shapes:
    width, codes = config["hidden_size"], config["num_audio_tokens"]
    yield prefix + "emb_text.weight", (config["num_text_tokens"], width)
    yield prefix + "emb_code.0.weight", (codes, width)
    yield prefix + "head_code.0.parametrizations.weight.original0", (codes, 1)
    yield prefix + "head_code.0.parametrizations.weight.original1", (codes, width)
    for name in ("projector_semantic.", "projector_spk."):
        yield from _projector(prefix + name, config["llm_dim"], width)
    # Nothing reads this table, but the released model has it.
    yield prefix + "model.embed_tokens.weight", (config["backbone_vocab_size"], width)
    yield from _decoder(prefix + "model.", config, width // config["num_attention_heads"])


def _audio(prefix: str, config: dict[str, Any]) -> Shapes:
    width, inner = config["d_model"], config["encoder_ffn_dim"]
    yield from _weight_bias(prefix + "conv1", width, config["num_mel_bins"], 3)
    yield from _weight_bias(prefix + "conv2", width, width, 3)
    yield prefix + "embed_positions.weight", (config["max_source_positions"], width)
    for index in range(config["encoder_layers"]):
        layer = f"{prefix}layers.{index}."
        yield from _weight_bias(layer + "self_attn_layer_norm", width)
        yield layer + "self_attn.k_proj.weight", (width, width)
        for name in ("q_proj", "v_proj", "out_proj"):
            yield from _weight_bias(f"{layer}self_attn.{name}", width, width)
        yield from _weight_bias(layer + "final_layer_norm", width)
        yield from _weight_bias(layer + "fc1", inner, width)
        yield from _weight_bias(layer + "fc2", width, inner)
    yield from _weight_bias(prefix + "layer_norm", width)


def _vision(prefix: str, config: dict[str, Any], layers: int) -> Shapes:
    width, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    positions = (config["image_size"] // patch) ** 2
    channels = config["num_channels"]
    yield from _weight_bias(prefix + "embeddings.patch_embedding", width, channels, patch, patch)
    yield prefix + "embeddings.position_embedding.weight", (positions, width)
    for index in range(layers):
        layer = f"{prefix}encoder.layers.{index}."
        yield from _weight_bias(layer + "layer_norm1", width)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _weight_bias(f"{layer}self_attn.{name}", width, width)
        yield from _weight_bias(layer + "layer_norm2", width)
        yield from _weight_bias(layer + "mlp.fc1", inner, width)
        yield from _weight_bias(layer + "mlp.fc2", width, inner)
    yield from _weight_bias(prefix + "post_layernorm", width)


def _resampler(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    vision = config["vision_config"]["hidden_size"]
    yield prefix + "query", (config["query_num"], hidden)
    yield prefix + "kv_proj.weight", (hidden, vision)
    yield prefix + "attn.in_proj_weight", (3 * hidden, hidden)
    yield prefix + "attn.in_proj_bias", (3 * hidden,)
    yield from _weight_bias(prefix + "attn.out_proj", hidden, hidden)
    for name in ("ln_q", "ln_kv", "ln_post"):
        yield from _weight_bias(prefix + name, hidden)
    yield prefix + "proj", (hidden, hidden)


def _projector(prefix: str, inputs: int, outputs: int) -> Shapes:
    yield from _weight_bias(prefix + "linear1", outputs, inputs)
    yield from _weight_bias(prefix + "linear2", outputs, outputs)


def _weight_bias(name: str, *shape: int) -> Shapes:
    yield name + ".weight", shape
    yield name + ".bias", shape[:1]
