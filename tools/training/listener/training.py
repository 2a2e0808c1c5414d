"""Trains the listener, first on the sounds of speech, then on whole sessions and chats.

Each step draws its sessions from the seed and the number of the step. So a run that is resumed
trains on the same sessions as a run without a stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from training.answers import Spoken
from training.corpus.store import Corpus
from training.dimensions import WINDOW_UNITS
from training.listener.network import ListenerNetworks, trainable
from training.listener.noises import NoiseBank
from training.listener.seeing import SeenLayer
from training.listener.sequences import (
    UNIT_EMBEDDINGS,
    Batch,
    session_sequence,
)
from training.listener.sessions import Session, SessionBuilder, SessionRules
from training.listener.steps import decode, draw_chat, draw_voice, embed, text_loss
from training.optimisers import Optimisers, rate_factor
from training.progress import Progress
from training.torch_calls import (
    load_tensors,
    mixed_precision,
    save_tensors,
    seed_all,
    tensor_of,
)
from training.vision.views import PictureBank
from training.vocabulary import Vocabulary

PHONEME_WEIGHT = 0.3
WORD_WEIGHT = 0.4
SEEN_WEIGHT = 0.2
SAVE_INTERVAL = 50
MASKED_SHARE, WIDEST_MASK = 0.5, 14
"""Share of sessions that lack two bands of the mel features, and the most features of a band."""
MEAN_SHARE = 0.99
"""The share that the mean of the weights keeps of its value at a step."""
USUAL = SessionRules(
    noise_only=0.25,
    interrupted=0.55,
    signal_to_noise=(1.0, 30.0),
    breath=0.09,
    told_to_stop=0.3,
    long_answers=0.2,
    muted=0.3,
    broken=0.5,
    lone_noise=(-8.0, 30.0),
    pictured=0.5,
    about_pictures=0.12,
)
"""What happens in the sessions of training."""
SEEING = replace(USUAL, signal_to_noise=(3.0, 22.0), pictured=0.75, about_pictures=0.4, rested=0.4)
"""What happens in sessions of 16 units: more than a third of the questions are about a picture, and
after some answers there is no question for some seconds."""


@dataclass(frozen=True)
class ListenerPlan:
    """The length and the learning rates of the listener's training.

    A run that begins with the weights of a checkpoint trains only its new output layers for
    `head_steps` steps. The first stage has `sound_steps` steps and trains only the encoder, on
    `sound_batch` windows. The second stage has `steps` steps of three kinds. The share
    `word_share` of the steps comes first and has questions without answers. The share
    `short_share` follows and has sessions of 8 units. All later steps have sessions of 16 units.
    In each stage the rate rises during `warm_up` steps and is then constant. During the last
    `decay_share` of the second stage the rate falls to zero. Every step of the second stage also
    trains on `chats` typed chats.

    If `is_mixed`, the networks and Muon compute in bfloat16 where the CPU can. Then a run that is
    resumed gives only nearly the same weights.
    """

    seed: int = 1
    head_steps: int = 0
    sound_steps: int = 300
    sound_batch: int = 32
    steps: int = 1300
    word_share: float = 5 / 12
    short_share: float = 5 / 36
    short_batch: int = 16
    batch: int = 10
    rate: float = 1.5e-3
    matrix_rate: float = 2.5e-3
    warm_up: int = 40
    decay_share: float = 0.45
    chats: int = 40
    noise_clips: int = 48
    is_mixed: bool = True

    @property
    def word_steps(self) -> int:
        """The number of steps with questions without answers."""
        return round(self.word_share * self.steps)

    @property
    def short_steps(self) -> int:
        """The number of steps with sessions of 8 units."""
        return round(self.short_share * self.steps)


def mask_bands(features: Tensor, chance: np.random.Generator) -> None:
    """Give bands of some sessions [sessions, units, frames, mel] their mean, as in SpecAugment.

    So no band alone tells a word. Source: https://arxiv.org/abs/1904.08779.
    """
    bands = features.shape[-1]
    for session in features:
        if chance.random() >= MASKED_SHARE:
            continue
        for _ in range(2):
            width = int(chance.integers(1, WIDEST_MASK + 1))
            first = int(chance.integers(bands - width + 1))
            part = session[..., first : first + width]
            part.copy_(part.mean().expand_as(part))


class ListenerTraining:
    """One training run. It saves its state to `path`, and continues from this file if it exists."""

    def __init__(
        self,
        config: dict[str, Any],
        vocabulary: Vocabulary,
        corpus: Corpus,
        answers: Mapping[str, Spoken],
        plan: ListenerPlan,
        bank: PictureBank,
        path: Path,
        *,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """`share` is the number of this process, and the number of all processes of the run."""
        self._rank, self._ranks = share
        self.plan = plan
        self.vocabulary = vocabulary
        self._path, self._bank = path, bank
        batch = max(plan.sound_batch, plan.short_batch, plan.batch)
        self.networks = ListenerNetworks.build(config, plan.seed, batch=batch)
        seed_all(plan.seed)
        self._heads = nn.ModuleDict(
            {
                "phonemes": nn.Linear(config["audio_config"]["d_model"], len(corpus.phoneme_names)),
                "words": nn.Linear(config["hidden_size"], len(corpus.word_names)),
                "begins": nn.Linear(config["hidden_size"], 2),
            }
        )
        self._seen = SeenLayer(self.networks.llm.model, config["hidden_size"], bank.scenes)
        self._heads["seen"] = self._seen
        self._corpus = corpus
        noises = NoiseBank(plan.seed, plan.noise_clips, corpus.noises)

        def builder(units: int, rules: SessionRules) -> SessionBuilder:
            scenes = () if rules.is_dense else bank.scenes
            return SessionBuilder(corpus, answers, noises, replace(rules, unit_count=units), scenes)

        dense = replace(USUAL, noise_only=0.02, is_dense=True)
        self._dense, self._words = builder(WINDOW_UNITS, dense), builder(8, dense)
        self._short = builder(8, replace(USUAL, longest_pause_s=1.2))
        self._long = builder(16, replace(SEEING, longest_pause_s=2.0))
        audio, llm = self.networks.audio, self.networks.llm
        self._optimisers = Optimisers(
            [*trainable(audio), *trainable(llm)],
            tables=[
                llm.model.embed_tokens.weight,
                llm.lm_head.weight,
                audio.apm.embed_positions.weight,
            ],
            added=self._heads.parameters(),
            rate=plan.rate,
            matrix_rate=plan.matrix_rate,
            is_mixed=plan.is_mixed,
        )
        self.step = 0
        self._cpu_s = 0.0
        self.mean: dict[str, Tensor] = {}
        """The mean of the latest weights, with their names in the checkpoint."""

    @property
    def _modules(self) -> dict[str, nn.Module]:
        return {**self.networks.modules, "heads.": self._heads}

    def run(self, stop_at: int | None = None) -> None:
        """Train to the end, or to step `stop_at`; report on stderr and save at intervals."""
        self.resume()
        plan = self.plan
        total = plan.head_steps + plan.sound_steps + plan.steps
        last = total if stop_at is None else stop_at
        progress = Progress("listener", total, spent_s=self._cpu_s)
        while self.step < last:
            step = self.step - plan.head_steps
            if step < 0:
                losses = self._session_step(step, is_for_heads=True)
                factor = min(1.0, (self.step + 1) / plan.warm_up)
            elif step < plan.sound_steps:
                losses = self._sound_step()
                factor = self._factor(step, 4 * plan.sound_steps)
            else:
                step -= plan.sound_steps
                losses = self._session_step(step)
                factor = self._factor(step, plan.steps)
            self._optimisers.step(torch.stack(list(losses.values())).sum(), factor)
            self.step += 1
            self._update_mean()
            if self._rank:
                continue
            progress.note(self.step, losses)
            if self.step % SAVE_INTERVAL == 0 or self.step == last:
                self._cpu_s = progress.spent_s
                self.save()

    @torch.no_grad()
    def _update_mean(self) -> None:
        for name, value in self.networks.tensors():
            if name in self.mean:
                self.mean[name].lerp_(value, 1 - MEAN_SHARE)
            else:
                self.mean[name] = value.clone()

    def _factor(self, step: int, total: int) -> float:
        plan = self.plan
        return rate_factor(step, total, warm_up=plan.warm_up, decay_share=plan.decay_share)

    def _share(self, count: int) -> range:
        """Return which sessions of a batch this process draws."""
        return range(self._rank, count, self._ranks)

    def _sound_step(self) -> dict[str, Tensor]:
        sessions = [
            self._dense.draw((self.plan.seed, 1, self.step, n))
            for n in self._share(self.plan.sound_batch)
        ]
        features, is_first = self._features(sessions)
        states, _ = self._encode(features, is_first)
        return {"phonemes": self._phoneme_loss(states, sessions)}

    def _session_step(self, step: int, *, is_for_heads: bool = False) -> dict[str, Tensor]:
        """Compute the losses of a batch of sessions, or only those of the output layers."""
        plan = self.plan
        builder = self._long
        count = plan.batch
        if step < plan.word_steps + plan.short_steps:
            builder = self._words if step < plan.word_steps else self._short
            count = plan.short_batch
        stage = 3 if is_for_heads else 2
        sessions = [builder.draw((plan.seed, stage, abs(step), n)) for n in self._share(count)]
        chance = Random(f"{plan.seed} {step} {self._rank}")
        features, is_first = self._features(sessions)
        with torch.set_grad_enabled(not is_for_heads):
            states, embeds = self._encode(features, is_first)
        voices = [draw_voice(self.networks, self._corpus, chance) for _ in sessions]
        rows = [
            session_sequence(one, self.vocabulary, chance, voice_rows=len(voice))
            for one, voice in zip(sessions, voices, strict=True)
        ]
        batch = Batch.of(rows)
        table = embed(self.networks.llm, batch, rows, self._bank, chance)
        encoded = [
            own[UNIT_EMBEDDINGS * row.first_unit :] for own, row in zip(embeds, rows, strict=True)
        ]
        table = table.masked_scatter(batch.audio[..., None], torch.cat(encoded))
        table = table.masked_scatter(batch.voice[..., None], torch.cat(voices))
        with torch.set_grad_enabled(not is_for_heads):
            hidden = decode(self.networks.llm, table, is_mixed=plan.is_mixed)
        seen = SEEN_WEIGHT * self._seen.loss(batch, rows)
        heard = hidden[batch.audio]

        def word_loss(head: str, labels: Sequence[NDArray[np.int64]]) -> Tensor:
            targets = np.concatenate(
                [
                    own[UNIT_EMBEDDINGS * row.first_unit :]
                    for own, row in zip(labels, rows, strict=True)
                ]
            )
            logits = self._heads[head](heard)
            return WORD_WEIGHT * functional.cross_entropy(logits, tensor_of(targets))

        losses = {
            "phonemes": PHONEME_WEIGHT * self._phoneme_loss(states, sessions),
            "words": word_loss("words", [one.words for one in sessions]),
            "begins": word_loss("begins", [one.begins for one in sessions]),
            "seen": seen,
        }
        if is_for_heads:
            # These sessions have no pictures.
            losses["seen in chats"] = self._chat_losses(chance, is_for_heads=True)[1]
            return losses
        if not builder.rules.is_dense:
            losses["text"] = text_loss(self.networks.llm, hidden, batch)
        losses["chats"], losses["seen in chats"] = self._chat_losses(chance)
        return losses

    def _features(self, sessions: list[Session]) -> tuple[Tensor, Tensor]:
        features, is_first = self.networks.features([one.samples for one in sessions])
        mask_bands(features, np.random.default_rng([self.plan.seed, self.step, self._rank]))
        return features, is_first

    def _encode(self, features: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]:
        with mixed_precision(is_allowed=self.plan.is_mixed):
            states, embeds = self.networks.encode(features, is_first, WINDOW_UNITS)
        return states.float(), embeds.float()

    def _phoneme_loss(self, states: Tensor, sessions: list[Session]) -> Tensor:
        targets = torch.tensor(np.concatenate([one.phonemes for one in sessions]))
        return functional.cross_entropy(self._heads["phonemes"](states).flatten(0, 1), targets)

    def _chat_losses(self, chance: Random, *, is_for_heads: bool = False) -> tuple[Tensor, Tensor]:
        """Return the losses of answers, and of what is seen."""
        rows = [
            draw_chat(chance, self.vocabulary, self._bank) for _ in self._share(self.plan.chats)
        ]
        batch, llm = Batch.of(rows), self.networks.llm
        table = embed(llm, batch, rows, self._bank, chance)
        with torch.set_grad_enabled(not is_for_heads):
            hidden = decode(llm, table, is_mixed=self.plan.is_mixed)
        return text_loss(llm, hidden, batch), SEEN_WEIGHT * self._seen.loss(batch, rows)

    def save(self) -> None:
        """Write the state of the run."""
        state = {
            "step": self.step,
            "cpu_s": self._cpu_s,
            "optimisers": self._optimisers.state_dict(),
            "mean": self.mean,
            "modules": {name: module.state_dict() for name, module in self._modules.items()},
        }
        save_tensors(state, self._path)

    def resume(self) -> None:
        """Continue from the saved state, if there is one."""
        if not self._path.exists():
            return
        state = load_tensors(self._path)
        self.step, self._cpu_s, self.mean = state["step"], state["cpu_s"], state["mean"]
        for name, module in self._modules.items():
            module.load_state_dict(state["modules"][name])
        self._optimisers.load_state_dict(state["optimisers"])
