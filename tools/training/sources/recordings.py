"""Recordings of spoken digits that the user has, in the format of the free-spoken-digit-dataset.

A folder has files DIGIT_SPEAKER_NUMBER.wav. Every third speaker by name is for the evaluation, the
others are for training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from duplane.tools.command import UsageError
from training.domain import DIGITS
from training.sources.catalogue import Purpose

CREDIT = (
    "Recordings of people: give the credit that their licence asks for. The free-spoken-digit-"
    "dataset is CC BY-SA 4.0: https://github.com/Jakobovski/free-spoken-digit-dataset"
)
HELD_OUT_STRIDE = 3
_NAME = re.compile(r"([0-9])_([^_]+)_[0-9]+\.wav")

Digits = Mapping[str, Mapping[str, list[Path]]]
"""For each speaker and each digit's word: the files, sorted."""


def digits_of(folder: Path, purpose: Purpose) -> Digits:
    """Return the recordings of the speakers for one purpose.

    Raises UsageError if the folder has no such files, or if a speaker lacks a digit.
    """
    found: dict[str, dict[str, list[Path]]] = {}
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match:
            word = DIGITS[int(match[1])]
            found.setdefault(match[2], {}).setdefault(word, []).append(path)
    if not found:
        raise UsageError(f"recordings is {folder}: no file is named DIGIT_SPEAKER_NUMBER.wav")
    for speaker, digits in found.items():
        missing = [word for word in DIGITS if word not in digits]
        if missing:
            raise UsageError(f"recordings is {folder}: {speaker} never says {missing[0]}")
    held_out = sorted(found)[::HELD_OUT_STRIDE]
    is_judging = purpose == "judging"
    return {name: digits for name, digits in found.items() if (name in held_out) == is_judging}
