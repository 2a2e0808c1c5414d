"""Starts from a checkpoint with another tokenizer, or with a smaller audio encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from duplane.worker.models.minicpm_o.checkpoint import SINGLE_FILE
from duplane.worker.models.minicpm_o.preparer_parts import VOCODER_FOLDER
from duplane.worker.models.minicpm_o.vocoder.harmonic import (
    WEIGHTS,
    HarmonicConfig,
    HarmonicNetwork,
)
from training.torch_calls import load_weights

TOKENIZER_FILE = "tokenizer.json"
ENCODER = ("apm.", "audio_projection_layer.")
LISTENER = ("llm.", *ENCODER)
TALKER, VISION = ("tts.",), ("vpm.", "resampler.")
ADDED = "apm.layers."
OUTPUTS = tuple(f"{layer}.{kind}" for layer in ("out_proj", "fc2") for kind in ("weight", "bias"))
POSITIONS = "embed_positions.weight"
SPREAD = 0.5
"""Size of the random numbers by which the weights of two equal channels differ, relative to that of
random weights."""
TABLES = ("llm.model.embed_tokens.weight", "llm.lm_head.weight", "tts.emb_text.weight")


def moved_table(table: Tensor, before: Tokenizer, after: Tokenizer) -> Tensor:
    """Return a table with a row for each id of `after`.

    A token that `before` has keeps its row. Any other token has the mean of the rows of its pieces.
    """
    names = before.get_vocab(with_added_tokens=True)
    made = torch.zeros(table.shape)
    for name, number in after.get_vocab(with_added_tokens=True).items():
        if name in names:
            made[number] = table[names[name]]
            continue
        pieces = before.encode(after.decode([number]), add_special_tokens=False).ids
        if pieces:
            made[number] = table[pieces].float().mean(0)
    return made


def tensors_of(
    directory: Path, prefixes: tuple[str, ...], tokenizer: Tokenizer
) -> dict[str, Tensor]:
    """Return tensors of a checkpoint with one file of weights: those with names that begin so.

    The rows of its tables have the order of `tokenizer`. Raises OSError.
    """
    before = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    found = {
        name: value.float()
        for name, value in load_weights(directory / SINGLE_FILE).items()
        if name.startswith(prefixes)
    }
    for name in found.keys() & {*TABLES}:
        found[name] = moved_table(found[name], before, tokenizer)
    return found


def with_new_layers(found: Mapping[str, Tensor], drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, with the layers of the audio encoder that it lacks.

    These come from `drawn`, except that their outputs are zero, so at first they change nothing.
    """
    made = dict(found)
    for name, value in drawn.items():
        if name.startswith(ADDED) and name not in found:
            made[name] = torch.zeros_like(value) if name.endswith(OUTPUTS) else value
    return made


def widened(found: Mapping[str, Tensor], drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, for an audio encoder that is twice as wide as its own.

    It has twice as many heads of the same size. Each channel becomes two. A layer that reads both
    has half of the weight for each, plus and minus a random number: so the encoder computes the
    same, and the two learn different things. `drawn` has the tensors of the new encoder, with
    random weights.
    """
    return {
        name: _widened(value, drawn[name], is_table=name.endswith(POSITIONS))
        if name.startswith(ENCODER) and name in drawn and drawn[name].shape != value.shape
        else value
        for name, value in found.items()
    }


def _widened(value: Tensor, drawn: Tensor, *, is_table: bool) -> Tensor:
    if drawn.shape[0] != value.shape[0]:
        value = torch.cat((value, value))
    if drawn.shape == value.shape:
        return value
    if is_table:
        return torch.cat((value, value), 1)
    other = drawn[:, : value.shape[1]] * SPREAD
    return torch.cat((value / 2 + other, value / 2 - other), 1)


def vocoder_of(directory: Path) -> HarmonicNetwork:
    """Load the vocoder of a checkpoint, with its codec's table. Raises OSError."""
    folder = directory / VOCODER_FOLDER
    network = HarmonicNetwork(HarmonicConfig.load(folder))
    network.load_state_dict(load_weights(folder / WEIGHTS))
    return network
