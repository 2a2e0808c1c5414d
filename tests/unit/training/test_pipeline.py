"""A workspace keeps the results of one plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.training import fake_corpus

from duplane.worker.checkpoints import DEFAULT_CHECKPOINT
from training.corpus.store import Corpus
from training.listener.processes import BANK, CORPUS
from training.pipeline import (
    TrainingPlan,
    digest_of_files,
    listener_plan,
    train_checkpoint,
    train_vision,
)
from training.torch_calls import load_weights


def test_a_stage_is_a_run_of_its_own_that_later_runs_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def record_clips(folder: Path, *_: object) -> None:
        made.append("clips")
        fake_corpus(folder, count=4)

    def record_mixture(folder: Path, *_: object, **__: object) -> None:
        made.append("corpus")
        fake_corpus(folder, count=12)

    monkeypatch.setattr("training.pipeline.record_clips", record_clips)
    monkeypatch.setattr("training.pipeline.record_mixture", record_mixture)
    monkeypatch.setattr("training.pipeline.NOISE_COUNT", 1)
    workspace, plan = tmp_path / "workspace", TrainingPlan()
    for _ in range(2):
        train_checkpoint(tmp_path / "made", workspace, plan, "corpus")
    assert made == ["clips", "corpus"]
    assert not (tmp_path / "made").exists()
    assert len(Corpus(workspace / CORPUS).noises) == 1  # voices; no rooms were named
    digest = digest_of_files(workspace / CORPUS)
    assert capsys.readouterr().err.count(f"corpus: digest {digest}\n") == 2


def test_weights_of_a_checkpoint_are_trained_at_lower_rates() -> None:
    fresh, continued = (listener_plan(TrainingPlan(start=start)) for start in (None, "made"))
    assert continued.rate < fresh.rate
    assert (fresh.head_steps, continued.steps) == (0, fresh.steps)


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


def test_a_checkpoint_keeps_its_tower_in_further_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.pipeline.BANK_PICTURES", 2)
    vision = train_vision(tmp_path, TrainingPlan(start=str(DEFAULT_CHECKPOINT), tower_steps=0))
    kept = load_weights(DEFAULT_CHECKPOINT / "model.safetensors")
    for name, value in vision.state_dict().items():
        assert torch.equal(value, kept[name].float()), name
    assert (tmp_path / BANK).exists()
