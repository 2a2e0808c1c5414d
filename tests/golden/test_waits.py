"""The host waits for the device as often for many conversations as for one, and seldom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from duplane.tools.bench.syncs import SyncCount
from duplane.tools.replay.audio import read_audio
from duplane.worker.model.model import DuplexModel
from duplane.worker.model.speech_steps import STEPS
from duplane.worker.model.talker import LOOK_STEPS
from duplane.worker.model.types import ConversationOptions, UnitInput, UnitOutput, WindowMode

PUBLIC = Path(__file__).parent / "public"
UNIT = 16_000
TALK = read_audio(PUBLIC / "audio" / "talk.wav", 12 * UNIT)
FRAME = (PUBLIC / "images" / "small.png").read_bytes()
OPTIONS = ConversationOptions(
    seed=0,
    force_listen_count=0,
    sliding_window_mode=WindowMode.CONTEXT,
    context_max_units=2,
)
# How often one call of a stage may wait: for the choices, for the tokens, for the samples.
ALLOWED = {
    "see": 0,
    "listen": 0,
    "feed_units": 0,
    "choose": 1,
    "feed": 0,
    "speak": 1 + (STEPS - 1) // LOOK_STEPS,
    "encode": 0,
    "decode_mel": 1,
    "settle": 0,
}


def watched(model: DuplexModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The stages' calls from now on, each with how often it waited."""
    owners: Sequence[tuple[Any, Sequence[str]]] = (
        (model._pipeline.intake, ("see", "listen")),
        (model.llm, ("feed_units", "feed")),
        (model.sampling, ("choose",)),
        (model.parts.talker, ("speak",)),
        (model.parts.vocoder, ("encode", "decode_mel")),
        (model, ("settle",)),
    )
    seen: list[tuple[str, int]] = []
    for owner, names in owners:
        for name in names:
            call = getattr(owner, name)

            def counted(*arguments: Any, call: Any = call, name: str = name) -> Any:
                with SyncCount() as syncs:
                    result = call(*arguments)
                seen.append((name, syncs.count))
                return result

            monkeypatch.setattr(owner, name, counted)
    return seen


@pytest.mark.parametrize("slots", [(0,), (0, 1, 2), (1, 3)])
def test_no_stage_waits_more_often_than_its_results_need(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch, slots: tuple[int, ...]
) -> None:
    for slot in slots:
        model.open(slot, OPTIONS)
    seen = watched(model, monkeypatch)
    units = 0
    for second in range(5):
        frames = (FRAME,) if second % 2 else ()
        audio = TALK[second * UNIT :][:UNIT]
        prepared = [model.prepare(UnitInput(slot, audio, second == 3, frames)) for slot in slots]
        with ExitStack() as stack:
            syncs = stack.enter_context(SyncCount())
            outputs = list(model.step([unit for unit in prepared if isinstance(unit, UnitInput)]))
            model.settle(slots)
        assert all(isinstance(output, UnitOutput) for output in outputs)
        units += syncs.count
    assert {name for name, _ in seen} == set(ALLOWED)
    assert [(name, count) for name, count in seen if count > ALLOWED[name]] == []
    # Nothing waits outside of the stages; some of these calls are within another one.
    calls = Counter(name for name, _ in seen)
    assert units == sum(count for _, count in seen)
    assert calls["choose"] + calls["decode_mel"] <= units
