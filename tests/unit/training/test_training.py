"""Training computes the same as the worker, and an interrupted run leads to the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.training import fake_answers, fake_corpus, small_config
from torch import Tensor

from duplane.worker.models.minicpm_o.audio.encoder import AudioEncoder
from duplane.worker.models.minicpm_o.audio.whisper import AudioConfig
from duplane.worker.models.minicpm_o.llm.language_model import LanguageModel
from training.dimensions import PICTURE_ROWS, WINDOW_UNITS
from training.listener import processes
from training.listener.network import ListenerNetworks, run_decoder
from training.listener.starting import widened, with_new_layers
from training.listener.training import (
    WIDEST_MASK,
    ListenerPlan,
    ListenerTraining,
    mask_bands,
)
from training.optimisers import WEIGHT_DECAY
from training.torch_calls import load_tensors
from training.vision.scenes import COLOURS, SHAPES, Scene
from training.vision.tower import HEADS
from training.vision.views import PictureBank
from training.vocabulary import Vocabulary

UNITS = 6
PLAN = ListenerPlan(
    sound_steps=1,
    sound_batch=1,
    steps=3,
    word_share=1 / 3,
    short_share=1 / 3,
    short_batch=1,
    batch=1,
    warm_up=1,
    chats=1,
    noise_clips=1,
    is_mixed=False,
)
WIDER = {"d_model": 32, "encoder_attention_heads": 16, "encoder_ffn_dim": 128}
"""An audio encoder of twice the width of the small one."""
SCENES = [Scene(shape, colour, 1) for shape in SHAPES for colour in COLOURS]


@pytest.fixture(scope="module")
def config(vocabulary: Vocabulary) -> dict[str, Any]:
    return small_config(vocabulary)


@pytest.fixture(scope="module")
def bank(config: dict[str, Any]) -> PictureBank:
    chance = torch.Generator().manual_seed(6)
    shape = (len(SCENES), 2, PICTURE_ROWS, config["hidden_size"])
    return PictureBank(SCENES, torch.randn(shape, generator=chance))


@pytest.fixture
def networks(config: dict[str, Any]) -> ListenerNetworks:
    return ListenerNetworks.build(config, seed=3, batch=2)


@torch.no_grad()
def test_trained_encoder_is_the_served_encoder(
    networks: ListenerNetworks, config: dict[str, Any]
) -> None:
    """Six units cover the mel's start, fixed floor and dynamic floor, and a reset of the cache."""
    chance = np.random.default_rng(1)
    sound = (chance.standard_normal((2, UNITS * 16_000)) * 0.1).astype(np.float32)
    served = AudioEncoder(AudioConfig.from_json(config), 1)
    served.apm.load_state_dict(networks.audio.apm.state_dict())
    served.audio_projection_layer.load_state_dict(
        networks.audio.audio_projection_layer.state_dict()
    )
    rows: list[Tensor] = []
    for unit in range(UNITS):
        served.mel.push(0, sound[1, unit * 16_000 : (unit + 1) * 16_000])
        served.mel.take(0)
        rows.append(served.encode([0])[0])
    features, is_first = networks.features([sound[0], sound[1]])
    # Two more units complete the last window.
    features = torch.cat((features, features[:, :2]), 1)
    is_first = torch.cat((is_first, is_first[:, 2:4]), 1)
    _, trained = networks.encode(features, is_first, WINDOW_UNITS)
    torch.testing.assert_close(trained[1, : 10 * UNITS], torch.cat(rows), atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_trained_llm_is_the_served_llm(networks: ListenerNetworks, config: dict[str, Any]) -> None:
    served = LanguageModel(config, 1, 32, torch.device("cpu"), torch.float32)
    served.load_state_dict(networks.llm.state_dict())
    embeds = networks.llm.model.embed_tokens(torch.arange(24).view(2, 12))
    hidden, logits = served.feed([(0, 12)], embeds[1])
    trained = run_decoder(networks.llm.model, embeds)
    torch.testing.assert_close(trained[1, -1:], hidden, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(networks.llm.logits(trained[1, -1:]), logits, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_steps_in_bfloat16_change_the_weights_and_keep_them_finite(
    config: dict[str, Any], vocabulary: Vocabulary, bank: PictureBank, tmp_path: Path
) -> None:
    corpus = fake_corpus(tmp_path / "corpus")
    plan = replace(PLAN, is_mixed=True)
    path = tmp_path / "mixed.pt"
    training = ListenerTraining(config, vocabulary, corpus, fake_answers(), plan, bank, path)
    before = {name: value.clone() for name, value in training.networks.tensors()}
    training.run()
    after = dict(training.networks.tensors())
    assert all(value.isfinite().all() and value.dtype == torch.float32 for value in after.values())
    assert not torch.equal(after["llm.lm_head.weight"], before["llm.lm_head.weight"])


def test_each_number_of_steps_has_all_kinds_of_sessions() -> None:
    plan = ListenerPlan(steps=36)
    assert (plan.word_steps, plan.short_steps) == (15, 5)


def test_interrupted_run_continues_to_the_same_weights(
    config: dict[str, Any], vocabulary: Vocabulary, bank: PictureBank, tmp_path: Path
) -> None:
    corpus = fake_corpus(tmp_path / "corpus")
    answers = fake_answers()

    def training(name: str) -> ListenerTraining:
        return ListenerTraining(config, vocabulary, corpus, answers, PLAN, bank, tmp_path / name)

    whole = training("whole.pt")
    before = {name: value.clone() for name, value in whole.networks.tensors()}
    whole.run()
    first = training("parts.pt")
    first.run(stop_at=2)
    second = training("parts.pt")
    second.run()
    for (name, wanted), (_, found) in zip(
        whole.networks.tensors(), second.networks.tensors(), strict=True
    ):
        torch.testing.assert_close(found, wanted, msg=name)
    for name, wanted in whole.mean.items():
        torch.testing.assert_close(second.mean[name], wanted, msg=name)
    changed = [
        name for name, value in whole.networks.tensors() if not torch.equal(value, before[name])
    ]
    assert any("q_proj" in name for name in changed)
    assert any(name.startswith("apm.conv1") for name in changed)


def heads_in(path: Path) -> dict[str, Tensor]:
    return load_tensors(path)["modules"]["heads."]


def test_run_that_begins_with_weights_first_trains_only_its_output_layers(
    config: dict[str, Any], vocabulary: Vocabulary, bank: PictureBank, tmp_path: Path
) -> None:
    corpus, answers = fake_corpus(tmp_path / "corpus"), fake_answers()
    plan = replace(PLAN, head_steps=2, chats=8)
    start = dict(
        ListenerTraining(
            config, vocabulary, corpus, answers, replace(plan, seed=9), bank, tmp_path / "other.pt"
        ).networks.tensors()
    )
    training = ListenerTraining(
        config, vocabulary, corpus, answers, plan, bank, tmp_path / "state.pt"
    )
    training.networks.load(start)
    training.save()
    drawn = heads_in(tmp_path / "state.pt")
    training.run(stop_at=2)
    learned = heads_in(tmp_path / "state.pt")
    kinds = HEADS["kind"]
    colours = slice(kinds, kinds + HEADS["colour"])
    for name in ("phonemes.bias", "words.bias", "begins.bias"):
        assert not torch.equal(learned[name], drawn[name]), name
    moved = (learned["seen.output.1.bias"] - drawn["seen.output.1.bias"]).abs()
    # Only pictures have a colour. The decay alone moves a weight by less.
    assert moved[colours].min() > 10 * plan.rate * WEIGHT_DECAY
    for name, value in training.networks.tensors():
        assert torch.equal(value, start[name]), name
    training.run()
    assert any(not torch.equal(value, start[name]) for name, value in training.networks.tensors())


@torch.no_grad()
@pytest.mark.parametrize(
    ("size", "enlarged"),
    [
        ({"encoder_layers": 4}, with_new_layers),
        (WIDER, widened),
    ],
)
def test_a_larger_encoder_computes_the_same_at_first(
    config: dict[str, Any],
    networks: ListenerNetworks,
    size: dict[str, int],
    enlarged: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]],
) -> None:
    larger_config = config | {"audio_config": config["audio_config"] | size}
    larger = ListenerNetworks.build(larger_config, seed=8, batch=2)
    drawn = dict(larger.tensors())
    found = dict(networks.tensors())
    assert sum(one.numel() for one in drawn.values()) > sum(one.numel() for one in found.values())
    larger.load(enlarged(found, drawn))
    sound = (np.random.default_rng(2).standard_normal((1, 4 * 16_000)) * 0.1).astype(np.float32)
    features, is_first = networks.features([sound[0]])
    _, before = networks.encode(features, is_first, WINDOW_UNITS)
    _, after = larger.encode(features, is_first, WINDOW_UNITS)
    torch.testing.assert_close(after, before)


@torch.no_grad()
def test_equal_channels_of_a_wider_encoder_learn_different_things(
    config: dict[str, Any], networks: ListenerNetworks
) -> None:
    larger_config = config | {"audio_config": config["audio_config"] | WIDER}
    drawn = dict(ListenerNetworks.build(larger_config, seed=8, batch=2).tensors())
    made = widened(dict(networks.tensors()), drawn)["apm.layers.0.fc1.weight"]
    for first, second in (made.chunk(2, 0), made.chunk(2, 1)):
        assert (first - second).abs().min() > 0


def test_sessions_lack_bands_of_their_features() -> None:
    features = torch.randn((40, 2, 50, 80))
    masked = features.clone()
    mask_bands(masked, np.random.default_rng(1))
    is_masked = (masked != features).flatten(1, 2).any(1)
    counts = [int(session.sum()) for session in is_masked]
    assert 10 < counts.count(0) < 30
    assert 0 < max(counts) <= 2 * WIDEST_MASK
    for session, bands in zip(masked, is_masked, strict=True):
        if not bands.any():
            continue
        # Each band is constant; two bands that touch look like one.
        assert len(session[..., bands].unique()) <= 2


def test_each_process_is_called_with_its_own_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes are functions here: a wrong call of one would end it at once."""
    shares: list[tuple[int, int]] = []

    class Called:
        exitcode = 0

        def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
            shares.append(signature(target).bind(*args).arguments["share"])

        def start(self) -> None:
            pass

        def join(self) -> None:
            pass

    monkeypatch.setattr(processes, "get_context", lambda _: SimpleNamespace(Process=Called))
    monkeypatch.setattr(processes, "listener_tensors", lambda _: {})
    assert processes.train_listener(tmp_path, PLAN, 2) == {}
    assert shares == [(0, 2), (1, 2)]
