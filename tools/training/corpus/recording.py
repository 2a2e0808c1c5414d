"""Synthesises the questions of a corpus in several processes; each has its own random generator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import soxr  # pyright: ignore[reportMissingTypeStubs]  it ships none

from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray
from training.corpus import flite
from training.corpus.changing import Changes, draw_voice_change, send
from training.corpus.espeak import Speech, espeak
from training.corpus.rooms import colour, normalise, reverberate
from training.corpus.store import Recorded, write_corpus
from training.corpus.voices import Speaker, draw_speaker
from training.domain import (
    HELD_OUT_WORDS,
    Exchange,
    draw_exchange,
    draw_trained_exchange,
    question_words,
)

MARGIN_S = 0.06
"""Silence that is kept before and after the speech."""
PER_TASK = 250


@dataclass(frozen=True)
class CorpusPlan:
    """The size and the random seed of a corpus.

    A held-out corpus has speakers, unknown words, and digits to repeat that training lacks. In a
    corpus for training, the share `sight_share` of the questions is about pictures.
    """

    count: int
    seed: int
    flite_share: float = 0.12
    is_held_out: bool = False
    coloured_share: float = 0.6
    reverberant_share: float = 0.35
    sight_share: float = 0.15
    changes: Changes | None = None
    """Changes of voices and lines; they replace both shares."""


def synthesise(text: str, speaker: Speaker) -> Speech:
    """Synthesise a text in the voice of a speaker."""
    if speaker.engine == "flite":
        return flite.speak(text, speaker)
    return espeak().speak(text, speaker)


def resampled(speech: Speech, warp: float, rate: int) -> FloatArray:
    """Resample to `rate`, and slow the sound down by the factor `warp`."""
    samples = speech.samples.astype(np.float32) / 32768.0
    return cast("Any", soxr).resample(samples, speech.rate, rate * warp, quality="HQ")


def record(exchange: Exchange, speaker: Speaker) -> Recorded:
    """Synthesise the question, and shorten the silence around the speech to `MARGIN_S`."""
    speech = synthesise(exchange.question, speaker)
    samples = resampled(speech, speaker.warp, INPUT_SAMPLE_RATE)
    spoken = [index for index, (_, name) in enumerate(speech.phonemes) if name[:1] != "_"]
    duration = len(samples) / INPUT_SAMPLE_RATE
    first, last = 0.0, duration
    if spoken:
        first = speech.phonemes[spoken[0]][0] * speaker.warp
        if spoken[-1] + 1 < len(speech.phonemes):
            last = min(duration, speech.phonemes[spoken[-1] + 1][0] * speaker.warp)
    begin, end = max(0.0, first - MARGIN_S), min(duration, last + MARGIN_S)
    cut = samples[int(begin * INPUT_SAMPLE_RATE) : int(end * INPUT_SAMPLE_RATE)]

    def shifted(start: float) -> float:
        return max(0.0, start * speaker.warp - begin)

    words = zip(speech.words, exchange.question.split(), strict=True)
    return Recorded(
        exchange=exchange,
        speaker=f"{speaker.engine}:{speaker.voice}",
        samples=normalise(cut),
        end_s=last - begin,
        words=tuple((shifted(start), name) for start, name in words),
        phonemes=tuple(
            (shifted(start), "" if name[:1] == "_" else name) for start, name in speech.phonemes
        ),
    )


def draw_recording(index: int, plan: CorpusPlan) -> Recorded:
    """Draw and synthesise utterance `index` of a corpus."""
    chance = Random(f"{plan.seed} {index}")
    if plan.is_held_out:
        exchange = draw_exchange(chance, HELD_OUT_WORDS, held_out=True)
    else:
        exchange = draw_trained_exchange(chance, sight_share=plan.sight_share)
    speaker = draw_speaker(chance, flite_share=plan.flite_share, is_held_out=plan.is_held_out)
    made = record(exchange, speaker)
    numbers = np.random.default_rng([plan.seed, index])
    samples = made.samples
    if plan.changes is not None:
        return changed(made, plan.changes, numbers)
    if numbers.random() < plan.coloured_share:
        samples = colour(samples, numbers)
    if numbers.random() < plan.reverberant_share:
        samples = reverberate(samples, numbers)
    return Recorded(
        made.exchange, made.speaker, normalise(samples), made.end_s, made.words, made.phonemes
    )


def changed(made: Recorded, changes: Changes, numbers: np.random.Generator) -> Recorded:
    """Change the voice of an utterance, and send it through a room and a line."""
    change = draw_voice_change(changes, numbers)
    return Recorded(
        made.exchange,
        made.speaker,
        send(change.apply(made.samples), changes, numbers),
        change.moved(made.end_s),
        tuple((change.moved(start), word) for start, word in made.words),
        tuple((change.moved(start), name) for start, name in made.phonemes),
    )


def record_corpus(folder: Path, plan: CorpusPlan, *, processes: int = 1) -> None:
    """Synthesise and write a corpus; the same plan gives the same utterances."""
    made = in_processes(partial(draw_recording, plan=plan), plan.count, processes)
    write_corpus(folder, list(made), question_words())


def in_processes(draw: Callable[[int], Recorded], count: int, processes: int) -> Iterator[Recorded]:
    """Draw utterances 0 to `count`, in several processes; report the progress on stderr."""
    tasks = [range(start, min(count, start + PER_TASK)) for start in range(0, count, PER_TASK)]
    if processes <= 1:
        for indices in tasks:
            yield from _task(draw, indices)
            _report(indices[-1] + 1, count)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for indices, made in zip(tasks, pool.map(partial(_task, draw), tasks), strict=True):
            yield from made
            _report(indices[-1] + 1, count)


def _task(draw: Callable[[int], Recorded], indices: Sequence[int]) -> list[Recorded]:
    return [draw(index) for index in indices]


def _report(done: int, count: int) -> None:
    sys.stderr.write(f"spoken {done} of {count} utterances\n")
