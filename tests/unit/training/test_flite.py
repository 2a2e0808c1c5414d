"""flite's times of words, which come from espeak's times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none

from training.corpus import flite
from training.corpus.espeak import Speech, SynthesisError
from training.corpus.voices import Speaker

FLITE = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
cp {sound} "$2"
echo {phones}
"""


@pytest.mark.parametrize(
    ("phones", "modelled", "starts"),
    [
        ("pau:0.1 aa:0.4 pau:0.5", ((0.05, "A:"),), (0.1,)),
        ("pau:0.1 aa:0.4 r:0.6 pau:0.7", ((0.0, "A:"), (0.2, "r")), (0.175,)),
    ],
    ids=["one phoneme", "two phonemes"],
)
def test_words_begin_where_flite_speaks_them(
    phones: str,
    modelled: tuple[tuple[float, str], ...],
    starts: tuple[float, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (0.05,)
    install(tmp_path, phones, Speech(np.zeros(9, np.int16), 16_000, words, modelled), monkeypatch)
    found = flite.speak("are", Speaker("flite", "slt"))
    assert found.words == pytest.approx(starts)


def test_text_without_a_phoneme_has_no_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "pau:0.1", Speech(np.zeros(9, np.int16), 16_000, (), ()), monkeypatch)
    with pytest.raises(SynthesisError, match="'mm' has no sound"):
        flite.speak("mm", Speaker("flite", "slt"))


def install(folder: Path, phones: str, model: Speech, patch: pytest.MonkeyPatch) -> None:
    """Act as flite, and as espeak, which gives the times of `model`."""
    sound, path = folder / "sound.wav", folder / "flite"
    soundfile.write(sound, np.zeros(16, np.int16), 16_000)
    path.write_text(FLITE.format(sound=sound, phones=phones), encoding="utf-8")
    path.chmod(0o755)
    patch.setattr("training.corpus.flite._command", lambda: str(path))
    patch.setattr(flite, "espeak", lambda: SimpleNamespace(speak=lambda *_: model))
