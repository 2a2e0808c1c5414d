"""What a picture can show, and which pairs of a shape and a colour only the evaluation renders."""

from __future__ import annotations

from dataclasses import dataclass

COLOURS = ("red", "green", "blue", "yellow", "black", "white")
SHAPES = ("circle", "square", "triangle", "star", "cross")
PLURALS = ("circles", "squares", "triangles", "stars", "crosses")
MOST_OBJECTS = 5
NOTHING, DIGIT = "nothing", "digit"
HELD_OUT_PAIRS = (
    ("circle", "green"),
    ("square", "yellow"),
    ("triangle", "black"),
    ("star", "blue"),
    ("cross", "red"),
)
"""Shapes that are rendered in these colours only for the evaluation."""


@dataclass(frozen=True)
class Scene:
    """What a picture shows: `count` objects of a shape, or `digit`, in a colour; or nothing.

    `shape` is one of `SHAPES`, `DIGIT` or `NOTHING`. `digit` is -1 if the picture has none. A
    picture of nothing is plain, or `is_texture`.
    """

    shape: str
    colour: str = ""
    count: int = 0
    digit: int = -1
    is_texture: bool = False


def is_held_out(scene: Scene) -> bool:
    """Return whether only the evaluation renders a scene."""
    return (scene.shape, scene.colour) in HELD_OUT_PAIRS
