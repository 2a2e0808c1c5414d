"""The stage `vision`: trains the tower, and encodes pictures for the training that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.types import PreparedImage
from duplane.worker.models.minicpm_o.vision.encoder import Vision
from duplane.worker.models.minicpm_o.vision.preprocessing import ImageRules
from training.dimensions import PREPROCESSING
from training.torch_calls import digest_of
from training.vision.tower import SeenTile, TowerPlan, TowerTraining, augmented, draw_tiles
from training.vision.views import PictureBank

TOWER = "tower.pt"
RULES = ImageRules.from_json(PREPROCESSING)
JUDGED = 1000
EMBEDDING_LENGTH = 1.5
"""Length of a picture's embeddings. Those of tokens have a length of about 1.4; the LLM did not
learn to read embeddings that were 19 times as long."""
_LENGTH_PICTURES = 64
BANK_PICTURES, BANK_VARIANTS = 8000, 3
_GROUP = 64


def train_tower(
    workspace: Path,
    config: dict[str, Any],
    plan: TowerPlan,
    report: Callable[[str], None],
    start: Mapping[str, Tensor] | None = None,
) -> Vision:
    """Train the tower to the end, or load it. The next call continues from the saved state.

    `start` has the weights to begin with, otherwise they are random.

    The saved state has embeddings as long as training made them; those of the result are scaled.
    """
    training = TowerTraining(config, RULES, plan, workspace / TOWER, start)
    if training.step < plan.steps:
        report("drawing pictures")
        training.run(draw_tiles(plan.pictures, f"{plan.seed}", RULES))
        for name, is_held_out in (("", False), (" of pairs held out", True)):
            tiles = draw_tiles(JUDGED, f"{plan.seed} judged", RULES, held_out=is_held_out)
            right = training.evaluate(tiles)
            shown = "  ".join(f"{head} {share:.3f}" for head, share in right.items())
            report(f"vision, unseen pictures{name}: {shown}")
    scale_embeddings(training.vision, plan.seed)
    report(f"vision: digest {digest_of(training.vision.state_dict())}")
    return training.vision


@torch.no_grad()
def scale_embeddings(vision: Vision, seed: int) -> None:
    """Scale the embeddings of pictures to `EMBEDDING_LENGTH` on average."""
    lengths = encode_bank(vision, seed, _LENGTH_PICTURES, 1).embeds.square().sum(-1).sqrt()
    vision.resampler.proj.mul_(EMBEDDING_LENGTH / lengths.mean())


@torch.inference_mode()
def encode_bank(vision: Vision, seed: int, count: int, variants: int) -> PictureBank:
    """Draw pictures that the tower has not seen, and encode each in several lights."""
    chance = Random(f"{seed} bank lights")
    tiles = draw_tiles(count, f"{seed} bank", RULES)
    parts: list[Tensor] = []
    for start in range(0, count, _GROUP):
        group = tiles[start : start + _GROUP]
        images = [_image(augmented(one, chance)) for one in group for _ in range(variants)]
        rows = torch.cat(vision.encode(images))
        parts.append(rows.view(len(group), variants, *rows.shape[1:]).float())
    return PictureBank([one.scene for one in tiles], torch.cat(parts).clone())


def _image(seen: SeenTile) -> PreparedImage:
    return PreparedImage((seen.tile,), None, (0, 0))
