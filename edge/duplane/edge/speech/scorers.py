"""Chooses how the windows of speech detectors are scored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from duplane.edge.speech.silero_scorer import load_silero
from duplane.edge.speech.spectral_scorer import SpectralScorer
from duplane.edge.speech.speech_detector import Scorer

ScorerFactory = Callable[[], Scorer]
"""Makes the scorer of one stream."""


def open_scorers(vad_model: Path | None) -> ScorerFactory:
    """Return what makes scorers: with the model in the file, or the detector's own.

    Raises VadModelError, which is a ValueError.
    """
    return SpectralScorer if vad_model is None else load_silero(vad_model)
