"""The recorded traces on a CUDA device, in float32, with and without CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from support.paths import GOLDEN

from duplane.tools.golden_replay.run import PARTS, replay_traces
from duplane.tools.golden_replay.target import ReplayTarget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_the_traces_are_reproduced(cuda_graphs: bool, capsys: pytest.CaptureFixture[str]) -> None:
    target = ReplayTarget("cuda:0", cuda_graphs=cuda_graphs)
    assert replay_traces(GOLDEN, PARTS, target) == 0, capsys.readouterr().out
