"""The parts of a training step: the voice of a prompt, pictures, chats, the LLM, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from duplane.worker.models.minicpm_o.llm.language_model import LanguageModel
from training.corpus.store import Corpus
from training.domain import draw_trained_exchange
from training.listener.network import ListenerNetworks, run_decoder
from training.listener.sequences import IGNORED, Batch, TokenRow, chat_sequence
from training.torch_calls import mixed_precision
from training.vision.questions import QUESTIONS, answer_about
from training.vision.views import PictureBank
from training.vocabulary import Vocabulary

VOICE_SHARE = 0.2
PICTURED_SHARE, SIGHT_SHARE = 0.7, 0.6
"""Share of the messages of chats that have a picture, and of those that ask about one."""


@torch.no_grad()
def draw_voice(networks: ListenerNetworks, corpus: Corpus, chance: Random) -> Tensor:
    """Encode a random voice for the prompt, as the worker does; no rows for most sessions."""
    if chance.random() >= VOICE_SHARE:
        return torch.zeros((0, networks.llm.model.embed_tokens.weight.shape[1]))
    clips = [corpus[chance.randrange(len(corpus))].samples for _ in range(chance.randint(1, 3))]
    return networks.audio.encode_clip(np.concatenate(clips)).clone()


def draw_chat(chance: Random, vocabulary: Vocabulary, bank: PictureBank) -> TokenRow:
    """Draw a typed chat of one or two messages; some of them show a picture."""
    while True:
        exchanges = [
            draw_trained_exchange(chance, sight_share=SIGHT_SHARE)
            for _ in range(chance.choice((1, 1, 2)))
        ]
        pictures = [
            chance.randrange(len(bank)) if chance.random() < PICTURED_SHARE else -1
            for _ in exchanges
        ]
        seen = -1
        for number, picture in enumerate(pictures):
            seen = picture if picture >= 0 else seen
            kind = exchanges[number].kind
            if kind in QUESTIONS and seen >= 0:
                answer = answer_about(kind, bank.scenes[seen])
                exchanges[number] = replace(exchanges[number], answer=answer)
        if all(exchange.answer for exchange in exchanges):
            return chat_sequence(exchanges, vocabulary, chance, pictures)


def embed(
    llm: LanguageModel, batch: Batch, rows: Sequence[TokenRow], bank: PictureBank, chance: Random
) -> Tensor:
    """Return the embeddings of ids, with those of pictures in their rows."""
    table = llm.model.embed_tokens(batch.ids)
    shown = [
        bank.embeds[picture, chance.randrange(bank.embeds.shape[1])]
        for row in rows
        for picture in row.pictures
    ]
    if not shown:
        return table
    return table.masked_scatter(batch.picture[..., None], torch.cat(shown))


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
