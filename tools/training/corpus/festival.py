"""festival: a third synthesiser, with diphone voices and voices of hidden Markov models (HTS)."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none

from duplane.worker.models.types import FloatArray
from training.corpus.espeak import SynthesisError

VOICES = ("kal_diphone",)
HELD_OUT_VOICES = ("cmu_us_slt_arctic_hts", "ked_diphone")
COMMAND = "text2wave"
_LIMIT_S = 30.0


def speak(text: str, voice: str, stretch: float) -> tuple[FloatArray, int]:
    """Return the speech of a text, and its rate. A `stretch` above 1 is slower.

    Raises SynthesisError if festival or the voice is not installed.
    """
    if shutil.which(COMMAND) is None:
        raise SynthesisError("festival is not installed")
    chosen = f"(begin (voice_{voice}) (Parameter.set 'Duration_Stretch {stretch:.3f}))"
    with tempfile.TemporaryDirectory(prefix="duplane-festival-") as folder:
        written, path = Path(folder, "text"), Path(folder, "speech.wav")
        written.write_text(text, encoding="utf-8")
        done = subprocess.run(
            (COMMAND, "-eval", chosen, str(written), "-o", str(path)),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode or not path.exists() or "unbound variable" in done.stderr:
            raise SynthesisError(f"festival cannot speak with the voice {voice}")
        samples, rate = cast("Any", soundfile).read(path, dtype="float32")
    return np.asarray(samples, np.float32), int(rate)
