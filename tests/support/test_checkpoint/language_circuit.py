"""Makes the random language model take turns and speak in words.

A clock decides when the model speaks. The clock is the attention head that writes the gate (see
`circuits`). Its output oscillates with the distance to the first token, so that about four units of
listening and three units of speech alternate, whatever the input is. Each word is a random
successor of the last word in the spoken sentences. The answer in a chat is one sentence: after its
last word the model ends the unit, and then the answer. In full duplex the turn continues, because
there the model decodes nothing after the end of a unit.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
from support.test_checkpoint.circuits import (
    CONST,
    CONST_SIZE,
    FREE,
    GATE,
    GATE_SIZE,
    MARK,
    START,
    WORD,
    WORD_SIZE,
    FlagHeads,
    Swing,
    gate_output,
    normed,
    orthogonal_vectors,
    quieten,
    unit_vectors,
)
from support.test_checkpoint.weights import Array, Tensors
from tokenizers import Tokenizer

from duplane.tools.checkpoint.tokenizer_files import spoken_ids, token_id
from duplane.tools.checkpoint.weights import random_numbers

LAYER_NOISE = 0.05
"""Factor of the output of the random layers: large enough to vary the words."""
AUDIO_NOISE = 0.015
"""Factor of the audio projector's output: it varies the words, but does not change the turns."""
CLOCK_PAIR = 4
"""Rotary pair of the clock. With theta 1e5 and 32 channels per head, the period of this pair is 112
rows; the model listens during half of them."""
WANDER_PAIRS = (1, 2, 3)
"""Rotary pairs of faster waves, with periods of 13, 26 and 54 rows. These waves vary the words."""
WANDER = 0.2
PROMPT = "<|im_start|>system\nStreaming Omni Conversation.\n<|audio_start|><|audio_end|><|im_end|>"
FIRST_CHOICE = 3 * 13 + 10
"""Rows from the prompt to the first free decision: three forced units, and the input of the
fourth."""

SAY = 2.0
"""Flag of the row before a chat's answer. It is larger than other flags, so that the model speaks
at any value of the clock."""

# The logit of a token that may follow a row. The logits of other tokens are noise of about 1.
LIKELY = 18.0
PAUSE = 12.5
"""Logit of the end of a unit, after any word."""
SWING = 8.0
"""The clock adds up to this value to the logit of listening and subtracts it from the logit of
speaking, or the reverse."""
END = 40.0
END_SWING = 25.0
"""The logit of the end of a turn, after any word, is END in the half period of listening, and far
lower in the half period of speaking."""


def steer_language(
    tensors: Tensors, config: dict[str, Any], tokenizer: Tokenizer, seed: int
) -> None:
    """Overwrite embeddings, output rows, the clock head and the audio projector's output."""
    quieten(tensors, "llm.", LAYER_NOISE)
    rows = _RowVectors(config, tokenizer, seed)
    tensors["llm.model.embed_tokens.weight"][:] = rows.embeddings()
    tensors["llm.lm_head.weight"][:] = rows.outputs(tensors["llm.lm_head.weight"])

    projector = "audio_projection_layer.linear2."
    tensors[projector + "weight"][:FREE] = 0.0
    tensors[projector + "weight"][FREE:] = (
        tensors[projector + "weight"][FREE:] * math.sqrt(config["hidden_size"]) * AUDIO_NOISE
    )
    tensors[projector + "bias"][:] = rows.audio
    tensors[projector + "bias"][CONST] = CONST_SIZE
    _write_clock(tensors, config, tokenizer, seed)


def _write_clock(tensors: Tensors, config: dict[str, Any], tokenizer: Tokenizer, seed: int) -> None:
    head_dim, width = config["head_dim"], config["hidden_size"]
    frequency = config["rope_theta"] ** (-2 * CLOCK_PAIR / head_dim)
    first = len(tokenizer.encode(PROMPT, add_special_tokens=False).ids) + FIRST_CHOICE
    # The cosine becomes negative just before the first free decision, so speech may begin there.
    angle = math.pi / 2 + 0.15 - frequency * first
    clock = Swing(pair=CLOCK_PAIR, angle=angle, near=1.0, output=gate_output(width))
    wandering = [
        Swing(pair, float(phase), 1.0, vector * np.float32(WANDER))
        for pair, phase, vector in zip(
            WANDER_PAIRS,
            random_numbers("wander", seed).uniform(0, 2 * math.pi, len(WANDER_PAIRS)),
            unit_vectors("wander", len(WANDER_PAIRS), width, seed),
            strict=True,
        )
    ]
    layer, flag = "llm.model.layers.0.", normed(CONST_SIZE, 1.0, width=width)
    heads = FlagHeads(head_dim, far=1.0, start_size=flag, mark_size=flag)
    heads.write(tensors, layer, [clock, *wandering])
    # Each head normalises its queries and keys, so the weights of the norms set their sizes.
    half, slow = head_dim // 2, head_dim // 2 - 1
    query_norm, key_norm = (tensors[f"{layer}self_attn.{kind}_norm.weight"] for kind in ("q", "k"))
    query_norm[:], key_norm[:] = 1.0, 1.0
    for pair, sharpness in ((CLOCK_PAIR, 4.0), *((pair, 1.5) for pair in WANDER_PAIRS)):
        query_norm[[pair, pair + half]] = sharpness
    query_norm[slow] = 6.0


