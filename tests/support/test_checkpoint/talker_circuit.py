"""Makes the random talker speak a second per unit, and stop soon after the end of a turn.

The attention head that writes the gate (see `circuits`) attends to the condition row that marks the
end of a turn, or of a chat's text. Without such a row the gate is -1, and the talker never chooses
the end of speech. Some steps after such a row the gate becomes +1, and the talker always chooses
the end of speech.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from support.test_checkpoint.circuits import (
    CONST,
    CONST_SIZE,
    FREE,
    GATE,
    MARK,
    START,
    FlagHeads,
    Swing,
    gate_output,
    normed,
    quieten,
    unit_vectors,
)
from support.test_checkpoint.weights import Tensors
from tokenizers import Tokenizer

from duplane.tools.checkpoint.tokenizer_files import token_id

LAYER_NOISE = 0.15
END_PAIR = 4
"""Rotary pair of the gate. With theta 1e4 and 32 channels per head, its cosine changes its sign
after 16 rows."""
CODE_GAIN = 2.5
"""Scale of the speech tokens' logits: many tokens are likely, but not equally."""
END_DIRECTION = {GATE: 1.0, CONST: -0.3}
END_GAIN = 12.0


def steer_talker(tensors: Tensors, config: dict[str, Any], tokenizer: Tokenizer, seed: int) -> None:
    """Overwrite embeddings, the output head, the gate head and the projector's reserved rows."""
    talker = config["tts_config"]
    width, codes = talker["hidden_size"], talker["num_audio_tokens"]
    quieten(tensors, "tts.model.", LAYER_NOISE)
    tensors["tts.model.embed_tokens.weight"][:] = 0.0

    text = unit_vectors("tts.emb_text", talker["num_text_tokens"], width, seed)
    flags = (
        (token_id(tokenizer, "<|turn_eos|>"), START),
        (talker["text_eos_token_id"], START),
        (talker["audio_bos_token_id"], MARK),
    )
    for token, channel in flags:
        text[token] = 0.0
        text[token, channel] = 1.0
    code = unit_vectors("tts.emb_code", codes, width, seed)
    for name, table in (("tts.emb_text.weight", text), ("tts.emb_code.0.weight", code)):
        table[:, CONST] = CONST_SIZE
        tensors[name][:] = table
    for kind in ("weight", "bias"):
        tensors[f"tts.projector_semantic.linear2.{kind}"][:FREE] = 0.0

    head = "tts.head_code.0.parametrizations.weight."
    direction = unit_vectors("tts.head_code", codes, width, seed)
    direction[-1] = 0.0
    for channel, value in END_DIRECTION.items():
        direction[-1, channel] = value
    tensors[head + "original1"][:] = direction
    tensors[head + "original0"][:] = CODE_GAIN
    tensors[head + "original0"][-1] = END_GAIN * np.linalg.norm(direction[-1])

    heads = FlagHeads(
        head_dim=width // talker["num_attention_heads"],
        far=2.7,
        # A condition row also carries the unit vector of the projected hidden state; the audio
        # BOS row does not.
        start_size=normed(CONST_SIZE, 1.0, 1.0, width=width),
        mark_size=normed(CONST_SIZE, 1.0, width=width),
    )
    gate = Swing(pair=END_PAIR, angle=math.pi, near=2.4, output=gate_output(width))
    heads.write(tensors, "tts.model.layers.0.", [gate])
