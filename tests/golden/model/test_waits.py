"""The host rarely waits for the device, and not more often for many conversations than for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from support.paths import GOLDEN

from duplane.tools.bench.host_waits import SyncCount
from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.tts.sampling import TOKENS_PER_UNIT
from duplane.worker.models.minicpm_o.tts.talker import CHECK_STEPS
from duplane.worker.models.types import ConversationOptions, Unit, UnitOutput, WindowMode

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 12 * UNIT)
FRAME = (GOLDEN / "images" / "small.png").read_bytes()
OPTIONS = ConversationOptions(
    seed=0,
    force_listen_count=0,
    sliding_window_mode=WindowMode.CONTEXT,
    context_max_units=2,
)
# How often a call of each stage may wait: for chosen ids, for speech tokens or for samples.
ALLOWED = {
    "encode_tiles": 0,
    "encode_audio": 0,
    "choose": 1,
    "feed": 0,
    "speak": 1 + TOKENS_PER_UNIT // CHECK_STEPS,
    "encode": 0,
    "decode_mel": 1,
    "settle": 0,
}


def watched(model: DuplexModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list.

    Each later call of a stage adds its name and its number of waits to this list.
    """
    owners: Sequence[tuple[Any, Sequence[str]]] = (
        (model._pipeline.inputs, ("encode_tiles", "encode_audio")),
        (model.llm, ("feed",)),
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
        prepared = [model.preparer.unit(Unit(slot, audio, second == 3, frames)) for slot in slots]
        with ExitStack() as stack:
            syncs = stack.enter_context(SyncCount())
            outputs = list(model.step([unit for unit in prepared if isinstance(unit, Unit)]))
            model.settle(slots)
        assert all(isinstance(output, UnitOutput) for output in outputs)
        units += syncs.count
    assert {name for name, _ in seen} == set(ALLOWED)
    assert [(name, count) for name, count in seen if count > ALLOWED[name]] == []
    # The host waits only within the stages. Some stages are called within others.
    calls = Counter(name for name, _ in seen)
    assert units == sum(count for _, count in seen)
    assert calls["choose"] + calls["decode_mel"] <= units
