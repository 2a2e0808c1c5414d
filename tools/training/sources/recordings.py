"""Recordings of spoken words that the user has, in the formats of two public data sets.

A folder has files DIGIT_SPEAKER_NUMBER.wav, as the free-spoken-digit-dataset, folders
WORD/SPEAKER_nohash_NUMBER.wav, as Speech Commands, or both. Every third speaker by name is for the
evaluation, the others are for training. The folder "other" may have sentences of people, for the
crowds of training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from duplane.tools.command import UsageError
from training.domain import DIGITS
from training.sources.catalogue import Purpose

CREDIT = (
    "Recordings of people: give the credit that their licences ask for. The free-spoken-digit-"
    "dataset is CC BY-SA 4.0: https://github.com/Jakobovski/free-spoken-digit-dataset. Speech "
    "Commands by Pete Warden is CC BY 4.0: https://arxiv.org/abs/1804.03209"
)
HELD_OUT_STRIDE = 3
OTHER = "other"
_DIGIT = re.compile(r"([0-9])_([^_]+)_[0-9]+\.wav")
_WORD, _TAKE = re.compile(r"[a-z]+"), re.compile(r"([0-9a-f]+)_nohash_[0-9]+\.wav")

Takes = Mapping[str, list[Path]]
"""For each word: its files, sorted."""


@dataclass(frozen=True)
class Recordings:
    """What people say: digits of each speaker, and single words of many speakers together.

    Each speaker of `digits` says all digits. Most speakers of `words` say only a few words.
    """

    digits: Mapping[str, Takes]
    words: Takes
    sentences: list[Path] = field(default_factory=list[Path])
    """Sentences of people that are no questions. None of them judges."""


def recordings_of(folder: Path, purpose: Purpose) -> Recordings:
    """Return the recordings of the speakers for one purpose.

    Raises UsageError if the folder has no such files, or if a speaker lacks a digit.
    """
    digits = _for_purpose(_digit_files(folder), purpose)
    words = _for_purpose(_word_files(folder), purpose)
    if not digits and not words:
        raise UsageError(
            f"recordings is {folder}: no file is named DIGIT_SPEAKER_NUMBER.wav or "
            "WORD/SPEAKER_nohash_NUMBER.wav"
        )
    for speaker, takes in digits.items():
        missing = [word for word in DIGITS if word not in takes]
        if missing:
            raise UsageError(f"recordings is {folder}: {speaker} never says {missing[0]}")
    together: dict[str, list[Path]] = {}
    for _, takes in sorted(words.items()):
        for word, paths in takes.items():
            together.setdefault(word, []).extend(paths)
    sentences = sorted((folder / OTHER).glob("*.wav")) if purpose == "training" else []
    return Recordings(digits, together, sentences)


def _digit_files(folder: Path) -> Iterator[tuple[str, str, Path]]:
    for path in sorted(folder.iterdir()):
        if match := _DIGIT.fullmatch(path.name):
            yield match[2], DIGITS[int(match[1])], path


def _word_files(folder: Path) -> Iterator[tuple[str, str, Path]]:
    for path in sorted(folder.glob("*/*.wav")):
        match = _TAKE.fullmatch(path.name)
        if match and _WORD.fullmatch(path.parent.name):
            yield match[1], path.parent.name, path


def _for_purpose(
    files: Iterator[tuple[str, str, Path]], purpose: Purpose
) -> Mapping[str, dict[str, list[Path]]]:
    """Return the files of each speaker for one purpose, by their words."""
    found: dict[str, dict[str, list[Path]]] = {}
    for speaker, word, path in files:
        found.setdefault(speaker, {}).setdefault(word, []).append(path)
    held_out = {*sorted(found)[::HELD_OUT_STRIDE]}
    is_judging = purpose == "judging"
    return {name: takes for name, takes in found.items() if (name in held_out) == is_judging}
