"""The conversations of each row of the table, drawn from voices and words outside the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from duplane.worker.models.types import FloatArray
from training.answers import Spoken
from training.corpus.store import Corpus
from training.domain import HELD_OUT_WORDS, Exchange, draw_exchange
from training.evaluation.inputs import USUAL_PROMPT, ChatInput, Role, SessionInput
from training.evaluation.scores import Expected
from training.listener.noises import NoiseBank
from training.listener.sequences import typed
from training.listener.sessions import Session, SessionBuilder, SessionRules

SEED = 90_000
LONG_UNITS = 48
NOISE_CLIPS = 24
PROMPTS = (
    "Be concise.",
    "You are a pirate captain; reply briefly, politely and truthfully.",
    "Customers phone our travel agency. Support them patiently, whatever their accents.",
    "Speak clearly: listeners include elderly visitors, tourists and nervous beginners.",
    "Respond like a librarian who loves poetry, botany and ancient legends. Avoid jargon, refuse "
    "dangerous requests, and encourage curiosity.",
    "Translate nothing. Explain your reasoning whenever possible.",
    "Imagine a spacecraft orbiting Saturn. Its crew relies upon calm advice during emergencies, "
    "experiments, repairs and celebrations; mission control cannot intervene.",
    "Sei freundlich und hilfsbereit.",
)
"""System prompts. Most of their words occur nowhere in the training."""


@dataclass(frozen=True)
class EvaluationPlan:
    """The size of the evaluation: its first row has `sessions` sessions, no row has more."""

    sessions: int = 48
    utterances: int = 600
    seed: int = SEED


@dataclass(frozen=True)
class SessionRow:
    """A row of the table: its name, its corpus, the rules of its sessions and their number.

    If `is_prompted`, each session has one of `PROMPTS`. If `is_voiced`, its prompt contains
    reference audio. Rows with the same `draw`, corpus and rules have the same sound and seeds.
    """

    draw: int
    name: str
    corpus: str
    rules: SessionRules
    sessions: int
    is_prompted: bool = False
    is_voiced: bool = False


def session_rows(plan: EvaluationPlan) -> list[SessionRow]:
    """Return the rows of duplex sessions."""
    usual = SessionRules(noise_only=0.0, longest_pause_s=2.0)
    half = max(1, plan.sessions // 2)
    return [
        SessionRow(0, "unheard voices", "espeak", usual, plan.sessions),
        SessionRow(0, "unknown system prompts", "espeak", usual, plan.sessions, is_prompted=True),
        SessionRow(0, "unknown reference audio", "espeak", usual, plan.sessions, is_voiced=True),
        SessionRow(
            1, "loud noise", "espeak", replace(usual, noisy=1.0, signal_to_noise=(1.0, 5.0)), half
        ),
        SessionRow(2, "unheard synthesiser voice", "flite", usual, half),
        SessionRow(
            3,
            f"sessions of {LONG_UNITS} units",
            "espeak",
            replace(usual, unit_count=LONG_UNITS),
            max(1, plan.sessions // 3),
        ),
        SessionRow(5, "noise alone", "espeak", replace(usual, noise_only=1.0, noisy=1.0), half),
    ]


@dataclass(frozen=True)
class SessionSource:
    """The sounds from which sessions are drawn."""

    corpora: Mapping[str, Corpus]
    answers: Mapping[str, Spoken]
    noises: NoiseBank

    def draw(self, row: SessionRow, seed: int) -> list[tuple[SessionInput, list[Expected]]]:
        """Draw the sessions of a row, and the expected answers of each session."""
        builder = SessionBuilder(self.corpora[row.corpus], self.answers, self.noises, row.rules)
        drawn: list[tuple[SessionInput, list[Expected]]] = []
        for index in range(row.sessions):
            session = builder.draw((seed, row.draw, index))
            prompt = PROMPTS[index % len(PROMPTS)] if row.is_prompted else USUAL_PROMPT
            voice = self._voice(Random(f"{seed} {index}")) if row.is_voiced else None
            given = SessionInput(session.samples, seed + index, prompt, voice)
            drawn.append((given, expected_of(session, self.answers)))
        return drawn

    def _voice(self, chance: Random) -> FloatArray:
        """Draw reference audio: one to three utterances of a voice that training never used."""
        corpus = self.corpora["flite"]
        clips = [corpus[chance.randrange(len(corpus))].samples for _ in range(chance.randint(1, 3))]
        return np.concatenate(clips)


def expected_of(session: Session, answers: Mapping[str, Spoken]) -> list[Expected]:
    """Return the expected answers of a session."""
    return [
        Expected(
            one.utterance.exchange.kind,
            one.answer,
            one.first_unit,
            len(answers[one.answer].units),
            one.interrupted_unit,
        )
        for one in session.asked
        if one.first_unit >= 0
    ]


def draw_chats(count: int, seed: int) -> list[tuple[ChatInput, Exchange]]:
    """Draw typed chats, and the question and answer with which each of them ends.

    A chat has one or two questions. One half of the chats has a system prompt, and another half
    requests speech.
    """
    drawn: list[tuple[ChatInput, Exchange]] = []
    for index in range(count):
        chance = Random(f"{seed} chat {index}")
        messages: list[tuple[Role, str]] = []
        if index % 2:
            messages.append(("system", PROMPTS[index // 2 % len(PROMPTS)]))
        *earlier, last = _exchanges(chance)
        for exchange in earlier:
            messages.append(("user", typed(exchange.question, chance)))
            messages.append(("assistant", exchange.answer))
        messages.append(("user", typed(last.question, chance)))
        drawn.append((ChatInput(tuple(messages), seed + index, index // 2 % 2 == 1), last))
    return drawn


def _exchanges(chance: Random) -> Sequence[Exchange]:
    """Draw one or two questions that have answers: in a chat, the model always answers."""
    exchanges: list[Exchange] = []
    count = chance.randint(1, 2)
    while len(exchanges) < count:
        exchange = draw_exchange(chance, HELD_OUT_WORDS, held_out=True)
        if exchange.answer:
            exchanges.append(exchange)
    return exchanges
