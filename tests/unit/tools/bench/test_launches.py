"""`duplane bench launches`, and how many kernels the stages of the model may launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.model.decoders import QWEN
from support.paths import GOLDEN
from support.test_checkpoint.build import build_test_checkpoint
from support.tools.command import run_command
from torch import Tensor
from torch.nn import functional

from duplane.tools.bench.launches import LaunchCount, count_launches, load_padding, scattered
from duplane.tools.bench.stages import Stage, StageWatch
from duplane.worker.models.minicpm_o.duplex.sampling import DuplexSampling
from duplane.worker.models.minicpm_o.llm.decoder import Decoder
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import ConversationOptions

COUNTS = (1, 8, 64)
# The most launches in one call of a stage, by the number of conversations.
CEILINGS: dict[Stage | None, tuple[int, int, int]] = {
    Stage.MEL: (46, 46, 46),
    Stage.AUDIO: (42, 42, 42),
    Stage.VISION: (70, 100, 520),
    Stage.PREFILL: (44, 58, 205),  # a call launches a pass for each 512 rows
    Stage.DECODE: (98, 100, 110),
    Stage.TALKER: (2_350, 2_350, 2_350),
    Stage.FLOW: (420, 425, 430),
    Stage.HIFT: (560, 1_000, 1_500),  # a call launches each form of its chunks
    None: (8, 36, 260),
}
MOST_SCATTERED = 1.2
MOST_FOR_A_CHOICE = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    folder = tmp_path_factory.mktemp("tiny")
    build_test_checkpoint(folder)
    return load_padding(folder, 2 * max(COUNTS))


@pytest.fixture(scope="module")
def watch(model: DuplexModel) -> StageWatch:
    watch = StageWatch(model, torch.device("cpu"))
    count_launches(model, watch, [0])  # builds everything that is built only once
    return watch


def test_composed_operations_count_by_their_parts_and_views_not_at_all(watch: StageWatch) -> None:
    states = torch.ones(4, 8)
    weight = torch.ones(2, 8)
    bias = torch.ones(2)
    index = torch.tensor([1, 2])

    def attend(states: Tensor) -> Tensor:
        heads = states.view(1, 2, 4, 4)
        return functional.scaled_dot_product_attention(heads, heads, heads)

    for call, launches in (
        (lambda: states.view(8, 4).t()[1:], 0),
        (lambda: torch.empty(3), 0),
        (lambda: states + 1, 1),
        (lambda: functional.linear(states, weight, bias), 1),
        (lambda: attend(states), 1),
        (lambda: states[index], 1),
        (lambda: functional.normalize(states, dim=-1), 3),
    ):
        with torch.inference_mode(), LaunchCount(watch) as count:
            call()
        assert sum(count.launches.values()) == launches


def counted(call: Callable[[LaunchCount], object]) -> int:
    """Return the number of launches in a call."""
    outside: Any = SimpleNamespace(running=None)
    with torch.inference_mode(), LaunchCount(outside) as count:
        call(count)
    return sum(count.launches.values())


@pytest.mark.parametrize(("is_fused", "most"), [(False, 26), (True, 13)])
def test_a_layer_of_a_decoder_launches_few_kernels(is_fused: bool, most: int) -> None:
    launches: list[int] = []
    for layers in (1, 3):
        decoder = Decoder(replace(QWEN, layers=layers), 4, 64, torch.device("cpu"), torch.float32)

        def run(count: LaunchCount, decoder: Decoder = decoder) -> None:
            count.use_kernels(decoder, is_fused=is_fused)
            decoder(torch.ones(5, QWEN.hidden_size), decoder.cache.extend([(0, 2), (3, 3)]))

        launches.append(counted(run))
    assert (launches[1] - launches[0]) / 2 <= most


@pytest.mark.parametrize("listen_top_k", [None, 3])
def test_a_choice_launches_few_kernels_for_any_number_of_conversations(
    listen_top_k: int | None,
) -> None:
    tokens = Tokens.load(GOLDEN / "checkpoint")
    options = ConversationOptions(listen_top_k=listen_top_k)
    launches: set[int] = set()
    for count in (1, 8):
        sampling = DuplexSampling(tokens, len(tokens), count, torch.device("cpu"))
        slots = [sampling.open(slot, options, SeededUniforms(slot)) for slot in range(count)]
        logits = torch.randn(count, len(tokens), generator=torch.Generator().manual_seed(count))
        choose = partial(sampling.choose, slots, logits, [True] * count)
        choose()  # draws the random numbers of the next calls on the host
        launches.add(counted(lambda _, choose=choose: choose()))
    assert len(launches) == 1
    assert max(launches) <= MOST_FOR_A_CHOICE


@pytest.mark.slow
@pytest.mark.parametrize("at", range(len(COUNTS)), ids=map(str, COUNTS))
def test_no_stage_launches_more_than_it_may_wherever_its_slots_are(
    model: DuplexModel, watch: StageWatch, at: int
) -> None:
    near = count_launches(model, watch, range(COUNTS[at]))
    apart = count_launches(model, watch, scattered(COUNTS[at], model.slot_count))
    assert near.keys() == apart.keys() == CEILINGS.keys()
    for found in (near, apart):
        assert {s: n for s, n in found.items() if n > CEILINGS[s][at]} == {}
    assert {s: n / near[s] for s, n in apart.items() if n > MOST_SCATTERED * near[s]} == {}
    assert all(model.is_clean(slot) for slot in range(model.slot_count))


@pytest.mark.slow
def test_the_verb_shows_a_row_for_each_stage() -> None:
    code, output = run_command("bench", "launches", "--scale", "0.02", "--slots", "1,2")
    assert code == 0, output
    assert "2 scattered" in output
    rows = output.splitlines()
    for stage in (stage.value for stage in Stage if stage is not Stage.SETTLE):
        assert any(row.startswith(stage) for row in rows), output
