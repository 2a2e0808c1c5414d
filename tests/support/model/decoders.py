"""Configurations of small decoders."""

from __future__ import annotations

from duplane.worker.models.minicpm_o.llm.decoder import DecoderConfig

QWEN = DecoderConfig(
    hidden_size=48,
    intermediate_size=80,
    layers=3,
    query_heads=6,
    key_heads=2,
    head_dim=16,
    rope_theta=50_000.0,
    norm_eps=1e-6,
    has_head_norm=True,
    has_attention_bias=False,
)
