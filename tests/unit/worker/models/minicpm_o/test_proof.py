"""A fast path serves only if it agrees with the plain path where it runs."""

from __future__ import annotations

import logging

import pytest
import torch

from duplane.worker.models.minicpm_o.proof import Proofs, relative_error, reports


def fail(error: Exception) -> float:
    raise error


def test_what_agrees_serves_and_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    proofs = Proofs("kernels of the LLM")
    with caplog.at_level(logging.DEBUG):
        assert proofs.accepts("sum", lambda: 0.01, 0.01)
        proofs.report()
    assert not caplog.records


def test_one_line_says_what_is_switched_off_and_why(caplog: pytest.LogCaptureFixture) -> None:
    proofs = Proofs("kernels of the LLM")
    assert not proofs.accepts("sum", lambda: 0.25, 0.01)
    assert proofs.accepts("product", lambda: 0.0, 0.01)
    assert not proofs.accepts("norm", lambda: fail(ImportError("no module\nmore lines")), 0.01)
    assert not proofs.accepts("silu", lambda: fail(NotImplementedError()), 0.01)
    proofs.report()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "3 of 4 kernels of the LLM are switched off, which costs speed: sum: differs by 0.25, "
        "0.01 is allowed; norm: no module; silu: NotImplementedError"
    )


def test_a_report_has_the_error_of_what_serves_and_the_fault_of_what_does_not() -> None:
    proofs = Proofs("graphs of a test")
    proofs.accepts("small", lambda: 0.0, 0.01)
    proofs.accepts("large", lambda: 0.25, 0.01)
    proofs.report()
    assert reports[-1].kind == "graphs of a test"
    assert reports[-1].errors == {"small": 0.0}
    assert reports[-1].faults == {"large": "differs by 0.25, 0.01 is allowed"}


def test_the_error_of_a_lost_device_is_no_reason_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fail(lost))
    with pytest.raises(torch.AcceleratorError):
        Proofs("graphs").accepts("step", lambda: fail(lost), 0.01)


def test_what_the_device_does_not_support_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    refused = torch.AcceleratorError("CUDA error: operation not permitted in a capture\nmore lines")
    proofs = Proofs("graphs")
    assert not proofs.accepts("step", lambda: fail(refused), 0.01)
    proofs.report()
    assert caplog.messages == [
        "1 of 1 graphs are switched off, which costs speed: step: "
        "CUDA error: operation not permitted in a capture"
    ]


def test_the_error_is_a_share_of_the_largest_value_and_nan_is_infinite() -> None:
    plain = torch.tensor([-4.0, 1.0])
    right, wrong = (plain, plain), (torch.tensor([-4.0, 1.2]), plain)
    assert relative_error([right]) == 0.0
    assert relative_error([right, wrong]) == pytest.approx(0.05)
    for bad in (torch.tensor([float("nan"), 1.0]), torch.tensor([float("inf"), 1.0])):
        assert relative_error([(bad, plain), right]) == float("inf")
    assert relative_error([(plain, torch.full((2,), float("nan")))]) == float("inf")
