"""Trains the vision tower to tell what a picture shows: its shape, colour, count and digit.

The tower is the worker's own module; it gets the tiles that the worker's preparation makes. Heads
that exist only in training read its results: one head for each of a tile's embeddings, and heads
for what each patch shows. The renderer knows where it drew an object, so every patch has a target:
with targets of whole pictures only, a transformer needs many times the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from training.optimisers import Optimisers, rate_factor
from training.progress import Progress
from training.torch_calls import load_tensors, mixed_precision, save_tensors, seed_all, tensor_of
from training.vision.pictures import Picture, draw_picture
from training.vision.scenes import COLOURS, DIGIT, MOST_OBJECTS, NOTHING, SHAPES, Scene

KINDS = (NOTHING, DIGIT, *SHAPES)
HEADS = {
    "kind": len(KINDS),
    "colour": len(COLOURS),
    "count": MOST_OBJECTS + 1,
    "digit": len(DIGITS),
}
"""The heads of a tile's embeddings, in their order: embedding n has head n."""
PATCH_KINDS = 1 + len(SHAPES) + len(DIGITS)
PATCH_HEADS = {"kind": PATCH_KINDS, "colour": len(COLOURS), "centre": 2}
PATCH_WEIGHT = 0.5
RECOLOURED_SHARE = 0.6
IGNORED = -100
REPORT_INTERVAL, SAVE_INTERVAL = 50, 200


@dataclass(frozen=True)
class TowerPlan:
    """The length and the learning rates of the tower's training."""

    seed: int = 1
    pictures: int = 48_000
    steps: int = 1600
    batch: int = 48
    rate: float = 1.5e-3
    matrix_rate: float = 2.5e-3
    warm_up: int = 40
    decay_share: float = 0.6
    is_mixed: bool = True


@dataclass(frozen=True)
class SeenTile:
    """A tile and what it shows. `targets` [patches, 3] has kind, colour and centre of each patch.

    A colour is IGNORED where the patch shows no object.
    """

    scene: Scene
    tile: ImageTile
    targets: NDArray[np.int8]
    has_colour: bool = True


def labels(scene: Scene, *, has_colour: bool = True) -> tuple[int, int, int, int]:
    """Return the numbers of kind, colour, count and digit; IGNORED for those that do not exist."""
    kind = KINDS.index(scene.shape)
    if scene.shape == NOTHING:
        return kind, IGNORED, 0, IGNORED
    colour = COLOURS.index(scene.colour) if has_colour else IGNORED
    return kind, colour, scene.count, scene.digit if scene.digit >= 0 else IGNORED


def patch_targets(picture: Picture, rows: int, columns: int) -> NDArray[np.int8]:
    """Return what each patch of a scaled picture shows, by the place of its middle."""
    scene = picture.scene
    made = np.zeros((rows * columns, len(PATCH_HEADS)), np.int8)
    made[:, 1] = IGNORED
    if scene.shape == NOTHING:
        return made
    width, height = picture.image.size
    across = (np.arange(columns) + 0.5) * width / columns
    down = (np.arange(rows) + 0.5) * height / rows
    kind = 1 + (len(SHAPES) + scene.digit if scene.digit >= 0 else SHAPES.index(scene.shape))
    for mark in picture.marks:
        far = np.hypot(across[None, :] - mark.x, down[:, None] - mark.y).ravel()
        inside = far < 0.8 * mark.radius
        inside[far.argmin()] = True
        made[inside, 0] = kind
        made[inside, 1] = COLOURS.index(scene.colour)
        made[far.argmin(), 2] = 1
    return made


def seen_tile(picture: Picture, rules: ImageRules) -> SeenTile:
    """Prepare a picture as the worker does."""
    tile = prepare_picture(rules, picture.image, 1).tiles[0]
    return SeenTile(picture.scene, tile, patch_targets(picture, tile.rows, tile.columns))


