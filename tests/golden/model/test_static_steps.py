"""Passes of fixed sizes meet the conditions of CUDA graphs; these tests run on a CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model.pages import mix_pages
from support.paths import GOLDEN
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from duplane.tools.bench.host_waits import SyncCount
from duplane.tools.bench.launches import attend_to_pages, decoders
from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.minicpm_o.llm.cuda_graphs import PassGraphs
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.tts.block import TalkBlock
from duplane.worker.models.types import ConversationOptions, DecodeMode, Unit, UnitOutput
from duplane.worker.settings import GPU_CONTEXT_SHARE

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 40 * UNIT)
SLOTS = 4
SAMPLED = ConversationOptions(force_listen_count=0, temperature=0.9, text_repetition_window_size=4)
GREEDY = replace(SAMPLED, decode_mode=DecodeMode.GREEDY)
# The slots that have a unit in each second: neighbours, gaps, and the last slot alone.
ROUNDS = ((0, 1, 2), (0,), (0, 1), (0, 2), (0,), (0, 1), (1, 3), (3,), (0, 1, 2, 3))


def load(checkpoint: Path, share: float = 1.0) -> DuplexModel:
    return DuplexModel.load(
        checkpoint, slot_count=SLOTS, context_capacity=1024, context_share=share
    )


@pytest.fixture(scope="module")
def static(speaking_checkpoint: Path) -> DuplexModel:
    """Return a model that uses a pass of fixed size wherever it can. Its pages are mixed."""
    model = load(speaking_checkpoint, GPU_CONTEXT_SHARE)
    for decoder in decoders(model):
        decoder.cache.kernel = attend_to_pages
        mix_pages(decoder.cache)
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


def block_of(model: DuplexModel) -> TalkBlock:
    """Return the passes of the talker with their inputs."""
    talker = model.parts.talker
    assert talker
    assert isinstance(talker.block, TalkBlock)
    return talker.block


def graphs(model: DuplexModel) -> dict[str, PassGraphs[Any]]:
    """Return the passes of LLM and talker, by name."""
    block = block_of(model)
    return {"llm": model.llm.graphs, "conditions": block._conditions, "steps": block._steps}


def test_passes_of_fixed_sizes_choose_what_others_choose(
    speaking_checkpoint: Path, static: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: set[tuple[str, int]] = set()
    for kind, found in graphs(static).items():
        for size, one in found._passes.items():

            def counted(launch: Any = one.launch, key: Any = (kind, size)) -> None:
                called.add(key)
                launch()

            monkeypatch.setattr(one, "launch", counted)
    assert play(static) == play(load(speaking_checkpoint))
    small = {("llm", 4), ("llm", 32), ("llm", 128), ("conditions", 32), ("steps", SLOTS)}
    assert small <= called


class Trace(TorchDispatchMode):
    """Records operations, shapes of their tensors, and the addresses of tensors in `staying`."""

    def __init__(self, staying: Sequence[Tensor]) -> None:
        super().__init__()
        self._kept = staying  # a result of an earlier run among them must not leave its address
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


def staying(model: DuplexModel, one: object) -> list[Tensor]:
    """Return the tensors whose addresses must be the same at capture and replay."""
    block = block_of(model)
    holders = (one, block, block.state)
    held = [value for each in holders for value in vars(each).values() if isinstance(value, Tensor)]
    for part in (model.llm, model.parts.talker):
        assert part
        held += [*part.parameters(), *part.buffers(), part.cache.keys, part.cache.values]
        held.append(part.cache.pages.table)
    return held


COUNTS = ([(0, 1), (1, 1), (3, 2)], [(2, 3)])
STARTS = ((0, 260, 7), (300,))


@pytest.mark.parametrize("part", ["llm", "conditions", "steps"])
@torch.inference_mode()
def test_a_pass_does_the_same_whatever_it_is_given_and_waits_for_nothing(
    static: DuplexModel, part: str
) -> None:
    _, one = min(graphs(static)[part]._passes.items())
    block = block_of(static)
    cache = static.llm.cache if part == "llm" else block.cache
    cache.grow([(slot, 512) for slot in range(SLOTS)])
    traces: list[list[tuple[Any, ...]]] = []
    for counts, starts in zip(COUNTS, STARTS, strict=True):
        if part == "llm":
            one.stage(counts, starts, [5] * sum(count for _, count in counts))
        else:
            rows = [(slot, 1) for slot, _ in counts] if part == "steps" else counts
            staged = block.step_numbers if part == "steps" else block.condition_numbers
            numbers = torch.as_tensor(one.form.numbers(rows, starts))
            staged[: len(numbers)] = numbers
            block.state.step.fill_(1 + len(traces))
        with SyncCount() as syncs, Trace(staying(static, one)) as trace:
            one.launch()
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
