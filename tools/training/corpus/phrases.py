"""Questions that neural voices and festival speak for training, as a stage of its own.

Kokoro needs about a second for each phrase, so the cache keeps every phrase: a stage that was
stopped goes on where it stopped. The folder's name contains a digest of the plan and of the
synthesiser's packages, and its list has a digest of each file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import orjson

from duplane.tools.command import UsageError
from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray
from training.corpus import festival, neural
from training.corpus.clips import resample, trimmed, write_clip
from training.domain import TRAINED_WORDS, Exchange, draw_exchange, draw_fixed
from training.sources.catalogue import source_named
from training.sources.fetching import find_source

LIST = "phrases.json"
MOST_NEURAL = 2000
"""Kokoro speaks at most this many phrases, so that the stage takes at most 40 minutes."""


@dataclass(frozen=True)
class PhrasePlan:
    """The number of phrases of each synthesiser. Raises UsageError for too many.

    `fixed` are more phrases of Kokoro: questions that are always asked in the same words.
    """

    neural: int
    festival: int
    fixed: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.neural + self.fixed > MOST_NEURAL:
            raise UsageError(
                f"neural is {self.neural} and fixed is {self.fixed}, must be at most {MOST_NEURAL}"
                " together"
            )


@dataclass(frozen=True)
class Phrase:
    """A question and its answer, and who speaks it how fast."""

    engine: str
    voice: str
    speed: float
    exchange: Exchange


@dataclass(frozen=True)
class Made:
    """The result of the stage: its folder, a digest of all phrases, and what it cost.

    `cpu_s` has the seconds of CPU time per new phrase of each synthesiser.
    """

    folder: Path
    digest: str
    kept: int
    cpu_s: dict[str, float]


def draw_phrases(plan: PhrasePlan) -> list[Phrase]:
    """Draw the phrases: the same plan gives the same phrases. All are on the side of training."""
    drawn: list[Phrase] = []
    for engine, first, count in (
        ("kokoro", 0, plan.neural),
        ("festival", 0, plan.festival),
        ("kokoro", MOST_NEURAL, plan.fixed),
    ):
        for number in range(first, first + count):
            chance = Random(f"{plan.seed} {engine} {number}")
            is_fixed = first > 0
            exchange = draw_fixed(chance) if is_fixed else draw_exchange(chance, TRAINED_WORDS)
            speed = round(chance.uniform(0.75, 1.25), 3)
            is_neural = engine == "kokoro"
            voice = neural.draw_voice(chance) if is_neural else chance.choice(festival.VOICES)
            drawn.append(Phrase(engine, voice, speed, exchange))
    return drawn


def speak_phrases(cache: Path, plan: PhrasePlan, report: Callable[[str], None]) -> Made:
    """Speak the phrases that the cache lacks, and write the list of all.

    Raises UsageError if Kokoro is not fetched, and SynthesisError.
    """
    phrases = draw_phrases(plan)
    folder = cache / f"phrases-{_plan_digest(plan)}"
    folder.mkdir(parents=True, exist_ok=True)
    speakers: dict[str, _Speaker] = {"festival": _festival}
    if plan.neural + plan.fixed:
        speakers["kokoro"] = _neural(cache)
    kept, spent, made = 0, dict.fromkeys(speakers, 0.0), dict.fromkeys(speakers, 0)
    entries: list[dict[str, object]] = []
    for number, phrase in enumerate(phrases):
        path = folder / f"{number:05d}.wav"
        if path.exists():
            kept += 1
        else:
            begun = _cpu_s()
            write_clip(path, trimmed(speakers[phrase.engine](phrase)))
            spent[phrase.engine] += _cpu_s() - begun
            made[phrase.engine] += 1
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        entries.append({"file": path.name, "sha256": digest, **asdict(phrase)})
        if number % 50 == 49 or number + 1 == len(phrases):
            report(f"spoken {number + 1} of {len(phrases)} phrases")
    content = orjson.dumps(entries, option=orjson.OPT_INDENT_2)
    (folder / LIST).write_bytes(content)
    cost = {name: spent[name] / made[name] for name in speakers if made[name]}
    return Made(folder, hashlib.sha256(content).hexdigest(), kept, cost)


_Speaker = Callable[[Phrase], FloatArray]


def _plan_digest(plan: PhrasePlan) -> str:
    digests = [archive.sha256 for archive in source_named("kokoro", "training").archives]
    texts = [asdict(phrase) for phrase in draw_phrases(plan)]
    return hashlib.sha256(orjson.dumps([digests, texts])).hexdigest()[:12]


def _neural(cache: Path) -> _Speaker:
    folder = find_source("kokoro", cache, "training")
    if folder is None:
        raise UsageError("the source kokoro is not fetched")
    kokoro = neural.Kokoro(folder)

    def speak(phrase: Phrase) -> FloatArray:
        samples = kokoro.speak(phrase.exchange.question, phrase.voice, phrase.speed)
        return resample(samples, neural.RATE, INPUT_SAMPLE_RATE)

    return speak


def _festival(phrase: Phrase) -> FloatArray:
    samples, rate = festival.speak(phrase.exchange.question, phrase.voice, 1 / phrase.speed)
    return resample(samples, rate, INPUT_SAMPLE_RATE)


def _cpu_s() -> float:
    """Return the CPU time of this process and of its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
