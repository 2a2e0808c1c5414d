"""Steps of fixed sizes meet the conditions of CUDA graphs; these tests run on a CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.model.pages import mix_pages
from support.paths import GOLDEN
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from duplane.tools.bench.host_waits import SyncCount
from duplane.tools.bench.launches import attend_to_pages, caches
from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import ConversationOptions, DecodeMode, Unit, UnitOutput

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 40 * UNIT)
SLOTS = 4
SAMPLED = ConversationOptions(force_listen_count=0, temperature=0.9, text_repetition_window_size=4)
GREEDY = replace(SAMPLED, decode_mode=DecodeMode.GREEDY)
# The slots that have a unit in each second: neighbours, gaps, and the last slot alone.
ROUNDS = ((0, 1, 2), (0,), (0, 1), (0, 2), (0,), (0, 1), (1, 3), (3,), (0, 1, 2, 3))


def load(checkpoint: Path) -> DuplexModel:
    return DuplexModel.load(checkpoint, slot_count=SLOTS, context_capacity=1024)


@pytest.fixture(scope="module")
def static(speaking_checkpoint: Path) -> DuplexModel:
    """Return a model that uses a step of fixed size wherever it can. Its pages are mixed."""
    model = load(speaking_checkpoint)
    for cache in caches(model):
        cache.kernel = attend_to_pages
        mix_pages(cache)
    model.capture(is_replayed=False)
    return model


def play(model: DuplexModel) -> dict[int, list[tuple[Any, ...]]]:
    for slot in range(SLOTS):
        model.open(slot, replace(GREEDY if slot == 1 else SAMPLED, seed=slot))
    said: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for second, slots in enumerate(ROUNDS):
        audio = TALK[(3 + second) * UNIT :][:UNIT]
        for output in model.step([Unit(slot, audio) for slot in slots]):
            assert isinstance(output, UnitOutput)
            spoken = (output.audio_token_count, len(output.audio), output.context_length)
            said[output.slot].append((output.token_ids, *spoken))
        model.settle(slots)
    for slot in range(SLOTS):
        model.close(slot)
        assert model.is_clean(slot)
    return said


def test_steps_of_fixed_sizes_choose_what_others_choose(
    speaking_checkpoint: Path, static: DuplexModel
) -> None:
    called: list[str] = []
    for kind, found in (("llm", static.llm.graphs), ("talker", static.parts.talker.graphs)):  # type: ignore[union-attr]  has graphs
        assert found
        for size, (step, run) in found._steps.items():

            def counted(run: Any = run, kind: str = kind, size: Any = size) -> None:
                called.append(f"{kind} {size}")
                run()

            cast("Any", found)._steps[size] = (step, counted)
    assert play(static) == play(load(speaking_checkpoint))
    assert set(called) == {f"{kind} {width}" for kind in ("llm", "talker") for width in (1, 2, 4)}


class Trace(TorchDispatchMode):
    """Records operations, shapes of their tensors, and the addresses of tensors in `staying`."""

    def __init__(self, staying: Sequence[Tensor]) -> None:
        super().__init__()
        self._staying = {tensor.untyped_storage().data_ptr() for tensor in staying}
        self.done: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.done.append((str(func), *(self._seen(value) for value in args)))
        return func(*args, **(kwargs or {}))

    def _seen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            place = value.untyped_storage().data_ptr()
            return value.shape, value.dtype, place if place in self._staying else None
        if isinstance(value, list | tuple):
            return tuple(self._seen(part) for part in value)
        return value


def staying(model: DuplexModel, step: object) -> list[Tensor]:
    """Return the tensors whose addresses must be the same at capture and replay."""
    held = [value for value in vars(step).values() if isinstance(value, Tensor)]
    for part in (model.llm, model.parts.talker):
        assert part
        held += [*part.parameters(), *part.buffers(), part.cache.keys, part.cache.values]
        held.append(part.cache.pages.table)
    return held


@pytest.mark.parametrize("part", ["llm", "talker"])
@torch.inference_mode()
def test_a_step_does_the_same_whatever_it_is_given_and_waits_for_nothing(
    static: DuplexModel, part: str
) -> None:
    found = static.llm.graphs if part == "llm" else static.parts.talker.graphs  # type: ignore[union-attr]  has graphs
    assert found
    width, (step, _) = max(found._steps.items())
    assert width == SLOTS
    static_rows = step.rows if part == "llm" else step.static  # type: ignore[union-attr]  has graphs
    cache = static_rows._cache
    cache.grow([(slot, cache.capacity - 200) for slot in range(SLOTS)])
    traces: list[list[tuple[Any, ...]]] = []
    for slots, positions in ((range(SLOTS), (0, 3, 7, cache.capacity - 205)), ((2,), (300,))):
        static_rows.begin(slots, positions)
        if part == "llm":
            step.embeds.normal_()  # type: ignore[union-attr]  has graphs
        else:
            step._step.fill_(1 + len(traces))  # type: ignore[union-attr]  has graphs
        with SyncCount() as syncs, Trace(staying(static, step)) as trace:
            step.run()
        assert syncs.count == 0
        traces.append(trace.done)
    assert traces[0] == traces[1]
    assert sum("linear" in entry[0] for entry in traces[0]) > 5
    for slot in range(SLOTS):
        static.close(slot)
        assert static.is_clean(slot)


def test_who_does_not_take_part_is_not_touched(static: DuplexModel) -> None:
    for slot in range(SLOTS):
        static.open(slot, replace(SAMPLED, seed=slot))
    cache = static.llm.cache
    before = cache.read(1)[0].clone()
    list(static.step([Unit(slot, TALK[:UNIT]) for slot in (0, 2)]))
    static.settle([0, 2])
    assert torch.equal(cache.read(1)[0], before)
    for slot in range(SLOTS):
        static.close(slot)
        assert static.is_clean(slot)
