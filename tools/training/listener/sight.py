"""Trains the LLM to answer questions about pictures, after the training of the listener.

The audio encoder and the vision tower keep their weights. Every batch has sessions and chats with
pictures and without, and all other questions too, so that the model hears as well as before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from training.answers import Spoken
from training.corpus.store import Corpus
from training.dimensions import WINDOW_UNITS
from training.domain import draw_trained_exchange
from training.listener.network import ListenerNetworks, run_decoder, trainable
from training.listener.noises import NoiseBank
from training.listener.sequences import (
    IGNORED,
    UNIT_EMBEDDINGS,
    Batch,
    TokenRow,
    chat_sequence,
    session_sequence,
)
from training.listener.sessions import SessionBuilder
from training.listener.training import USUAL, VOICE_SHARE
from training.optimisers import Optimisers
from training.torch_calls import load_tensors, mixed_precision
from training.vision.questions import QUESTIONS, answer_about
from training.vision.views import PictureBank
from training.vocabulary import Vocabulary

REPORT_INTERVAL, SAVE_INTERVAL = 10, 50
PICTURED_SHARE = 0.6
CHAT_SIGHT_SHARE = 0.5


@dataclass(frozen=True)
class SightPlan:
    """The length and the learning rates of this stage. Every step has `batch` sessions and `chats`
    chats.
    """

    seed: int = 1
    steps: int = 600
    batch: int = 8
    chats: int = 12
    rate: float = 8e-4
    matrix_rate: float = 1.2e-3
    warm_up: int = 30
    decay_share: float = 0.8
    noise_clips: int = 48
    is_mixed: bool = True

    def factor(self, step: int) -> float:
        """Return the factor of the learning rates at a step."""
        remaining = (self.steps - step) / max(1.0, self.decay_share * self.steps)
        return min(1.0, (step + 1) / self.warm_up, remaining)


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
        for prefix, module in self.networks.modules.items():
            named = {
                name.removeprefix(prefix): value.float()
                for name, value in start.items()
                if name.startswith(prefix)
            }
            module.load_state_dict(named)
        rules = replace(USUAL, longest_pause_s=2.0, pictured=PICTURED_SHARE)
        noises = NoiseBank(plan.seed, plan.noise_clips, corpus.noises)
        self._builder = SessionBuilder(corpus, answers, noises, rules, bank.scenes)
        llm = self.networks.llm
        tables = (llm.model.embed_tokens.weight, llm.lm_head.weight)
        kept = {id(table) for table in tables}
        found = trainable(llm)
        matrices = [t for t in found if t.dim() == 2 and id(t) not in kept]
        chosen = {id(t) for t in matrices}
        self._optimisers = Optimisers(
            matrices,
            [t for t in found if id(t) not in chosen],
            rate=plan.rate,
            matrix_rate=plan.matrix_rate,
        )

    def run(self, stop_at: int | None = None) -> None:
        """Train to the end, or to step `stop_at`; report on stderr and save at intervals."""
        self.resume()
        plan, means = self.plan, dict[str, float]()
        began = time.process_time()
        last = plan.steps if stop_at is None else stop_at
        while self.step < last:
            chance = Random(f"{plan.seed} sight {self.step}")
            losses = {"sessions": self._session_loss(chance), "chats": self._chat_loss(chance)}
            self._optimisers.step(torch.stack([*losses.values()]).sum(), plan.factor(self.step))
            self.step += 1
            for name, value in losses.items():
                means[name] = 0.9 * means.get(name, value.item()) + 0.1 * value.item()
            if self.step % REPORT_INTERVAL == 0:
                shown = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
                spent = time.process_time() - began
                sys.stderr.write(f"sight {self.step}/{plan.steps}  {spent:.0f} s  {shown}\n")
            if self.step % SAVE_INTERVAL == 0 or self.step == last:
                self.save()

    def _session_loss(self, chance: Random) -> Tensor:
        plan = self.plan
        sessions = [self._builder.draw((plan.seed, 3, self.step, n)) for n in range(plan.batch)]
        features, is_first = self.networks.features([one.samples for one in sessions])
        with torch.no_grad(), mixed_precision(is_allowed=plan.is_mixed):
            _, embeds = self.networks.encode(features, is_first, WINDOW_UNITS)
        voices = [self._voice(chance) for _ in sessions]
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

    @torch.no_grad()
    def _voice(self, chance: Random) -> Tensor:
        """Encode a random voice for the prompt, as the worker does; no rows for most sessions."""
        if chance.random() >= VOICE_SHARE:
            return torch.zeros((0, self._bank.embeds.shape[-1]))
        clips = [
            self._corpus[chance.randrange(len(self._corpus))].samples
            for _ in range(chance.randint(1, 3))
        ]
        return self.networks.audio.encode_clip(np.concatenate(clips)).clone()

    def _chat_loss(self, chance: Random) -> Tensor:
        rows: list[TokenRow] = []
        while len(rows) < self.plan.chats:
            count = chance.choice((1, 1, 2))
            exchanges = [
                draw_trained_exchange(chance, sight_share=CHAT_SIGHT_SHARE) for _ in range(count)
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
        with mixed_precision(is_allowed=self.plan.is_mixed):
            hidden = run_decoder(self.networks.llm.model, table).float()
        is_target = batch.targets != IGNORED
        logits = self.networks.llm.logits(hidden[is_target])
        each = functional.cross_entropy(logits, batch.targets[is_target], reduction="none")
        weights = batch.weights[is_target]
        return (each * weights).sum() / weights.sum()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the checkpoint with their names."""
        for prefix, module in self.networks.modules.items():
            for name, value in module.state_dict().items():
                yield prefix + name, value

    def save(self) -> None:
        """Write the state of the run."""
        part = self._path.with_suffix(".part")
        state = {"step": self.step, "llm": self.networks.llm.state_dict()}
        torch.save({**state, "optimisers": self._optimisers.state_dict()}, part)
        part.replace(self._path)

    def resume(self) -> None:
        """Continue from the saved state, if there is one."""
        if not self._path.exists():
            return
        state = load_tensors(self._path)
        self.step = state["step"]
        self.networks.llm.load_state_dict(state["llm"])
        self._optimisers.load_state_dict(state["optimisers"])
