"""Utterances on disk: samples, texts, and the times of words and phonemes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from duplane.worker.models.types import FloatArray
from training.domain import Exchange

SAMPLES, TABLES, TEXTS = "samples.npy", "tables.npz", "texts.json"
NOISES = "noises.npy"
SCALE = 32767.0


@dataclass(frozen=True)
class Utterance:
    """One spoken question at 16 kHz; `end_s` is the end of the speech.

    `words` and `phonemes` have rows of (start in seconds, number); `Corpus` has the names of the
    numbers.
    """

    exchange: Exchange
    speaker: str
    samples: FloatArray
    end_s: float
    words: NDArray[np.float32]
    phonemes: NDArray[np.float32]


class Corpus:
    """A folder of utterances, which are read on demand.

    `word_names` and `phoneme_names` are the names of the numbers. Number 0 is silence. The last of
    the word numbers stands for all words that do not occur in the questions of the domain. `noises`
    has recorded noises with an RMS of 1, all of one length.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._samples = np.load(folder / SAMPLES, mmap_mode="r")
        with np.load(folder / TABLES) as tables:
            self._bounds, self._ends = tables["bounds"], tables["ends"]
            self._words, self._word_bounds = tables["words"], tables["word_bounds"]
            self._phonemes, self._phoneme_bounds = tables["phonemes"], tables["phoneme_bounds"]
        texts = orjson.loads((folder / TEXTS).read_bytes())
        self._exchanges = [Exchange(*entry) for entry in texts["exchanges"]]
        self.speakers: list[str] = texts["speakers"]
        self.phoneme_names: list[str] = texts["phonemes"]
        self.word_names: list[str] = texts["words"]
        self.noises: Sequence[FloatArray] = ()
        if (folder / NOISES).exists():
            self.noises = np.load(folder / NOISES, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._exchanges)

    def exchange(self, index: int) -> Exchange:
        """Return the question and the answer, without reading the sound."""
        return self._exchanges[index]

    def __getitem__(self, index: int) -> Utterance:
        start, stop = self._bounds[index : index + 2]
        words = slice(*self._word_bounds[index : index + 2])
        phonemes = slice(*self._phoneme_bounds[index : index + 2])
        return Utterance(
            exchange=self._exchanges[index],
            speaker=self.speakers[index],
            samples=self._samples[start:stop].astype(np.float32) / SCALE,
            end_s=float(self._ends[index]),
            words=self._words[words],
            phonemes=self._phonemes[phonemes],
        )


@dataclass(frozen=True)
class Recorded:
    """One utterance before it is stored: it has names of words and phonemes, not their numbers."""

    exchange: Exchange
    speaker: str
    samples: FloatArray
    end_s: float
    words: tuple[tuple[float, str], ...]
    phonemes: tuple[tuple[float, str], ...]


def write_corpus(folder: Path, recorded: list[Recorded], words: list[str]) -> None:
    """Write utterances. Each of `words` has its own number; all other words share one.

    The folder has its name only when it is complete.
    """
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    names = sorted({name for one in recorded for _, name in one.phonemes} - {""})
    word_numbers = {word: number for number, word in enumerate(words, start=1)}
    phoneme_numbers = {name: number for number, name in enumerate(names, start=1)}
    lengths = [len(one.samples) for one in recorded]
    tables: dict[str, NDArray[np.generic]] = {
        "bounds": np.cumsum([0, *lengths], dtype=np.int64),
        "ends": np.array([one.end_s for one in recorded], np.float32),
    }
    for name, numbers, rows in (
        ("word", word_numbers, [one.words for one in recorded]),
        ("phoneme", phoneme_numbers, [one.phonemes for one in recorded]),
    ):
        rest = len(numbers) + 1 if name == "word" else 0
        pairs = [(start, numbers.get(text, rest)) for row in rows for start, text in row]
        tables[f"{name}s"] = np.array(pairs, np.float32).reshape(-1, 2)
        tables[f"{name}_bounds"] = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    whole = np.concatenate([(one.samples * SCALE).astype(np.int16) for one in recorded])
    np.save(part / SAMPLES, whole)
    np.savez(part / TABLES, allow_pickle=False, **tables)
    texts = {
        "exchanges": [
            (one.exchange.kind, one.exchange.question, one.exchange.answer) for one in recorded
        ],
        "speakers": [one.speaker for one in recorded],
        "phonemes": ["", *names],
        "words": ["", *words, "?"],
    }
    (part / TEXTS).write_bytes(orjson.dumps(texts))
    part.rename(folder)


def write_noises(folder: Path, noises: Sequence[FloatArray]) -> None:
    """Add noises of one length to a corpus."""
    part = folder / f"part-{NOISES}"
    np.save(part, np.stack(noises).astype(np.float16))
    part.rename(folder / NOISES)
