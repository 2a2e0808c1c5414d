"""A workspace keeps the results of one plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.pipeline import TrainingPlan, train_checkpoint


def test_workspace_of_another_plan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr("training.pipeline.record_clips", stop)
    for _ in range(2):  # the same plan may continue
        with pytest.raises(InterruptedError):
            train_checkpoint(tmp_path / "made", tmp_path, TrainingPlan(seed=5))
    with pytest.raises(RuntimeError, match="has other settings; use another workspace"):
        train_checkpoint(tmp_path / "made", tmp_path, TrainingPlan(seed=6))
