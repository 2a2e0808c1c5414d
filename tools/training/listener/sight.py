"""Trains the LLM to answer questions about pictures, after the training of the listener.

The audio encoder and the vision tower keep their weights. Every batch has sessions and chats with
pictures and without, and all other questions too, so that the model hears as well as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from training.answers import Spoken
from training.corpus.store import Corpus
from training.dimensions import WINDOW_UNITS
from training.domain import draw_trained_exchange
from training.listener.network import ListenerNetworks, trainable
from training.listener.noises import NoiseBank
from training.listener.sequences import (
    UNIT_EMBEDDINGS,
    Batch,
    TokenRow,
    chat_sequence,
    session_sequence,
)
from training.listener.sessions import SessionBuilder
from training.listener.steps import decode, draw_voice, text_loss
from training.listener.training import USUAL
from training.optimisers import Optimisers, rate_factor
from training.progress import Progress
from training.torch_calls import load_tensors, mixed_precision, save_tensors
from training.vision.questions import QUESTIONS, answer_about
from training.vision.views import PictureBank
from training.vocabulary import Vocabulary

SAVE_INTERVAL = 50
PICTURED_SHARE = 0.7
"""Share of sessions, and of messages of chats, that have a picture."""
SIGHT_SHARE = 0.6
"""Share of questions that are about a picture."""


@dataclass(frozen=True)
class SightPlan:
    """The length and the learning rates of this stage.

    Every step has `batch` sessions and `chats` chats. A chat is cheap, because it has no sound: so
    the model learns from chats first what the embeddings of a picture mean.
    """

    seed: int = 1
    steps: int = 1500
    batch: int = 4
    chats: int = 40
    rate: float = 1.2e-3
    matrix_rate: float = 2e-3
    warm_up: int = 30
    decay_share: float = 0.6
    noise_clips: int = 48
    is_mixed: bool = True


class SightTraining:
    """One training run. It saves its state to `path`, and continues from this file if it exists.

    `start` has the listener's tensors with their names in the checkpoint.
    """

    def __init__(
        self,
        config: dict[str, Any],
        vocabulary: Vocabulary,
        corpus: Corpus,
        answers: Mapping[str, Spoken],
        bank: PictureBank,
        start: Mapping[str, Tensor],
        plan: SightPlan,
        path: Path,
    ) -> None:
        self.plan, self._path, self.step = plan, path, 0
        self._vocabulary, self._bank, self._corpus = vocabulary, bank, corpus
        self.networks = ListenerNetworks.build(config, plan.seed, batch=plan.batch)
        self.networks.load(start)
        rules = replace(
            USUAL, longest_pause_s=2.0, pictured=PICTURED_SHARE, about_pictures=SIGHT_SHARE
        )
        noises = NoiseBank(plan.seed, plan.noise_clips, corpus.noises)
        self._builder = SessionBuilder(corpus, answers, noises, rules, bank.scenes)
        llm = self.networks.llm
        self._optimisers = Optimisers(
            trainable(llm),
            tables=[llm.model.embed_tokens.weight, llm.lm_head.weight],
            rate=plan.rate,
            matrix_rate=plan.matrix_rate,
        )

    def run(self, stop_at: int | None = None) -> None:
        """Train to the end, or to step `stop_at`; report on stderr and save at intervals."""
        self.resume()
        plan = self.plan
        progress = Progress("sight", plan.steps)
        last = plan.steps if stop_at is None else stop_at
        while self.step < last:
            chance = Random(f"{plan.seed} sight {self.step}")
            losses = {"sessions": self._session_loss(chance), "chats": self._chat_loss(chance)}
            factor = rate_factor(
                self.step, plan.steps, warm_up=plan.warm_up, decay_share=plan.decay_share
            )
            self._optimisers.step(torch.stack([*losses.values()]).sum(), factor)
            self.step += 1
            progress.note(self.step, losses)
            if self.step % SAVE_INTERVAL == 0 or self.step == last:
                self.save()

    def _session_loss(self, chance: Random) -> Tensor:
        plan = self.plan
        sessions = [self._builder.draw((plan.seed, 3, self.step, n)) for n in range(plan.batch)]
        features, is_first = self.networks.features([one.samples for one in sessions])
        with torch.no_grad(), mixed_precision(is_allowed=plan.is_mixed):
            _, embeds = self.networks.encode(features, is_first, WINDOW_UNITS)
        voices = [draw_voice(self.networks, self._corpus, chance) for _ in sessions]
        rows = [
            session_sequence(one, self._vocabulary, chance, voice_rows=len(voice))
            for one, voice in zip(sessions, voices, strict=True)
        ]
        batch = Batch.of(rows)
        heard = [
            own[UNIT_EMBEDDINGS * row.first_unit :].float()
            for own, row in zip(embeds, rows, strict=True)
        ]
        table = self._table(batch, rows, chance)
        table = table.masked_scatter(batch.audio[..., None], torch.cat(heard))
        table = table.masked_scatter(batch.voice[..., None], torch.cat(voices))
        return self._loss(table, batch)

    def _chat_loss(self, chance: Random) -> Tensor:
        rows: list[TokenRow] = []
        while len(rows) < self.plan.chats:
            count = chance.choice((1, 1, 2))
            exchanges = [
                draw_trained_exchange(chance, sight_share=SIGHT_SHARE) for _ in range(count)
            ]
            pictures = [self._chat_picture(chance) for _ in exchanges]
            seen = -1
            for number, picture in enumerate(pictures):
                seen = picture if picture >= 0 else seen
                kind = exchanges[number].kind
                if kind in QUESTIONS and seen >= 0:
                    answer = answer_about(kind, self._bank.scenes[seen])
                    exchanges[number] = replace(exchanges[number], answer=answer)
            if all(exchange.answer for exchange in exchanges):
                rows.append(chat_sequence(exchanges, self._vocabulary, chance, pictures))
        batch = Batch.of(rows)
        return self._loss(self._table(batch, rows, chance), batch)

    def _chat_picture(self, chance: Random) -> int:
        return chance.randrange(len(self._bank)) if chance.random() < PICTURED_SHARE else -1

    def _table(self, batch: Batch, rows: list[TokenRow], chance: Random) -> Tensor:
        """Return the embeddings of ids, with those of pictures in their rows."""
        table = self.networks.llm.model.embed_tokens(batch.ids)
        embeds = self._bank.embeds
        shown = [
            embeds[picture, chance.randrange(embeds.shape[1])]
            for row in rows
            for picture in row.pictures
        ]
        if not shown:
            return table
        return table.masked_scatter(batch.picture[..., None], torch.cat(shown))

    def _loss(self, table: Tensor, batch: Batch) -> Tensor:
        llm = self.networks.llm
        return text_loss(llm, decode(llm, table, is_mixed=self.plan.is_mixed), batch)

    def save(self) -> None:
        """Write the state of the run."""
        state = {
            "step": self.step,
            "llm": self.networks.llm.state_dict(),
            "optimisers": self._optimisers.state_dict(),
        }
        save_tensors(state, self._path)

    def resume(self) -> None:
        """Continue from the saved state, if there is one."""
        if not self._path.exists():
            return
        state = load_tensors(self._path)
        self.step = state["step"]
        self.networks.llm.load_state_dict(state["llm"])
        self._optimisers.load_state_dict(state["optimisers"])
