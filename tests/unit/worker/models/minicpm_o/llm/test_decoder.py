from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model.decoders import QWEN
from support.model.pages import mix_pages
from torch import Tensor

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.llm import kv_cache
from duplane.worker.models.minicpm_o.llm.decoder import Decoder, DecoderConfig

PAGE_ROWS = 16
LLAMA = replace(QWEN, key_heads=6, head_dim=8, has_head_norm=False, rope_theta=10_000.0)


@pytest.fixture(scope="module", autouse=True)
def _short_pages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "PAGE_ROWS", PAGE_ROWS)
        yield


def build(
    config: DecoderConfig = QWEN, slots: int = 4, dtype: torch.dtype = torch.float32
) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config, slots, 64, torch.device("cpu"), dtype).requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return decoder


def states(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, 48, generator=torch.Generator().manual_seed(seed))


def run(decoder: Decoder, counts: list[tuple[int, int]], rows: Tensor) -> Tensor:
    return decoder(rows, decoder.cache.extend(counts))


@pytest.mark.parametrize("config", [QWEN, LLAMA])
def test_it_computes_what_the_published_architecture_computes(config: DecoderConfig) -> None:
    # Only this test needs them, and they import a thousand modules.
    from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

    dims: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "vocab_size": 1,
    }
    if config.has_head_norm:
        published: torch.nn.Module = Qwen3Model(Qwen3Config(**dims)).eval()
    else:
        published = LlamaModel(LlamaConfig(**dims)).eval()
    decoder = build(config)
    published.load_state_dict(decoder.state_dict(), strict=False)
    rows = states(1, 9)
    with torch.no_grad():
        expected = published(inputs_embeds=rows[None]).last_hidden_state[0]
    got = torch.cat([run(decoder, [(2, 4)], rows[:4]), run(decoder, [(2, 5)], rows[4:])])
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [QWEN, replace(QWEN, query_heads=2), LLAMA])
def test_slots_in_one_pass_do_not_see_each_other(config: DecoderConfig) -> None:
    counts = [[(0, 3), (1, 5), (3, 2)], [(0, 1), (1, 1), (2, 4), (3, 1)], [(0, 1), (1, 1), (2, 1)]]
    together, alone = build(config), build(config)
    for step, batch in enumerate(counts):
        inputs = {slot: states(10 * step + slot, rows) for slot, rows in batch}
        got = run(together, batch, torch.cat([inputs[slot] for slot, _ in batch]))
        single = torch.cat([run(alone, [(slot, rows)], inputs[slot]) for slot, rows in batch])
        torch.testing.assert_close(got, single, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(0, 63), min_size=1, max_size=9, unique=True).flatmap(
            lambda slots: st.tuples(
                *(st.tuples(st.just(slot), st.integers(1, 6)) for slot in sorted(slots))
            )
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_any_slots_of_64_in_one_pass_get_what_each_gets_alone(
    passes: list[tuple[tuple[int, int], ...]], are_mixed: bool
) -> None:
    together, alone = build(slots=64), build(slots=64)
    if are_mixed:
        mix_pages(together.cache)
    for number, batch in enumerate(passes):
        inputs = {slot: states(64 * number + slot, rows) for slot, rows in batch}
        got = run(together, list(batch), torch.cat(list(inputs.values())))
        single = [run(alone, [(slot, rows)], inputs[slot]) for slot, rows in batch]
        torch.testing.assert_close(got, torch.cat(single), atol=1e-5, rtol=1e-5)


def test_forgotten_rows_are_not_seen() -> None:
    decoder = build()
    run(decoder, [(0, 3)], states(1, 3))
    expected = run(decoder, [(0, 2)], states(2, 2))
    decoder.cache.truncate(0, 3)
    run(decoder, [(0, 5)], states(3, 5) * 100)
    decoder.cache.truncate(0, 3)
    assert torch.equal(run(decoder, [(0, 2)], states(2, 2)), expected)


def test_it_runs_in_half_precision() -> None:
    decoder = build(dtype=torch.bfloat16)
    rows = states(1, 6)
    got = run(decoder, [(0, 2), (1, 4)], rows.bfloat16())
    expected = run(build(), [(0, 2), (1, 4)], rows)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=0.15, rtol=0.1)


def test_configurations_that_cannot_be_are_refused() -> None:
    good = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 50000,
    }
    assert DecoderConfig.from_json(good, has_head_norm=True) == QWEN
    nested = {**good, "rope_theta": None, "rope_parameters": {"rope_theta": 50000.0}}
    assert DecoderConfig.from_json(nested, has_head_norm=True) == QWEN
    for change in (
        {"num_key_value_heads": 4},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"hidden_act": "gelu"},
        {"hidden_size": "48"},
        {"num_hidden_layers": None},
    ):
        with pytest.raises(CheckpointError):
            DecoderConfig.from_json({**good, **change}, has_head_norm=True)


@pytest.mark.parametrize(("source", "target"), [(2, 0), (3, 9), (5, 5)])
def test_a_key_that_was_moved_is_the_key_computed_there(source: int, target: int) -> None:
    here, there = build(), build()
    run(here, [(1, source)], states(1, source))
    run(here, [(1, 4)], states(2, 4))
    run(there, [(1, target)], states(3, target)) if target else None
    run(there, [(1, 4)], states(2, 4))
    here.move(1, source, target)
    assert here.cache.length(1) == target + 4
    # The earlier rows of the two contexts differ, so only the keys of the first layer are equal.
    ours, theirs = (one.cache.read(1)[0][0, :, target:] for one in (here, there))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
