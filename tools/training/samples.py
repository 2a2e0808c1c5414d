"""Makes the sample recordings and the sample picture, which `duplane talk` sends by default.

Their voices do not occur in training.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none

from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from training.corpus.recording import record
from training.corpus.voices import Speaker
from training.domain import Exchange
from training.vision.pictures import draw_picture
from training.vision.scenes import Scene

NOISE = 1e-3


@dataclass(frozen=True)
class Sample:
    """A recording. Each of its `questions` is a start in seconds and a text."""

    name: str
    speaker: Speaker
    duration_s: float
    questions: tuple[tuple[float, str], ...]


SAMPLES = (
    Sample(
        "questions",
        Speaker("espeak", "en-us+m5", rate=150, pitch=50),
        16.0,
        (
            (1.8, "hello"),
            (5.3, "what is two plus three"),
            (9.3, "what colour is the sky"),
            (13.3, "thank you"),
        ),
    ),
    Sample(
        "digits",
        Speaker("espeak", "en-gb-x-gbclan+f4", rate=145, pitch=55),
        12.0,
        ((2.0, "say seven four"), (5.5, "what is your name"), (9.0, "good night")),
    ),
    Sample(
        "interruption",
        Speaker("espeak", "en-us+m5", rate=150, pitch=50),
        9.0,
        ((1.8, "count to ten"), (4.4, "stop")),
    ),
    Sample(
        "pictures",
        Speaker("espeak", "en-us+m5", rate=150, pitch=50),
        13.0,
        ((1.8, "what do you see"), (6.0, "what colour is this"), (9.7, "how many")),
    ),
)
PICTURE, PICTURE_SEED = Scene("star", "red", 3), 6


def write_samples(folder: Path) -> None:
    """Write each recording as a 16 kHz WAV file, and its questions as a text file beside it.

    The recording "pictures" is about the picture with its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pictures.jpg").write_bytes(draw_picture(Random(PICTURE_SEED), PICTURE).jpeg())
    for number, sample in enumerate(SAMPLES):
        sound = np.random.default_rng(number).standard_normal(
            int(sample.duration_s * INPUT_SAMPLE_RATE)
        )
        sound = (sound * NOISE).astype(np.float32)
        lines: list[str] = []
        for start_s, question in sample.questions:
            spoken = record(Exchange("", question, ""), sample.speaker).samples
            start = int(start_s * INPUT_SAMPLE_RATE)
            sound[start : start + len(spoken)] += spoken[: len(sound) - start]
            lines.append(f"{start_s:5.1f} s  {question}\n")
        soundfile.write(folder / f"{sample.name}.wav", sound, INPUT_SAMPLE_RATE, subtype="PCM_16")
        (folder / f"{sample.name}.txt").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]))
