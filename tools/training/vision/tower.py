"""Trains the vision tower to tell what a picture shows: its shape, colour, count and digit.

The tower is the worker's own module; it gets the tiles that the worker's preparation makes. Heads
that exist only in training read the mean of a tile's embeddings.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.models.minicpm_o.types import ImageTile
from duplane.worker.models.minicpm_o.vision.encoder import Vision
from duplane.worker.models.minicpm_o.vision.preprocessing import ImageRules, prepare_picture
from duplane.worker.models.minicpm_o.vision.siglip import VisionConfig
from training.domain import DIGITS
from training.listener.network import draw_weights
from training.optimisers import Optimisers
from training.torch_calls import mixed_precision, seed_all
from training.vision.pictures import (
    COLOURS,
    DIGIT,
    MOST_OBJECTS,
    NOTHING,
    SHAPES,
    Scene,
    draw_picture,
)

KINDS = (NOTHING, DIGIT, *SHAPES)
IGNORED = -100
REPORT_INTERVAL = 50


@dataclass(frozen=True)
class TowerPlan:
    """The length and the learning rates of the tower's training."""

    seed: int = 1
    pictures: int = 8000
    steps: int = 2500
    batch: int = 48
    rate: float = 1.5e-3
    matrix_rate: float = 2.5e-3
    warm_up: int = 40
    decay_share: float = 0.5


@dataclass(frozen=True)
class SeenTile:
    """A tile and what it shows."""

    scene: Scene
    tile: ImageTile


def labels(scene: Scene) -> tuple[int, int, int, int]:
    """Return the numbers of kind, colour, count and digit; IGNORED for those that do not exist."""
    kind = KINDS.index(scene.shape)
    if scene.shape == NOTHING:
        return kind, IGNORED, 0, IGNORED
    colour = list(COLOURS).index(scene.colour)
    digit = scene.digit if scene.digit >= 0 else IGNORED
    return kind, colour, scene.count if digit == IGNORED else IGNORED, digit


def draw_tiles(count: int, seed: int, rules: ImageRules) -> list[SeenTile]:
    """Draw pictures and prepare them as the worker does."""
    made: list[SeenTile] = []
    for number in range(count):
        picture = draw_picture(Random(f"{seed} picture {number}"))
        made.append(SeenTile(picture.scene, prepare_picture(rules, picture.image, 1).tiles[0]))
    return made


class TowerTraining:
    """One training run."""

    def __init__(self, config: dict[str, Any], rules: ImageRules, plan: TowerPlan) -> None:
        seed_all(plan.seed)
        self.plan, self.rules = plan, rules
        self.vision = Vision(VisionConfig.from_json(config), rules)
        draw_weights(self.vision, plan.seed)
        hidden = config["hidden_size"]
        sizes = {
            "kind": len(KINDS),
            "colour": len(COLOURS),
            "count": MOST_OBJECTS + 1,
            "digit": len(DIGITS),
        }
        self._heads = nn.ModuleDict({name: nn.Linear(hidden, n) for name, n in sizes.items()})
        found = [*self.vision.parameters()]
        tables = {id(self.vision.vpm.embeddings.position_embedding.weight)}
        matrices = [t for t in found if t.dim() == 2 and id(t) not in tables]
        chosen = {id(t) for t in matrices}
        others = [t for t in found if id(t) not in chosen] + list(self._heads.parameters())
        self._optimisers = Optimisers(
            matrices, others, rate=plan.rate, matrix_rate=plan.matrix_rate
        )

    def run(self, tiles: Sequence[SeenTile], *, report: bool = True) -> None:
        """Train on random batches of `tiles`."""
        plan = self.plan
        chance = Random(f"{plan.seed} tower")
        mean = 0.0
        began = time.process_time()
        for step in range(plan.steps):
            batch = [augmented(chance.choice(tiles), chance) for _ in range(plan.batch)]
            remaining = (plan.steps - step) / max(1.0, plan.decay_share * plan.steps)
            factor = min(1.0, (step + 1) / plan.warm_up, remaining)
            loss = self._loss(batch)
            self._optimisers.step(loss, factor)
            mean = 0.95 * mean + 0.05 * loss.item() if step else loss.item()
            if report and (step + 1) % REPORT_INTERVAL == 0:
                spent = time.process_time() - began
                sys.stderr.write(f"vision {step + 1}/{plan.steps}  {spent:.0f} s  {mean:.3f}\n")

    def _logits(self, tiles: Sequence[ImageTile]) -> dict[str, Tensor]:
        with mixed_precision(is_allowed=True):
            embeds = self.vision.encode_tiles(tiles)
        mean = embeds.float().mean(1)
        return {name: head(mean) for name, head in self._heads.items()}

    def _loss(self, batch: Sequence[SeenTile]) -> Tensor:
        targets = torch.tensor([labels(one.scene) for one in batch])
        logits = self._logits([one.tile for one in batch])
        losses = [
            functional.cross_entropy(own, targets[:, n], ignore_index=IGNORED, reduction="sum")
            for n, own in enumerate(logits.values())
        ]
        return torch.stack(losses).sum() / len(batch)

    @torch.no_grad()
    def evaluate(self, tiles: Sequence[SeenTile]) -> dict[str, float]:
        """Return the share of right kinds, colours, counts and digits."""
        right: dict[str, list[bool]] = {name: [] for name in self._heads}
        for start in range(0, len(tiles), self.plan.batch):
            batch = tiles[start : start + self.plan.batch]
            targets = torch.tensor([labels(one.scene) for one in batch])
            for n, (name, own) in enumerate(self._logits([one.tile for one in batch]).items()):
                is_target = targets[:, n] != IGNORED
                hits = own.argmax(-1)[is_target] == targets[:, n][is_target]
                right[name] += [bool(hit) for hit in hits]
        return {name: sum(hits) / max(1, len(hits)) for name, hits in right.items()}


def augmented(seen: SeenTile, chance: Random) -> SeenTile:
    """Change the light of a tile, and mirror it if it shows no digit."""
    tile = seen.tile
    pixels: NDArray[np.float32] = tile.patches.astype(np.float32)
    pixels = pixels * chance.uniform(0.88, 1.12) + chance.uniform(-8, 8)
    patches = pixels.clip(0, 255).astype(np.uint8)
    if seen.scene.digit < 0:
        size = round((patches.shape[1] / 3) ** 0.5)
        grid = patches.reshape(tile.rows, tile.columns, 3, size, size)
        if chance.random() < 0.5:
            grid = grid[:, ::-1, :, :, ::-1]
        if chance.random() < 0.5:
            grid = grid[::-1, :, :, ::-1, :]
        patches = np.ascontiguousarray(grid).reshape(patches.shape)
    return SeenTile(seen.scene, ImageTile(patches, tile.rows, tile.columns))


def save(training: TowerTraining, path: Path) -> None:
    """Write the tower's weights with their names in the checkpoint."""
    torch.save(training.vision.state_dict(), path)
