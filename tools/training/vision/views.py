"""Encoded pictures for the training of the LLM, and when a session shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from training.torch_calls import load_tensors, save_tensors
from training.vision.scenes import SHAPES, Scene

CHANGE_SHARE = 0.2
"""The probability that another picture begins in a unit."""
SPARSE_SHARE, LONGEST_GAP = 0.3, 4


@dataclass(frozen=True)
class PictureBank:
    """Encoded pictures: `embeds` [pictures, variants, rows, hidden]. Variants differ in light."""

    scenes: Sequence[Scene]
    embeds: Tensor

    def __len__(self) -> int:
        return len(self.scenes)


def save_bank(bank: PictureBank, path: Path, tower: str) -> None:
    """Write encoded pictures in half precision, and the digest of the tower that encoded them."""
    scenes = [astuple(scene) for scene in bank.scenes]
    save_tensors({"scenes": scenes, "embeds": bank.embeds.half(), "tower": tower}, path)


def tower_of(path: Path) -> str | None:
    """Return the digest of the tower that encoded the pictures of a file, if there is one."""
    return load_tensors(path).get("tower") if path.exists() else None


def load_bank(path: Path) -> PictureBank:
    """Read encoded pictures."""
    state = load_tensors(path)
    return PictureBank([Scene(*scene) for scene in state["scenes"]], state["embeds"].float())


def with_mixed_rows(bank: PictureBank, seed: int) -> PictureBank:
    """Return a bank of twice as many pictures: half of them have rows of different pictures.

    A row tells the kind, the colour, the count or the digit of a picture (`tower.HEADS`). Each is
    that of another picture: so the LLM must read it in its own row. It then reads pairs of a shape
    and a colour that training does not render. Rows of shapes and rows of digits are never mixed.
    """
    chance = Random(f"{seed} rows")
    shapes = [n for n, scene in enumerate(bank.scenes) if scene.shape in SHAPES]
    digits = [n for n, scene in enumerate(bank.scenes) if scene.digit >= 0]
    scenes, sources = list[Scene](), list[tuple[int, int, int, int]]()
    for _ in bank.scenes:
        group = digits if digits and chance.random() < len(digits) / len(bank) else shapes
        kind, colour, count, digit = (chance.choice(group) for _ in range(4))
        scenes.append(
            Scene(
                shape=bank.scenes[kind].shape,
                colour=bank.scenes[colour].colour,
                count=bank.scenes[count].count,
                digit=bank.scenes[digit].digit,
            )
        )
        sources.append((kind, colour, count, digit))
    rows = torch.tensor(sources)
    parts = [bank.embeds[rows[:, place], :, place] for place in range(bank.embeds.shape[2])]
    return PictureBank([*bank.scenes, *scenes], torch.cat((bank.embeds, torch.stack(parts, 2))))


@dataclass(frozen=True)
class View:
    """What a session shows: the number of a picture for each unit with a frame, otherwise -1."""

    frames: list[int] = field(default_factory=list[int])

    def seen(self, unit: int) -> int:
        """Return the number of the latest picture up to a unit; -1 if there was none."""
        return next((one for one in reversed(self.frames[: unit + 1]) if one >= 0), -1)

    def hides(self, unit: int) -> bool:
        """Return whether a context that begins with this unit lacks a picture that is seen."""
        return bool(self.frames) and self.frames[unit] < 0 and self.seen(unit) >= 0


def draw_view(chance: np.random.Generator, unit_count: int, picture_count: int) -> View:
    """Draw when a session shows which pictures.

    Most sessions have a frame in each unit; others have one in every few units, or a single one.
    """
    gap = 1
    if chance.random() < SPARSE_SHARE:
        gap = int(chance.integers(2, LONGEST_GAP + 1))
    is_single = gap > 1 and chance.random() < 0.3
    first = int(chance.integers(0, 4)) if gap > 1 else 0
    frames = [-1] * unit_count
    shown = int(chance.integers(picture_count))
    for unit in range(first, unit_count):
        if chance.random() < CHANGE_SHARE:
            shown = int(chance.integers(picture_count))
        if (unit - first) % gap == 0:
            frames[unit] = shown
            if is_single:
                break
    return View(frames)
