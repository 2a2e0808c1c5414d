"""Scores windows with Silero's voice activity model, from a file that the operator gives.

onnxruntime is imported only if there is such a file: the base installation does not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from duplane.edge.speech.speech_detector import RATE_HERTZ, Score, Windows

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIZE = 512  # samples of a window at 16 kHz
_CONTEXT_SIZE = 64  # samples before the window that the model also gets
_STATE_SHAPE = (2, 1, 128)
_INPUTS = ("input", "state")  # `sr`, too, in files for several rates


class VadModelError(ValueError):
    """The file is no model that the detector can use, or onnxruntime is not installed."""


class SileroScorer:
    """Scores one stream. The scorers of all streams share one `model`."""

    window_samples = _SIZE
    lookback_samples = 0

    def __init__(self, model: Any, rate: dict[str, object]) -> None:
        self._model = model
        self._rate = rate
        self.reset()

    def reset(self) -> None:
        """Forget the last windows."""
        self._state: NDArray[np.float32] = np.zeros(_STATE_SHAPE, np.float32)
        self._context: NDArray[np.float32] = np.zeros(_CONTEXT_SIZE, np.float32)

    def score(self, windows: Windows) -> list[Score]:
        """Return the score of each row of `windows`."""
        scores: list[Score] = []
        for window in windows:
            sound = np.concatenate((self._context, window))[None]
            inputs = {"input": sound, "state": self._state, **self._rate}
            output, self._state = self._model.run(None, inputs)
            self._context = window[-_CONTEXT_SIZE:]
            scores.append(Score(float(output[0, 0]), 0, _SIZE))
        return scores


def load_silero(path: Path) -> Callable[[], SileroScorer]:
    """Load a model of Silero from version 5 on. Return what makes the scorer of one stream.

    Raises VadModelError.
    """
    try:
        import onnxruntime  # pyright: ignore[reportMissingTypeStubs]  it ships none
    except ImportError:
        raise VadModelError(
            "vad_model: onnxruntime is not installed; install duplane[vad]"
        ) from None
    runtime: Any = onnxruntime
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # a window takes 0.2 ms
    try:
        model = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = {each.name for each in model.get_inputs()}
    except Exception as error:
        raise VadModelError(f"vad_model: {path.name} is no ONNX model: {error}") from error
    rate: dict[str, object] = {"sr": np.array(RATE_HERTZ, np.int64)} if "sr" in names else {}
    if names != {*_INPUTS, *rate}:
        raise VadModelError(
            f"vad_model: {path.name} has the inputs {', '.join(sorted(names))}, but Silero's"
            " model has input, state and sr: use a file of version 5 or later"
        )
    try:
        SileroScorer(model, rate).score(np.zeros((1, _SIZE), np.float32))
    except Exception as error:
        raise VadModelError(f"vad_model: {path.name} cannot score a window: {error}") from error
    return lambda: SileroScorer(model, rate)
