"""`make evaluate` reports a failure of speech synthesis in one line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from support.tools.command import captured

from training.__main__ import run
from training.corpus.espeak import SynthesisError
from training.evaluation import table
from training.evaluation.scores import Rate


@contextlib.asynccontextmanager
async def fabric_runner(*_: object) -> AsyncGenerator[None]:
    """Act as the runner of a fabric: an error in the body is raised in a group."""
    async with asyncio.TaskGroup():
        yield


async def rows(*_: object) -> dict[str, object]:
    return {}


async def understood(*_: object) -> Rate:
    return Rate()


async def fails_while_the_fabric_runs(*_: object) -> Rate:
    raise SynthesisError("flite fails: no voice")


def fails(*_: object) -> Rate:
    raise SynthesisError("flite fails: no voice")


@pytest.mark.parametrize(
    ("name", "failing"),
    [("understood_sums", fails_while_the_fabric_runs), ("recognised", fails)],
    ids=["while the fabric runs", "after the fabric"],
)
def test_failure_of_speech_is_one_line(
    name: str, failing: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table.DuplexModel, "load", lambda *_, **__: None)
    for unused in ("SessionSource", "NoiseBank", "_corpus", "speak_answer"):
        monkeypatch.setattr(table, unused, lambda *_: None)
    monkeypatch.setattr(table, "all_answers", list)
    monkeypatch.setattr(table, "held_out_answers", list)
    monkeypatch.setattr(table, "fabric_runner", fabric_runner)
    monkeypatch.setattr(table, "_rows", rows)
    monkeypatch.setattr(table, "understood_sums", understood)
    monkeypatch.setattr(table, name, failing)
    code, output = captured(run, ("evaluate", str(tmp_path), "--through", "fabric"))
    assert code == 1, output
    assert "Traceback" not in output
    assert output.splitlines()[-1] == "duplane: flite fails: no voice"
