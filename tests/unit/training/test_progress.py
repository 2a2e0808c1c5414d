"""What a training run reports and keeps while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training.progress import Progress
from training.torch_calls import load_tensors, save_tensors


def test_means_are_printed_at_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("stage", 8, interval=2, memory=0.5, spent_s=1000.0)
    for step, loss in enumerate((4.0, 2.0, 1.0), start=1):
        progress.note(step, {"text": torch.tensor(loss)})
    first, *more = capsys.readouterr().err.splitlines()
    assert first.startswith("stage 2/8  10")
    assert first.endswith(" s  text 3.000")
    assert not more
    assert progress.spent_s >= 1000.0


def test_a_write_that_fails_leaves_the_state_before(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    save_tensors({"step": 1}, path)
    with pytest.raises(AttributeError):
        save_tensors({"step": lambda: 2}, path)  # cannot be written
    assert load_tensors(path) == {"step": 1}
