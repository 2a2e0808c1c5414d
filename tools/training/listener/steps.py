"""What the stages of the listener share in a step: the voice of a prompt, the LLM, and its loss."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from duplane.worker.models.minicpm_o.llm.language_model import LanguageModel
from training.corpus.store import Corpus
from training.listener.network import ListenerNetworks, run_decoder
from training.listener.sequences import IGNORED, Batch
from training.torch_calls import mixed_precision

VOICE_SHARE = 0.2


@torch.no_grad()
def draw_voice(networks: ListenerNetworks, corpus: Corpus, chance: Random) -> Tensor:
    """Encode a random voice for the prompt, as the worker does; no rows for most sessions."""
    if chance.random() >= VOICE_SHARE:
        return torch.zeros((0, networks.llm.model.embed_tokens.weight.shape[1]))
    clips = [corpus[chance.randrange(len(corpus))].samples for _ in range(chance.randint(1, 3))]
    return networks.audio.encode_clip(np.concatenate(clips)).clone()


def decode(llm: LanguageModel, embeds: Tensor, *, is_mixed: bool) -> Tensor:
    """Run sequences of embeddings [sequences, length, width]; return normed states in float32."""
    with mixed_precision(is_allowed=is_mixed):
        return run_decoder(llm.model, embeds).float()


def text_loss(llm: LanguageModel, hidden: Tensor, batch: Batch) -> Tensor:
    """Return the weighted mean loss of the ids that the model chooses."""
    is_target = batch.targets != IGNORED
    logits = llm.logits(hidden[is_target])
    each = functional.cross_entropy(logits, batch.targets[is_target], reduction="none")
    weights = batch.weights[is_target]
    return (each * weights).sum() / weights.sum()
