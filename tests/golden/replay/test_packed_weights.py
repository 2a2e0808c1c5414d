"""The recorded sessions, with packed weights of all sizes."""

from __future__ import annotations

import pytest
import torch
from support.paths import GOLDEN

from duplane.tools.golden_replay import duplex
from duplane.tools.golden_replay.check import Verdict
from duplane.worker.models.minicpm_o import packing, proof


@pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this CPU has no FBGEMM"
)
def test_the_duplex_sessions_are_reproduced(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    reports: list[proof.ProofReport] = []
    monkeypatch.setattr(packing, "FEWEST_VALUES", 1)
    monkeypatch.setattr(proof, "reports", reports)
    for check in duplex.checks(GOLDEN):
        with subtests.test(check.name):
            assert check.verdict is not Verdict.FAIL, check.note
    packed = [report for report in reports if "packed" in report.kind]
    assert packed
    assert not any(report.faults for report in packed)