class _RowVectors:
    """The vector of each kind of row, and the vectors of the rows that may follow it."""

    def __init__(self, config: dict[str, Any], tokenizer: Tokenizer, seed: int) -> None:
        self.sentences = spoken_ids(tokenizer)
        self.words = sorted({token for sentence in self.sentences for token in sentence})
        self.rows, self.width = config["vocab_size"], config["hidden_size"]
        self.id_of = {
            name: token_id(tokenizer, name)
            for name in (
                *("<|im_start|>", "<|audio_start|>", "</think>", "<|listen|>", "<|speak|>"),
                *("<|tts_bos|>", "<|turn_eos|>", "<|chunk_eos|>", "<|im_end|>"),
            )
        }
        # In a chat without speech, this is the last row before an answer.
        line = tokenizer.encode("\n\n", add_special_tokens=False).ids[-1]
        openers = [self.id_of["<|speak|>"], self.id_of["<|tts_bos|>"], line]
        own = [*openers, self.id_of["<|turn_eos|>"], self.id_of["<|chunk_eos|>"], *self.words]
        basis = orthogonal_vectors("rows", self.width, seed)
        if len(own) >= len(basis):
            raise ValueError(
                f"{len(self.words)} spoken tokens are too many for {self.width} channels"
            )
        self.audio = basis[0]
        self.vectors = unit_vectors("llm.rows", self.rows, self.width, seed)
        self.vectors[own] = basis[1 : len(own) + 1]
        self.openers = openers

    def embeddings(self) -> Array:
        """Return one row per token, with the constant and a unit vector or a flag."""
        table = self.vectors.copy()
        for name, channel, size in (
            ("<|im_start|>", START, 1.0),
            ("<|audio_start|>", MARK, 1.0),
            ("</think>", MARK, SAY),
        ):
            table[self.id_of[name]] = 0.0
            table[self.id_of[name], channel] = size
        table[:, CONST] = CONST_SIZE
        table[self.words, WORD] = WORD_SIZE
        return table

    def outputs(self, noise: Array) -> Array:
        """Return the output head: a token's logit is its row times the normed hidden state."""
        table = noise * np.float32(0.3)
        table[:, :FREE] = 0.0
        scale = normed(CONST_SIZE, GATE_SIZE, WORD_SIZE, 1.0, 2 * WANDER, width=self.width)
        for previous, following in self._pairs():
            table[following] += self.vectors[previous] * (LIKELY / scale)
        listen, speak = self.id_of["<|listen|>"], self.id_of["<|speak|>"]
        end, pause = self.id_of["<|turn_eos|>"], self.id_of["<|chunk_eos|>"]
        gate, word, constant = scale * GATE_SIZE, scale * WORD_SIZE, scale * CONST_SIZE
        for token, sign in ((listen, 1.0), (speak, -1.0)):
            table[token] += self.audio * (LIKELY / scale)
            table[token, GATE] = sign * SWING / gate
        table[pause, WORD] = PAUSE / word
        table[end, WORD] = END / word
        table[end, GATE], table[end, CONST] = END_SWING / gate, -END_SWING / constant
        table[pause] += self.vectors[end] * (LIKELY / scale)
        return table

    def _pairs(self) -> set[tuple[int, int]]:
        pairs = {pair for sentence in self.sentences for pair in pairwise(sentence)}
        starts = {(opener, line[0]) for opener in self.openers for line in self.sentences}
        ends = {(line[-1], self.id_of["<|chunk_eos|>"]) for line in self.sentences}
        finish = (self.id_of["<|chunk_eos|>"], self.id_of["<|im_end|>"])
        return pairs | starts | ends | {finish}
