"""The prompt of a conversation: the instructions, and the voice that the model should imitate.

Source: `DuplexCapability.prepare` in `MiniCPMO45/modeling_minicpmo_unified.py` of
OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.llm.tokenizer import CHARACTERS_PER_ROW
from duplane.worker.models.minicpm_o.loader import ModelParts
from duplane.worker.models.minicpm_o.types import FloatArray, OptionError


@dataclass(frozen=True)
class Prompt:
    """The embeddings `rows` [n, hidden] of a prompt; those of its voice are also in `voice`.

    `tail` holds the ids of the rows after the voice.
    """

    rows: Tensor
    voice: Tensor | None
    tail: tuple[int, ...]


def embed_prompt(parts: ModelParts, text: str, voice: FloatArray | None, room: int) -> Prompt:
    """Return the prompt with the instructions `text`.

    `voice` (float32 [n] at 16 kHz) is optional. Raises `OptionError` if the prompt has more than
    `room` rows.
    """
    if len(text) > CHARACTERS_PER_ROW * room:
        raise OptionError("system_prompt", f"has {len(text)} characters")
    before = parts.tokens.encode(f"<|im_start|>system\n{text}\n<|audio_start|>")
    after = parts.tokens.encode("<|audio_end|><|im_end|>")
    heard = None if voice is None else parts.audio.encode_clip(voice)
    pieces = [parts.llm.embed(before), heard, parts.llm.embed(after)]
    rows = torch.cat([piece for piece in pieces if piece is not None])
    if len(rows) > room:
        raise OptionError("system_prompt", f"has {len(rows)} tokens, at most {room} fit")
    return Prompt(rows, heard, tuple(after))
