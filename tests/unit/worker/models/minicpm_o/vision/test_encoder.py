"""The vision encoder: batching, positions, the resampler, and loading from a checkpoint."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.paths import GOLDEN
from torch import nn

from duplane.worker.models.minicpm_o.checkpoint import Checkpoint, CheckpointError
from duplane.worker.models.minicpm_o.types import PreparedImage
from duplane.worker.models.minicpm_o.vision.encoder import Vision
from duplane.worker.models.minicpm_o.vision.preprocessing import ImageRules
from duplane.worker.models.minicpm_o.vision.resampler import PackedAttention, Resampler
from duplane.worker.models.minicpm_o.vision.siglip import VisionConfig, position_indices

CHECKPOINT = GOLDEN / "checkpoint"
CPU = torch.device("cpu")
RULES = ImageRules(scale_resolution=112)
CONFIG = VisionConfig(
    width=32,
    ffn_width=48,
    layer_count=2,
    head_count=4,
    patch_size=14,
    positions_per_side=10,
    activation="gelu_pytorch_tanh",
    eps=1e-6,
    hidden=128,
    query_count=8,
    batch_size=4,
)


def fill(module: nn.Module, std: float = 0.2) -> None:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)


def build(config: VisionConfig = CONFIG, dtype: torch.dtype = torch.float32) -> Vision:
    vision = Vision(config, RULES, dtype=dtype)
    fill(vision)
    return vision.requires_grad_(False)


def picture(vision: Vision, width: int, height: int, slices: int = 1) -> PreparedImage:
    values = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return vision.prepare(file.getvalue(), slices)


VISION = build()


def test_an_image_gives_a_block_of_embeddings_per_tile() -> None:
    whole = picture(VISION, 100, 100)
    sliced = picture(VISION, 300, 200, 6)
    embeds = VISION.encode([whole, sliced])
    assert [tuple(rows.shape) for rows in embeds] == [(1, 8, 128), (7, 8, 128)]
    assert VISION.rows == 8
    assert VISION.encode([]) == []


SIZES = st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(1, 5))


@settings(max_examples=15, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_an_embedding_does_not_depend_on_the_other_images_of_the_batch(
    sizes: list[tuple[int, int, int]], chance: Any
) -> None:
    images = [picture(VISION, *size) for size in sizes]
    alone = [VISION.encode([image])[0] for image in images]
    order = list(range(len(images)))
    chance.shuffle(order)
    together = VISION.encode([images[index] for index in order])
    for index, rows in zip(order, together, strict=True):
        torch.testing.assert_close(rows, alone[index], atol=1e-5, rtol=0)


def test_batches_are_bounded_in_images_and_in_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    vision = build()
    seen = []
    whole = vision.vpm.forward
    monkeypatch.setattr(
        vision.vpm, "forward", lambda *args: (seen.append(args[0].shape[:2]), whole(*args))[1]
    )
    # A strip of 1500x1 has far more patches than a square of 100x100.
    strips = [picture(vision, 1500, 1) for _ in range(4)]
    vision.encode([*strips, *(picture(vision, 100, 100) for _ in range(6))])
    assert sum(count for count, _ in seen) == 10
    assert max(count for count, _ in seen) == CONFIG.batch_size
    assert all(
        count == 1 or count * patches <= 2 * CONFIG.batch_size * RULES.scaled_patches
        for count, patches in seen
    )


def test_the_embedding_depends_on_the_last_pixel() -> None:
    image = picture(VISION, 112, 112)
    before = VISION.encode([image])[0]
    changed = image.tiles[0].patches.copy()
    changed[-1, -1] ^= 0x80
    other = replace(image, tiles=(replace(image.tiles[0], patches=changed),))
    assert not torch.equal(VISION.encode([other])[0], before)


def test_the_embedding_depends_on_the_order_of_the_patches() -> None:
    image = picture(VISION, 112, 112)
    tile = image.tiles[0]
    swapped = np.roll(tile.patches, 1, axis=0)
    other = replace(image, tiles=(replace(tile, patches=swapped),))
    difference = VISION.encode([other])[0] - VISION.encode([image])[0]
    assert difference.abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(dtype: torch.dtype) -> None:
    half = build(dtype=dtype)
    images = [picture(VISION, 150, 90), picture(VISION, 60, 200, 2)]
    for want, got in zip(VISION.encode(images), half.encode(images), strict=True):
        assert got.dtype == dtype
        cosine = torch.cosine_similarity(got.float(), want, dim=-1)
        assert cosine.min() > 0.999


def test_pixels_are_normalised_per_channel() -> None:
    rules = replace(RULES, mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 0.25))
    vision = Vision(CONFIG, rules)
    pixels = torch.full((2, 3 * 14**2), 255, dtype=torch.uint8)
    rows = vision.normalize(pixels).view(2, 3, -1)
    assert rows.dtype == torch.float32
    assert torch.equal(rows[..., 0], torch.tensor([[1.0, 1.0, 0.0]] * 2))


# Positions


@given(st.integers(1, 300), st.integers(1, 70))
def test_patches_spread_evenly_over_the_position_table(count: int, per_side: int) -> None:
    indices = position_indices(1, count, per_side)
    assert len(indices) == count
    assert indices[0] == 0
    assert indices[-1] < per_side
    assert (indices.diff() >= 0).all()
    exact = torch.arange(count, dtype=torch.float64) * per_side / count
    assert (indices - exact.floor()).abs().max() <= 1


def test_an_image_as_large_as_the_table_uses_each_position_once() -> None:
    assert position_indices(8, 8, 8).tolist() == list(range(64))
    assert position_indices(2, 4, 8).tolist() == [0, 2, 4, 6, 32, 34, 36, 38]


# The resampler


@pytest.mark.parametrize("hidden", [128, 256])
def test_packed_attention_equals_torch_multi_head_attention(hidden: int) -> None:
    ours = PackedAttention(hidden, CPU, torch.float32)
    fill(ours, std=0.05)
    theirs = nn.MultiheadAttention(hidden, hidden // 128, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    queries, keys, values = torch.randn(4, hidden), *torch.randn(2, 3, 9, hidden)
    seen = torch.arange(9) < torch.tensor([[9], [4], [1]])
    want, _ = theirs(queries.expand(3, -1, -1), keys, values, key_padding_mask=~seen)
    got = ours(queries, keys, values, seen[:, None, None])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_states_as_wide_as_the_decoder_are_not_projected() -> None:
    same, other = (Resampler(4, 128, width, CPU, torch.float32) for width in (128, 96))
    assert "kv_proj.weight" not in same.state_dict()
    assert other.state_dict()["kv_proj.weight"].shape == (128, 96)


# Checkpoints


def checkpoint(tmp_path: Path, preprocessor: dict[str, Any], **config: Any) -> Checkpoint:
    """Copy the public checkpoint with changed configuration values."""
    for source in CHECKPOINT.iterdir():
        (tmp_path / source.name).symlink_to(source)
    for name, changes in (("config.json", config), ("preprocessor_config.json", preprocessor)):
        values = orjson.loads((CHECKPOINT / name).read_bytes()) | changes
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(orjson.dumps(values))
    return Checkpoint(tmp_path)


def load(source: Checkpoint) -> tuple[Vision, tuple[str, ...]]:
    vision = Vision.from_checkpoint(source)
    assert vision is not None
    return vision, vision.load(source)


def test_all_vision_tensors_of_a_checkpoint_are_used(tmp_path: Path) -> None:
    vision, unused = load(checkpoint(tmp_path, {}))
    assert unused == ()
    assert vision.marks.has_id


def test_a_dropped_last_layer_is_neither_built_nor_loaded(tmp_path: Path) -> None:
    vision, unused = load(checkpoint(tmp_path, {}, drop_vision_last_layer=True))
    assert len(vision.vpm.encoder.layers) == 1
    assert len(unused) == 16
    assert all(name.startswith("vpm.encoder.layers.1.") for name in unused)


def test_a_checkpoint_without_vision_builds_no_encoder(tmp_path: Path) -> None:
    assert Vision.from_checkpoint(checkpoint(tmp_path, {}, init_vision=False)) is None


def test_weights_of_a_wrong_shape_are_reported_by_name(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, {"image_feature_size": 32}, query_num=32)
    with pytest.raises(CheckpointError, match=r"resampler\.query has shape \[64, 128\]"):
        load(source)


@pytest.mark.parametrize(
    ("preprocessor", "config", "name"),
    [
        ({"image_feature_size": 32}, {}, "image_feature_size"),
        ({"patch_size": 16}, {}, "patch_size"),
        ({}, {"vision_config": {"num_channels": 1}}, "num_channels"),
        ({}, {"vision_config": {"hidden_size": 10, "num_attention_heads": 3}}, "num_attention"),
        ({}, {"vision_config": {"hidden_act": "swish"}}, "hidden_act"),
        ({}, {"vision_config": {"num_hidden_layers": 0}}, "layer_count"),
        ({}, {"vision_config": {"patch_size": 0}}, "patch_size"),
        ({}, {"vision_batch_size": 0}, "batch_size"),
        ({}, {"hidden_size": 98}, "hidden_size"),
    ],
)
def test_an_invalid_configuration_is_refused_with_the_name_of_the_field(
    tmp_path: Path, preprocessor: dict[str, Any], config: dict[str, Any], name: str
) -> None:
    with pytest.raises(CheckpointError, match=name):
        Vision.from_checkpoint(checkpoint(tmp_path, preprocessor, **config))
