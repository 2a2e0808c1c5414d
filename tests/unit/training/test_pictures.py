"""Pictures of training and of the evaluation differ, and training knows what each patch shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from training.torch_calls import digest_of
from training.vision import pictures, stage
from training.vision.pictures import FONT_STRIDE, draw_picture, draw_scene, fonts
from training.vision.questions import BLIND, QUESTIONS, answer_about, seen_answers
from training.vision.scenes import COLOURS, DIGIT, HELD_OUT_PAIRS, NOTHING, SHAPES, Scene
from training.vision.stage import RULES, encode_bank
from training.vision.tower import (
    IGNORED,
    SeenTile,
    TowerPlan,
    TowerTraining,
    augmented,
    draw_tiles,
    labels,
    recoloured,
    seen_tile,
)
from training.vision.views import PictureBank, View, draw_view, with_mixed_rows

PLAN = TowerPlan(pictures=8, steps=3, batch=2, warm_up=1, is_mixed=False)
CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "query_num": 4,
    "drop_vision_last_layer": False,
    "vision_config": {
        "hidden_size": 8,
        "image_size": 112,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "patch_size": 14,
    },
}


@pytest.fixture(scope="module")
def tiles() -> list[SeenTile]:
    return draw_tiles(PLAN.pictures, "test", RULES)


def test_only_the_evaluation_renders_held_out_pairs_of_shape_and_colour() -> None:
    chance = Random(1)
    trained = {(one.shape, one.colour) for one in (draw_scene(chance) for _ in range(3000))}
    judged = [draw_scene(chance, held_out=True) for _ in range(300)]
    shapes = {(one.shape, one.colour) for one in judged if one.shape in SHAPES}
    assert shapes == set(HELD_OUT_PAIRS)
    assert not trained & shapes
    assert {colour for _, colour in trained} == {*COLOURS, ""}
    assert {shape for shape, _ in trained} == {*SHAPES, DIGIT, NOTHING}


def test_no_font_is_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "FONT_FOLDERS", (str(tmp_path),))
    for number in range(FONT_STRIDE + 1):
        (tmp_path / f"DejaVu{number}.ttf").touch()
    judging, trained = (fonts.__wrapped__(held_out=side) for side in (True, False))
    assert len(judging) == 1
    assert len(trained) == FONT_STRIDE
    assert not set(judging) & set(trained)


def test_same_seed_draws_the_same_picture() -> None:
    first, second, other = (draw_picture(Random(seed)) for seed in (3, 3, 4))
    assert first.jpeg() == second.jpeg()
    assert first.scene == second.scene
    assert first.jpeg() != other.jpeg()


def test_targets_of_patches_are_where_the_objects_are() -> None:
    """A mirrored tile has mirrored targets; the patches of an object have its colour."""
    picture = draw_picture(Random(5), Scene("square", "red", 3))
    seen = seen_tile(picture, RULES)
    assert seen.targets[:, 2].sum() == 3
    inside = seen.targets[:, 1] == COLOURS.index("red")
    assert inside.sum() >= 3
    for number in range(8):
        changed = augmented(seen, Random(number))
        red = _redness(changed)
        is_object = changed.targets[:, 0] > 0
        assert red[is_object].mean() > red[~is_object].mean() + 20


def _redness(seen: SeenTile) -> np.ndarray[Any, np.dtype[np.float64]]:
    channels = seen.tile.patches.reshape(len(seen.tile.patches), 3, -1).astype(float).mean(-1)
    return channels[:, 0] - channels[:, 1:].mean(-1)


def test_tile_of_exchanged_colours_has_no_colour_to_learn(tiles: list[SeenTile]) -> None:
    changed = recoloured(tiles[0], Random(1))
    assert labels(changed.scene, has_colour=changed.has_colour)[1] == IGNORED
    assert (changed.targets[:, 1] == IGNORED).all()
    assert (
        np.sort(changed.tile.patches, None).tobytes()
        == np.sort(tiles[0].tile.patches, None).tobytes()
    )


def test_interrupted_run_continues_to_the_same_weights(
    tiles: list[SeenTile], tmp_path: Path
) -> None:
    whole = TowerTraining(CONFIG, RULES, PLAN, tmp_path / "whole.pt")
    before = digest_of(whole.vision.state_dict())
    whole.run(tiles)
    TowerTraining(CONFIG, RULES, PLAN, tmp_path / "parts.pt").run(tiles, stop_at=1)
    second = TowerTraining(CONFIG, RULES, PLAN, tmp_path / "parts.pt")
    assert second.step == 1
    second.run(tiles)
    found = second.vision.state_dict()
    for name, wanted in whole.vision.state_dict().items():
        torch.testing.assert_close(found[name], wanted, msg=name)
    assert digest_of(whole.vision.state_dict()) != before
    assert set(whole.evaluate(tiles)) == {"kind", "colour", "count", "digit"}


def test_trained_tower_is_trained_further(tiles: list[SeenTile]) -> None:
    first = TowerTraining(CONFIG, RULES, replace(PLAN, seed=2))
    further = TowerTraining(CONFIG, RULES, PLAN, start=first.vision.state_dict())
    begun = digest_of(first.vision.state_dict())
    assert digest_of(further.vision.state_dict()) == begun
    further.run(tiles, stop_at=1)
    assert digest_of(further.vision.state_dict()) != begun == digest_of(first.vision.state_dict())


@pytest.mark.slow
def test_pictures_have_embeddings_of_the_same_length_in_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "JUDGED", 4)
    lines: list[str] = []
    made = [stage.train_tower(tmp_path, CONFIG, PLAN, lines.append) for _ in range(2)]
    digests = [line for line in lines if "digest" in line]
    assert digests == [digests[0]] * 2
    for vision in made:
        lengths = encode_bank(vision, 2, count=32, variants=1).embeds.square().sum(-1).sqrt()
        assert lengths.mean().item() == pytest.approx(stage.EMBEDDING_LENGTH, rel=0.2)
    raw = TowerTraining(CONFIG, RULES, PLAN, tmp_path / stage.TOWER).vision
    assert not torch.equal(raw.resampler.proj, made[0].resampler.proj)


def test_bank_has_what_the_worker_encodes(tiles: list[SeenTile]) -> None:
    vision = TowerTraining(CONFIG, RULES, PLAN).vision
    bank = encode_bank(vision, 1, count=3, variants=2)
    assert bank.embeds.shape == (3, 2, 4, 16)
    own = draw_tiles(3, "1 bank", RULES)
    assert [one.scene for one in own] == list(bank.scenes)
    with torch.inference_mode():
        chance = Random("1 bank lights")
        first = vision.encode_tiles([augmented(own[0], chance).tile])
    torch.testing.assert_close(bank.embeds[0, 0], first[0], atol=1e-4, rtol=1e-3)


def test_mixed_rows_show_what_their_pictures_show() -> None:
    """Each row of these pictures names the property that it stands for, and its picture."""
    scenes = [draw_scene(Random(number)) for number in range(60)]
    targets = torch.tensor([labels(scene) for scene in scenes]).float()
    sources = torch.arange(60.0)[:, None].expand_as(targets)
    bank = PictureBank(scenes, torch.stack((targets, sources), -1)[:, None].expand(-1, 2, -1, -1))
    mixed = with_mixed_rows(bank, 1)
    assert list(mixed.scenes[:60]) == scenes
    assert torch.equal(mixed.embeds[:60], bank.embeds)
    for scene, rows in zip(mixed.scenes[60:], mixed.embeds[60:], strict=True):
        # A picture without a digit has no label for it: any row may tell the digit.
        wanted = [one for one in labels(scene) if one != IGNORED]
        assert rows[0, : len(wanted), 0].tolist() == wanted
        assert scene.shape != NOTHING
    assert any(len(set(rows[0, :, 1].tolist())) == 4 for rows in mixed.embeds[60:])
    assert any(one.digit >= 0 for one in mixed.scenes[60:])
    assert any((one.shape, one.colour) in HELD_OUT_PAIRS for one in mixed.scenes[60:])


@pytest.mark.parametrize(
    ("kind", "scene", "answer"),
    [
        ("see", Scene("circle", "red", 1), "a red circle"),
        ("see", Scene("cross", "blue", 3), "three blue crosses"),
        ("see", Scene(DIGIT, "blue", 1, 7), "the number seven"),
        ("see", Scene(NOTHING, is_texture=True), BLIND),
        ("see", None, BLIND),
        ("see colour", Scene("star", "white", 2), "white"),
        ("see count", Scene("star", "white", 2), "two"),
        ("see number", Scene(DIGIT, "white", 1, 0), "zero"),
        ("see number", Scene("star", "white", 2), "i see no number"),
        ("see shape", Scene("star", "white", 2), "stars"),
        ("see shape", Scene("star", "white", 1), "a star"),
    ],
)
def test_answers_are_about_the_picture(kind: str, scene: Scene | None, answer: str) -> None:
    assert answer_about(kind, scene) == answer
    assert answer in seen_answers()


def test_each_wording_belongs_to_one_kind_of_question() -> None:
    asked = [wording for wordings in QUESTIONS.values() for wording in wordings]
    assert len(asked) == len(set(asked))


def test_latest_frame_is_what_a_session_sees() -> None:
    view = View([-1, 4, -1, 2, -1])
    assert [view.seen(unit) for unit in range(5)] == [-1, 4, 4, 2, 2]
    assert [view.hides(unit) for unit in range(5)] == [False, False, True, False, True]
    assert not View().hides(2)
    assert View().seen(2) == -1


def test_views_have_known_pictures_and_some_gaps() -> None:
    drawn = [draw_view(np.random.default_rng(seed), 8, 5) for seed in range(60)]
    assert all(len(one.frames) == 8 and max(one.frames) < 5 for one in drawn)
    assert all(one.seen(7) >= 0 for one in drawn)
    assert any(-1 in one.frames for one in drawn)
    assert any(-1 not in one.frames for one in drawn)
