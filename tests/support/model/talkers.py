"""A small talker with random weights."""

from __future__ import annotations

import torch

from duplane.worker.models.minicpm_o.tts.talker import Talker

CONFIG = {
    "tts_config": {
        "llm_dim": 12,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_text_tokens": 40,
        "num_audio_tokens": 30,
        "audio_bos_token_id": 39,
        "text_eos_token_id": 38,
        "max_position_embeddings": 100,
    }
}


def small_talker(slots: int, device: str = "cpu") -> Talker:
    """Return a talker whose weights are the same on each device. They are folded."""
    torch.manual_seed(3)
    drawn = Talker(CONFIG, slots, torch.device("cpu"), torch.float32).requires_grad_(False)
    for name, parameter in drawn.named_parameters():
        parameter.normal_(1.0 if "norm" in name or "original0" in name else 0.0, 0.5)
    talker = Talker(CONFIG, slots, torch.device(device), torch.float32).requires_grad_(False)
    for own, other in zip(talker.parameters(), drawn.parameters(), strict=True):
        own.copy_(other)
    talker.fold()
    return talker
