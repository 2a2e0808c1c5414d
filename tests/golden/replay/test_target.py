"""Replays traces on the fake CUDA device and in another dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.model.fake_cuda import DEVICE, elsewhere
from support.paths import GOLDEN

from duplane.tools.golden_replay.run import PARTS, replay_traces
from duplane.tools.golden_replay.target import ReplayTarget

SESSION = "duplex_short_chunks"


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the traces of the talker and of one short session."""
    directory = tmp_path_factory.mktemp("golden")
    for name in ("checkpoint", "audio", "images"):
        (directory / name).symlink_to(GOLDEN / name)
    for folder, stem in (("units", "tts"), ("sessions", SESSION)):
        (directory / folder).mkdir()
        for suffix in (".json", ".npz"):
            file = Path(folder, stem + suffix)
            (directory / file).symlink_to(GOLDEN / file)
    return directory


def test_the_traces_are_reproduced_on_a_device(
    golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with elsewhere() as border:
        code = replay_traces(golden, PARTS, ReplayTarget(DEVICE))
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, "\n".join(lines)
    assert border.crossings
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    checked = {line.split()[0] for line in lines[1:]}
    assert checked >= {"tts", SESSION}


def test_half_precision_runs_and_shows_that_it_is_not_float32(
    golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay_traces(golden, PARTS, ReplayTarget(dtype_name="bfloat16")) == 0
    assert " not float32" in capsys.readouterr().out
