"""The questions of training: synthesised by rules, by neural voices, and joined from takes.

The stage "clips" aligns the phrases of neural voices and festival, and the recordings of people,
with their texts. The stage "corpus" makes several changed copies of each phrase, and joins words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from random import Random

import numpy as np
import orjson

from duplane.tools.command import UsageError
from training.corpus.alignment import align
from training.corpus.changing import Changes, send
from training.corpus.clips import read_clip, trimmed
from training.corpus.phrases import LIST
from training.corpus.recording import CorpusPlan, changed, draw_recording, in_processes
from training.corpus.splicing import CROWD, PERSON, WordBank, draw_splice
from training.corpus.store import Corpus, Recorded, write_corpus
from training.domain import Exchange, question_words
from training.sources.recordings import recordings_of

WORD = "word"
"""The kind of a recording that contains only one word. It is no question."""
FEWEST_SAMPLES = 1600
MOST_WORD_SAMPLES = 14_400
"""A recording of one word that is longer after it was trimmed has loud noise around the word."""
_VOICES = Changes(
    speed=(0.88, 1.16), length=(0.85, 1.7), moved=0.8, lengthened=0.5, narrow=0.35, telephone=0.12
)
_SPLICES = Changes(
    speed=(0.74, 1.24),
    tract=(0.85, 1.22),
    length=(0.85, 2.8),
    moved=0.8,
    lengthened=0.75,
    narrow=0.5,
    telephone=0.15,
)
"""The joined words come from sentences. People say a word alone much more slowly: without longer
words, the model heard their "say" as "say eight"."""


@dataclass(frozen=True)
class MixturePlan:
    """The number of utterances of each kind.

    `rules` are spoken by espeak and flite, `copies` is the number of copies of each phrase.
    """

    seed: int = 1
    rules: int = 20_000
    copies: int = 8
    splices: int = 14_000
    changes: Changes = field(default_factory=Changes)


def record_clips(folder: Path, phrases: Path | None, recordings: Path | None) -> None:
    """Align and write the clips: phrases of the stage `speak`, and recordings of words.

    Raises UsageError if one of the folders has no list, or no recordings of training.
    """
    write_corpus(folder, [*_phrases(phrases), *_words(recordings)], question_words())


def _phrases(folder: Path | None) -> Iterator[Recorded]:
    if folder is None:
        return
    path = folder / LIST
    if not path.exists():
        raise UsageError(f"phrases is {folder}: it has no {LIST}, the stage speak has not ended")
    for entry in orjson.loads(path.read_bytes()):
        samples = read_clip(folder / entry["file"])
        if len(samples) >= FEWEST_SAMPLES:
            speaker = f"{entry['engine']}:{entry['voice']}"
            yield align(samples, Exchange(**entry["exchange"]), speaker)


def _words(folder: Path | None) -> Iterator[Recorded]:
    if folder is None:
        return
    found = recordings_of(folder, "training")
    people = [(PERSON + name, takes) for name, takes in sorted(found.digits.items())]
    for speaker, takes in (*people, (CROWD, found.words)):
        for word, paths in sorted(takes.items()):
            for path in paths:
                samples = trimmed(read_clip(path))
                if FEWEST_SAMPLES <= len(samples) <= MOST_WORD_SAMPLES:
                    yield align(samples, Exchange(WORD, word, ""), speaker)


def record_mixture(folder: Path, clips: Path, plan: MixturePlan, *, processes: int = 1) -> None:
    """Write the corpus of training; the same plan and clips give the same utterances."""
    draw = partial(draw_utterance, clips=clips, plan=plan)
    count = plan.rules + plan.copies * len(phrases_of(clips)) + plan.splices
    write_corpus(folder, list(in_processes(draw, count, processes)), question_words())


def draw_utterance(index: int, clips: Path, plan: MixturePlan) -> Recorded:
    """Draw utterance `index`: first those of rules, then copies of phrases, then joined words."""
    if index < plan.rules:
        return draw_recording(index, CorpusPlan(plan.rules, plan.seed, changes=plan.changes))
    index -= plan.rules
    chosen = phrases_of(clips)
    numbers = np.random.default_rng([plan.seed, 3, index])
    if index < plan.copies * len(chosen):
        return changed(_named(clips, chosen[index % len(chosen)]), _VOICES, numbers)
    made = draw_splice(_bank(clips), Random(f"{plan.seed} splice {index}"), _SPLICES)
    return replace(made, samples=send(made.samples, _SPLICES, numbers))


def _named(clips: Path, index: int) -> Recorded:
    """Return a clip with the names of its words and phonemes."""
    corpus = _clips(clips)
    clip = corpus[index]
    words = clip.exchange.question.split()
    names = corpus.phoneme_names
    return Recorded(
        clip.exchange,
        clip.speaker,
        clip.samples,
        clip.end_s,
        tuple((float(start), word) for (start, _), word in zip(clip.words, words, strict=True)),
        tuple((float(start), names[int(number)]) for start, number in clip.phonemes),
    )


@cache
def _clips(folder: Path) -> Corpus:
    return Corpus(folder)


@cache
def _bank(folder: Path) -> WordBank:
    return WordBank(_clips(folder))


@cache
def phrases_of(folder: Path) -> Sequence[int]:
    """Return the numbers of the clips that are whole questions."""
    corpus = _clips(folder)
    return [number for number in range(len(corpus)) if corpus.exchange(number).kind != WORD]
