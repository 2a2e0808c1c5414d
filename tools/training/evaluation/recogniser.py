"""Counts spoken digits that pocketsphinx understands. The training does not use pocketsphinx."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none

from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray
from training.corpus.espeak import SynthesisError
from training.domain import DIGITS
from training.evaluation.scores import Rate

COMMAND = "pocketsphinx_batch"
MARGIN_S = 0.5
NOISE = 1e-3
LIMIT_S = 600.0
_DIGIT = f"({' | '.join(DIGITS)})"
_GRAMMAR = "#JSGF V1.0;\ngrammar digits;\npublic <digits> = {};\n"
_WAV_HEADER_BYTES = 44


def recognised(texts: Sequence[str], sounds: Sequence[FloatArray]) -> Rate:
    """Return how many digits of `texts` pocketsphinx hears in `sounds` (16 kHz).

    All texts must have the same number of digits, because the grammar for pocketsphinx accepts
    only this number. If pocketsphinx is not installed, the result counts no digits. Raises
    SynthesisError if pocketsphinx fails.
    """
    rate = Rate()
    if shutil.which(COMMAND) is None:
        return rate
    with tempfile.TemporaryDirectory(prefix="duplane-pocketsphinx-") as name:
        folder = Path(name)
        rule = " ".join([_DIGIT] * len(texts[0].split()))
        (folder / "grammar").write_text(_GRAMMAR.format(rule), encoding="utf-8")
        for number, samples in enumerate(sounds):
            _write(folder / f"{number}.wav", samples)
        numbers = "".join(f"{number}\n" for number in range(len(sounds)))
        (folder / "numbers").write_text(numbers, encoding="utf-8")
        found = _run(folder)
    for text, heard in zip(texts, found, strict=True):
        for wanted, word in zip_longest(text.split(), heard.split()):
            rate.add(is_right=wanted == word)
    return rate


def _write(path: Path, samples: FloatArray) -> None:
    margin = int(MARGIN_S * INPUT_SAMPLE_RATE)
    padded = np.pad(samples, margin)
    padded += np.random.default_rng(0).standard_normal(len(padded)).astype(np.float32) * NOISE
    soundfile.write(path, padded, INPUT_SAMPLE_RATE, subtype="PCM_16")


def _run(folder: Path) -> list[str]:
    """Return the words of each WAV file; they are empty if nothing is recognised."""
    options = {
        "-jsgf": folder / "grammar",
        "-ctl": folder / "numbers",
        "-cepdir": folder,
        "-cepext": ".wav",
        "-adcin": "yes",
        "-adchdr": _WAV_HEADER_BYTES,
        "-hyp": folder / "words",
        "-logfn": folder / "log",
    }
    arguments = [str(part) for option in options.items() for part in option]
    try:
        done = subprocess.run(
            (COMMAND, *arguments), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SynthesisError(f"{COMMAND} has not ended after {LIMIT_S:g} s") from None
    if done.returncode:
        raise SynthesisError(f"{COMMAND} fails: {done.stderr.strip()}")
    lines = (folder / "words").read_text(encoding="utf-8").splitlines()
    return [line.rpartition("(")[0].strip() for line in lines]
