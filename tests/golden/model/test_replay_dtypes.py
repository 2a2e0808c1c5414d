"""`checkpoint replay --dtype bfloat16`: a whole checkpoint passes, and one changed tensor fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import safetensors.torch
from support.paths import GOLDEN

from duplane.tools.golden_replay import audio, duplex, tts
from duplane.tools.golden_replay.run import Checks, replay_traces
from duplane.tools.golden_replay.target import ReplayTarget
from duplane.worker.models.minicpm_o.checkpoint import Checkpoint

pytestmark = pytest.mark.slow

PARTS: dict[str, Checks] = {
    "audio": audio.checks,
    "tts": tts.checks,
    "duplex": duplex.checks,
}
BFLOAT16 = ReplayTarget(dtype_name="bfloat16")


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Return a directory with one session and the traces of single parts."""
    for name in ("audio", "images", "units"):
        (tmp_path / name).symlink_to(GOLDEN / name)
    (tmp_path / "sessions").mkdir()
    for path in (GOLDEN / "sessions").glob("duplex_sampled.*"):
        (tmp_path / "sessions" / path.name).symlink_to(path)
    shutil.copytree(GOLDEN / "checkpoint", tmp_path / "checkpoint")
    return tmp_path


def enlarge(directory: Path, name: str) -> None:
    """Multiply one tensor of a checkpoint by 1.05."""
    for path in Checkpoint(directory).files:
        tensors = safetensors.torch.load_file(path)
        if name in tensors:
            tensors[name] = tensors[name] * 1.05
            safetensors.torch.save_file(tensors, path)
            return
    raise AssertionError(f"{name} is in no file")


def test_a_checkpoint_passes_in_bfloat16(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_traces(traces, PARTS, BFLOAT16) == 0
    output = capsys.readouterr().out
    assert "duplex_sampled own ids" in output
    assert "top8_logs" in output


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("audio", "apm.layers.1.fc1.weight"),
        ("tts", "tts.head_code.0.parametrizations.weight.original0"),
        ("duplex", "llm.model.layers.1.mlp.gate_proj.weight"),
    ],
)
def test_a_tensor_that_is_5_percent_too_large_fails(traces: Path, part: str, name: str) -> None:
    enlarge(traces / "checkpoint", name)
    assert replay_traces(traces, {part: PARTS[part]}, BFLOAT16) == 1
