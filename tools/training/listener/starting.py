"""Starts from a checkpoint with another tokenizer, or with fewer layers in its audio encoder."""

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
LISTENER = ("llm.", "apm.", "audio_projection_layer.")
TALKER, VISION = ("tts.",), ("vpm.", "resampler.")
ADDED = "apm.layers."
OUTPUTS = tuple(f"{layer}.{kind}" for layer in ("out_proj", "fc2") for kind in ("weight", "bias"))
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


def vocoder_of(directory: Path) -> HarmonicNetwork:
    """Load the vocoder of a checkpoint, with its codec's table. Raises OSError."""
    folder = directory / VOCODER_FOLDER
    network = HarmonicNetwork(HarmonicConfig.load(folder))
    network.load_state_dict(load_weights(folder / WEIGHTS))
    return network
