"""The prompt of a conversation: the instructions, and the voice that the model should imitate.

Source: `DuplexCapability.prepare` in `MiniCPMO45/modeling_minicpmo_unified.py` of
OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.audio.clip import clip_rows
from duplane.worker.models.minicpm_o.llm.tokenizer import CHARACTERS_PER_ROW
from duplane.worker.models.minicpm_o.loader import ModelParts
from duplane.worker.models.minicpm_o.preparer_parts import PromptParts
from duplane.worker.models.types import FloatArray, OptionError


@dataclass(frozen=True)
class DuplexPrompt:
    """A prompt of `row_count` rows: the ids `head`, the voice (float32 [n] at 16 kHz), `tail`."""

    head: tuple[int, ...]
    voice: FloatArray | None
    tail: tuple[int, ...]
    row_count: int


def lay_out(parts: PromptParts, text: str, voice: FloatArray | None, room: int) -> DuplexPrompt:
    """Return the prompt with the instructions `text`, and with `voice` if there is one.

    Raises `OptionError` if the prompt has more than `room` rows.
    """
    if len(text) > CHARACTERS_PER_ROW * room:
        raise OptionError("system_prompt", f"has {len(text)} characters")
    head = parts.tokens.encode(f"<|im_start|>system\n{text}\n<|audio_start|>")
    tail = parts.tokens.encode("<|audio_end|><|im_end|>")
    heard = 0 if voice is None else clip_rows(parts.audio, len(voice))
    count = len(head) + heard + len(tail)
    if count > room:
        raise OptionError("system_prompt", f"has {count} tokens, at most {room} fit")
    return DuplexPrompt(tuple(head), voice, tuple(tail), count)


def embed_prompt(parts: ModelParts, prompt: DuplexPrompt) -> tuple[Tensor, Tensor | None]:
    """Return the embeddings [rows, hidden] of a prompt; those of its voice also on their own."""
    heard = None if prompt.voice is None else parts.audio.encode_clip(prompt.voice)
    pieces = [parts.llm.embed(prompt.head), heard, parts.llm.embed(prompt.tail)]
    return torch.cat([piece for piece in pieces if piece is not None]), heard
