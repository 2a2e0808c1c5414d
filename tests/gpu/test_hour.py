"""The stages of the first hour use no operation that the device refuses.

The lanes of `contention` and the device thread of `crowd` have threads of their own, on which the
fake device does not exist: `tests/unit/tools/test_hour.py` runs these stages on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from device_hour import environment, exact, host
from device_hour.results import Results
from device_hour.session import Options, Session
from device_hour.smoke import smoke

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def session(speaking_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Return a session of small sizes with a model on the device.

    The model has no graphs, because captures are slow on the fake device: see `test_graphs.py`.
    """
    out = tmp_path_factory.mktemp("hour")
    options = Options(out, speaking_checkpoint, dtype="float32", rehearses=True)
    session = Session(options, Results(out), probe=exact.LogitsProbe())
    session.loaded(captures=False).is_captured = True
    return session


def test_the_load_is_measured(session: Session) -> None:
    found = environment.load(session, captures=False, warms_up=False)
    assert found["memory_gb"]["free"] > 0
    assert found["tensors_gb"] == pytest.approx(found["planned_gb"], rel=0.05)
    assert not found["torch_after"]["cudnn_attention"]
    assert replace(session, options=replace(session.options, rehearses=False)).fitting()[1] > 0


@pytest.mark.parametrize("stage", [smoke, host.host, exact.company])
def test_a_stage(
    stage: Callable[[Session], object], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "LAUNCHES", 2)
    assert stage(session)