def draw_tiles(
    count: int, seed: str, rules: ImageRules, *, held_out: bool | None = False
) -> list[SeenTile]:
    """Draw pictures and prepare them."""
    return [
        seen_tile(draw_picture(Random(f"{seed} picture {number}"), held_out=held_out), rules)
        for number in range(count)
    ]


class TowerTraining:
    """One training run. It begins with the state in the file `path`, if there is one.

    It saves its state to this file.
    """

    def __init__(
        self,
        config: dict[str, Any],
        rules: ImageRules,
        plan: TowerPlan,
        path: Path | None = None,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`start` has the weights of a trained tower, otherwise they are random."""
        seed_all(plan.seed)
        self.plan, self._path = plan, path
        self.step = 0
        self.vision = Vision(VisionConfig.from_json(config), rules)
        if start is None:
            draw_weights(self.vision, plan.seed)
        else:
            self.vision.load_state_dict(start)
        vision = self.vision.config
        self._heads = nn.ModuleDict(
            {name: nn.Linear(vision.hidden, size) for name, size in HEADS.items()}
        )
        self._patches = nn.Linear(vision.width, sum(PATCH_HEADS.values()))
        self._states = torch.zeros(0)
        self.vision.vpm.register_forward_hook(self._keep_states)
        self._optimisers = Optimisers(
            self.vision.parameters(),
            tables=[
                self.vision.vpm.embeddings.position_embedding.weight,
                self.vision.resampler.query,
            ],
            added=[*self._heads.parameters(), *self._patches.parameters()],
            rate=plan.rate,
            matrix_rate=plan.matrix_rate,
            is_mixed=plan.is_mixed,
        )
        if path is not None and path.exists():
            self._resume(path)

    def _keep_states(self, module: nn.Module, inputs: object, states: Tensor) -> None:
        del module, inputs
        self._states = states

    @property
    def _modules(self) -> dict[str, nn.Module]:
        return {"vision": self.vision, "heads": self._heads, "patches": self._patches}

    def run(self, tiles: Sequence[SeenTile], *, stop_at: int | None = None) -> None:
        """Train on random batches of `tiles` to the end, or to step `stop_at`."""
        plan = self.plan
        progress = Progress("vision", plan.steps, interval=REPORT_INTERVAL, memory=0.95)
        last = plan.steps if stop_at is None else stop_at
        while self.step < last:
            chance = Random(f"{plan.seed} tower {self.step}")
            batch = [self._draw(tiles, chance) for _ in range(plan.batch)]
            losses = self._losses(batch)
            factor = rate_factor(
                self.step, plan.steps, warm_up=plan.warm_up, decay_share=plan.decay_share
            )
            self._optimisers.step(torch.stack([*losses.values()]).sum(), factor)
            self.step += 1
            progress.note(self.step, losses)
            if self.step % SAVE_INTERVAL == 0 or self.step == last:
                self.save()

    def _draw(self, tiles: Sequence[SeenTile], chance: Random) -> SeenTile:
        drawn = augmented(chance.choice(tiles), chance)
        return recoloured(drawn, chance) if chance.random() < RECOLOURED_SHARE else drawn

    def _logits(self, tiles: Sequence[ImageTile]) -> dict[str, Tensor]:
        with mixed_precision(is_allowed=self.plan.is_mixed):
            embeds = self.vision.encode_tiles(tiles)
        return {
            name: head(embeds[:, number].float())
            for number, (name, head) in enumerate(self._heads.items())
        }

    def _losses(self, batch: Sequence[SeenTile]) -> dict[str, Tensor]:
        targets = torch.tensor([labels(one.scene, has_colour=one.has_colour) for one in batch])
        logits = self._logits([one.tile for one in batch])
        losses = {
            name: functional.cross_entropy(
                own, targets[:, n], ignore_index=IGNORED, reduction="sum"
            )
            / len(batch)
            for n, (name, own) in enumerate(logits.items())
        }
        losses["patches"] = PATCH_WEIGHT * self._patch_loss(batch)
        return losses

    def _patch_loss(self, batch: Sequence[SeenTile]) -> Tensor:
        rows = [states[: len(one.targets)] for states, one in zip(self._states, batch, strict=True)]
        logits = self._patches(torch.cat(rows).float())
        targets = tensor_of(np.concatenate([one.targets for one in batch])).long()
        parts = torch.split_with_sizes(logits, [*PATCH_HEADS.values()], 1)
        losses = [
            functional.cross_entropy(part, targets[:, n], ignore_index=IGNORED, reduction="sum")
            for n, part in enumerate(parts)
        ]
        is_object = targets[:, 0] > 0
        return torch.stack(losses).sum() / is_object.sum().clamp(min=1)

    @torch.no_grad()
    def evaluate(self, tiles: Sequence[SeenTile]) -> dict[str, float]:
        """Return the share of right kinds, colours, counts and digits."""
        right: dict[str, list[bool]] = {name: [] for name in self._heads}
        for start in range(0, len(tiles), self.plan.batch):
            batch = tiles[start : start + self.plan.batch]
            targets = torch.tensor([labels(one.scene, has_colour=one.has_colour) for one in batch])
            for n, (name, own) in enumerate(self._logits([one.tile for one in batch]).items()):
                is_target = targets[:, n] != IGNORED
                hits = own.argmax(-1)[is_target] == targets[:, n][is_target]
                right[name] += [bool(hit) for hit in hits]
        return {name: sum(hits) / max(1, len(hits)) for name, hits in right.items()}

    def save(self) -> None:
        """Write the state of the run, if it has a file."""
        if self._path is None:
            return
        modules = {name: module.state_dict() for name, module in self._modules.items()}
        optimisers = self._optimisers.state_dict()
        save_tensors({"step": self.step, "optimisers": optimisers, **modules}, self._path)

    def _resume(self, path: Path) -> None:
        state = load_tensors(path)
        self.step = state["step"]
        for name, module in self._modules.items():
            module.load_state_dict(state[name])
        self._optimisers.load_state_dict(state["optimisers"])


def augmented(seen: SeenTile, chance: Random) -> SeenTile:
    """Change the light of a tile, and mirror it if it shows no digit."""
    tile = seen.tile
    shift, scale = chance.uniform(-10, 10), chance.uniform(0.88, 1.12)
    table = (np.arange(256) * scale + shift).clip(0, 255).astype(np.uint8)
    patches, targets = table[tile.patches], seen.targets
    if seen.scene.digit < 0:
        grid = _grid(patches, tile)
        shown = targets.reshape(tile.rows, tile.columns, -1)
        if chance.random() < 0.5:
            grid, shown = grid[:, ::-1, :, :, ::-1], shown[:, ::-1]
        if chance.random() < 0.5:
            grid, shown = grid[::-1, :, :, ::-1, :], shown[::-1]
        patches = np.ascontiguousarray(grid).reshape(patches.shape)
        targets = np.ascontiguousarray(shown).reshape(targets.shape)
    return replace(seen, tile=ImageTile(patches, tile.rows, tile.columns), targets=targets)


def recoloured(seen: SeenTile, chance: Random) -> SeenTile:
    """Exchange the colour channels of a tile. It loses its colour as a target.

    So a shape can occur in any colour: otherwise the tower would guess it from the colour.
    """
    tile, targets = seen.tile, seen.targets.copy()
    order = chance.sample(range(3), 3)
    patches = np.ascontiguousarray(_grid(tile.patches, tile)[:, :, order])
    targets[:, 1] = IGNORED
    tile = ImageTile(patches.reshape(tile.patches.shape), tile.rows, tile.columns)
    return SeenTile(seen.scene, tile, targets, has_colour=False)


def _grid(patches: NDArray[np.uint8], tile: ImageTile) -> NDArray[np.uint8]:
    """Return pixels as [rows, columns, channels, lines, pixels]."""
    size = round((patches.shape[1] / 3) ** 0.5)
    return patches.reshape(tile.rows, tile.columns, 3, size, size)
