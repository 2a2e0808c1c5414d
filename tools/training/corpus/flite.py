"""flite: a second synthesiser, whose voices were made from recordings of people."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, cast

import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none

from training.corpus.espeak import Speech, SynthesisError, espeak
from training.corpus.voices import ASSISTANT, Speaker

NORMAL_RATE = 170.0
"""Approximate words per minute of a voice that is not stretched."""
_LIMIT_S = 30.0
_SILENCE = "pau"
# The names of the phones: first flite's name, then espeak's.
_NAMES = """
    aa=A: ae=a ah=V ao=O: aw=aU ax=@ ay=aI b=b ch=tS d=d dh=D eh=E er=3: ey=eI f=f g=g hh=h
    ih=I iy=i: jh=dZ k=k l=l m=m n=n ng=N ow=oU oy=OI p=p r=r s=s sh=S t=t th=T uh=U uw=u: v=v
    w=w y=j z=z zh=Z
"""
_PHONES = {
    **{phone: name for pair in _NAMES.split() for phone, name in [pair.split("=")]},
    _SILENCE: "_",
}


@cache
def _command() -> str:
    found = shutil.which("flite")
    if found is None:
        raise SynthesisError("flite is not installed")
    return found


def speak(text: str, speaker: Speaker) -> Speech:
    """Speak one utterance. Raises SynthesisError if flite cannot."""
    with tempfile.TemporaryDirectory(prefix="duplane-flite-") as folder:
        path = Path(folder, "speech.wav")
        stretch = NORMAL_RATE / speaker.rate
        arguments = ("-voice", speaker.voice, "--setf", f"duration_stretch={stretch:.3f}")
        done = subprocess.run(
            (_command(), *arguments, "-psdur", "-t", f" {text} ", "-o", str(path)),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode or not path.exists():
            raise SynthesisError(f"flite fails: {done.stderr.strip()}")
        samples, rate = cast("Any", soundfile).read(path, dtype="int16")
    phonemes: list[tuple[float, str]] = []
    start = 0.0
    for entry in done.stdout.split():
        name, _, end = entry.partition(":")
        phonemes.append((start, _PHONES.get(name, "@")))
        start = float(end)
    return Speech(samples, rate, _word_starts(text, phonemes), tuple(phonemes))


def _word_starts(text: str, phonemes: list[tuple[float, str]]) -> tuple[float, ...]:
    """Estimate the starts of words.

    espeak's starts are scaled to the beginning and the end of flite's speech.
    """
    model = espeak().speak(text, ASSISTANT)
    spoken = [start for start, name in phonemes if name != "_"]
    modelled = [start for start, name in model.phonemes if not name.startswith("_")]
    if not spoken or not modelled:
        raise SynthesisError(f"{text!r} has no sound")
    length = modelled[-1] - modelled[0]
    scale = (spoken[-1] - spoken[0]) / length if length else 1.0  # a word of one phoneme
    return tuple(spoken[0] + scale * (start - modelled[0]) for start in model.words)
