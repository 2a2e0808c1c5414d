"""Scores of a voice activity model: what the model gets, and files that are no such model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from support.vad_model import write_model

from duplane.edge.speech.silero_scorer import VadModelError, load_silero
from duplane.edge.speech.speech_detector import Score, Windows

SIZE = 512


def test_the_model_gets_its_state_and_the_end_of_the_last_window(tmp_path: Path) -> None:
    make = load_silero(write_model(tmp_path / "vad.onnx"))
    scorer, other = make(), make()
    ramp = np.arange(SIZE, dtype=np.float32) / np.float32(SIZE)
    windows: Windows = np.tile(ramp, (3, 1)).astype(np.float32)
    context = windows[0, -64]
    expected = [Score(value, 0, SIZE) for value in (0.0, context + 1, context + 2)]
    assert scorer.score(windows) == expected
    assert other.score(windows[:1]) == expected[:1]
    scorer.reset()
    assert scorer.score(windows[:2]) == expected[:2]


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vad.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(VadModelError, match=r"vad\.onnx is no ONNX model"):
        load_silero(path)


def test_a_model_with_other_inputs_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "old.onnx", state_name="h")
    with pytest.raises(VadModelError, match=r"has the inputs h, input, sr, but .* version 5"):
        load_silero(path)


def test_without_onnxruntime_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(VadModelError, match=r"install duplane\[vad\]"):
        load_silero(tmp_path / "vad.onnx")
