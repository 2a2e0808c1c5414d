"""`duplane bench model` measures every stage and counts no work twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.model.blind import blind_checkpoint
from support.test_checkpoint.build import build_test_checkpoint
from support.tools.command import run_command

from duplane.tools.bench.peaks import measure_peaks
from duplane.tools.bench.stages import Stage, StageWatch, moved_bytes
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import ConversationOptions, Unit, UnitFailure, UnitOutput

pytestmark = pytest.mark.slow

STAGES = (
    *("mel", "audio encoder", "vision", "prefill", "decode step"),
    *("talker", "flow", "HiFT"),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_test_checkpoint(folder)
    return folder


def test_a_random_model_is_measured_stage_by_stage_for_every_batch_size() -> None:
    flags = ["--scale", "0.02", "--slots", "1,2", "--units", "2"]
    code, output = run_command("bench", "model", *flags)
    assert code == 0, output
    tables = output.split("conversations at once")
    assert len(tables) == 3
    for table in tables[1:]:
        assert "2 listening, 2 seeing, 2 speaking units" in table
        rows = [line for line in table.splitlines() if line.startswith(STAGES)]
        assert [row[: len(stage)] for row, stage in zip(rows, STAGES, strict=True)] == [*STAGES]
    assert "after the last was closed" in output


def test_contexts_of_several_lengths_are_measured() -> None:
    flags = ["--scale", "0.02", "--slots", "1", "--units", "1", "--frames", "0"]
    code, output = run_command("bench", "model", *flags, "--context", "300,9000")
    assert code == 0, output
    read: list[float] = []
    for context, table in zip(
        (300, 9000), output.split("1 conversations at once, ")[1:], strict=True
    ):
        assert table.startswith(f"context {context}, ms (1 listening, 1 speaking units)")
        row = next(line for line in table.splitlines() if line.startswith("decode step"))
        read.append(float(row.split()[4]))
    assert read[1] > 2 * read[0], "a step reads the rows of the context"


def test_a_trained_model_without_vision_is_measured(tmp_path: Path) -> None:
    flags = ["--checkpoint", str(blind_checkpoint(tmp_path)), "--slots", "1", "--units", "1"]
    code, output = run_command("bench", "model", *flags)
    assert code == 0, output
    assert "1 listening, 0 speaking units" in output, "the default model answers no noise"


def test_what_cannot_be_measured_is_refused_in_one_line(tmp_path: Path) -> None:
    for flags in (["--slots", "1,x"], ["--like", "gpt"], ["--checkpoint", str(tmp_path)]):
        code, output = run_command("bench", "model", *flags)
        assert code == 2
        assert output.startswith("duplane: ")


def test_stages_do_not_count_what_is_within_them_twice(checkpoint: Path) -> None:
    model = DuplexModel.load(checkpoint, slot_count=2, context_capacity=256)
    watch = StageWatch(model, torch.device("cpu"))
    for slot in range(2):
        model.open(slot, ConversationOptions(seed=0, force_listen_count=0))
    outputs: list[UnitOutput | UnitFailure] = []
    while not any(isinstance(o, UnitOutput) and not o.is_listen for o in outputs):
        watch.clear()
        outputs = list(model.step([Unit(s, np.ones(16000, np.float32)) for s in range(2)]))
        model.settle([0, 1])
    assert watch.calls[Stage.MEL] == watch.calls[Stage.AUDIO] == watch.calls[Stage.PREFILL] == 1
    assert watch.calls[Stage.DECODE] > 1
    laps = next(o.stage_s for o in outputs if isinstance(o, UnitOutput))
    assert watch.seconds[Stage.MEL] + watch.seconds[Stage.AUDIO] <= laps["audio"]
    assert watch.seconds[Stage.FLOW] + watch.seconds[Stage.HIFT] <= laps["vocoder"]
    moved = moved_bytes(model, 2)
    assert moved[Stage.PREFILL] > moved[Stage.SETTLE] > 0


def test_each_call_of_a_stage_is_listed_with_its_size_until_the_watch_is_removed(
    checkpoint: Path,
) -> None:
    model = DuplexModel.load(checkpoint, slot_count=2, context_capacity=256)
    watch = StageWatch(model, torch.device("cpu"))
    for slot in range(2):
        model.open(slot, ConversationOptions(seed=0))
    watch.clear()
    units = [Unit(slot, np.ones(16000, np.float32), force_listen=True) for slot in range(2)]
    list(model.step(units))
    calls = {call.stage: call for call in watch.timed}
    assert calls[Stage.MEL].size == calls[Stage.AUDIO].size == 2
    assert calls[Stage.PREFILL].size == 2 * (1 + model.parts.audio.unit_rows)
    assert calls[Stage.PREFILL].seconds == watch.seconds[Stage.PREFILL]
    inner_s = watch.seconds[Stage.MEL]
    assert calls[Stage.AUDIO].seconds == pytest.approx(watch.seconds[Stage.AUDIO] + inner_s)
    model.settle([0, 1])
    watch.clear()
    watch.remove()
    list(model.step(units))
    assert watch.timed == []


def test_operations_are_counted_while_asked_for(checkpoint: Path) -> None:
    model = DuplexModel.load(checkpoint, slot_count=1, context_capacity=256)
    watch = StageWatch(model, torch.device("cpu"))
    model.open(0, ConversationOptions(seed=0))
    assert not watch.flops
    watch.is_counting = True
    list(model.step([Unit(0, np.ones(16000, np.float32))]))
    weights = sum(p.numel() for p in model.llm.parameters()) - model.llm.vocabulary * 128 * 2
    rows = model.parts.audio.unit_rows + 1
    head = 2 * model.llm.vocabulary * 128
    assert watch.flops[Stage.PREFILL] == pytest.approx(2 * weights * rows + head, rel=0.1)


def test_a_devices_peaks_are_measured() -> None:
    peaks = measure_peaks(torch.device("cpu"), {torch.float32})
    assert peaks.bytes_per_s > 1e8
    assert peaks.flops_per_s[torch.float32] > 1e8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("device", "why"), [("cuda:0", "is not there"), ("gpu", "must be cpu or")])
def test_a_device_that_is_not_there_is_told_in_a_line(device: str, why: str) -> None:
    code, output = run_command("bench", "model", "--device", device)
    assert code == 2
    assert output.count("\n") == 1
    assert f"device {device}" in output or repr(device) in output
    assert why in output
