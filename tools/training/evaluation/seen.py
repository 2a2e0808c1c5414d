"""The rows about pictures: sessions with a frame in each unit, and typed chats with one picture.

Half of the pictures of shapes have a pair of shape and colour that training never renders. All
digits have fonts that it never uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import numpy as np

from training.evaluation.inputs import USUAL_PROMPT, ChatInput, Role, SessionInput
from training.evaluation.material import Material
from training.evaluation.tries import Row, Try, asked
from training.listener.sequences import typed
from training.vision.pictures import Picture, draw_picture, draw_scene
from training.vision.questions import BLIND, QUESTIONS, answer_about
from training.vision.scenes import DIGIT, NOTHING, Scene

_OTHER_UNITS = 2
"""The first units show another picture: the answer must be about the one that is seen."""


def _is_shape(scene: Scene) -> bool:
    return scene.shape not in (DIGIT, NOTHING)


def _is_digit(scene: Scene) -> bool:
    return scene.shape == DIGIT


def _draw(chance: Random, number: int, accepts: Callable[[Scene], bool]) -> Picture:
    while True:
        scene = draw_scene(chance, held_out=number % 2 == 0)
        if accepts(scene):
            return draw_picture(chance, scene, held_out=True)


def _session(kind: str, accepts: Callable[[Scene], bool]) -> Callable[..., Try]:
    """Ask about a picture in a session, with a voice that training lacks."""

    def draw(material: Material, number: int, chance: Random) -> Try:
        voice = material.voice("espeak", chance)
        picture, other = _draw(chance, number, accepts), _draw(chance, number + 1, _is_shape)
        answer = answer_about(kind, picture.scene)
        made = asked(kind, voice(chance.choice(QUESTIONS[kind])), (answer,), chance)
        pictures = (*[other.jpeg()] * _OTHER_UNITS, picture.jpeg())
        return replace(made, given=replace(made.given, pictures=pictures))

    return draw


def _blind(material: Material, number: int, chance: Random) -> Try:
    """Ask without a picture, or about a texture."""
    kind = chance.choice(list(QUESTIONS))
    voice = material.voice("espeak", chance)
    made = asked("no picture", voice(chance.choice(QUESTIONS[kind])), (BLIND,), chance)
    if number % 2:
        return made
    texture = draw_picture(chance, Scene(NOTHING, is_texture=True))
    return replace(made, label="texture", given=replace(made.given, pictures=(texture.jpeg(),)))


def _chat(material: Material, number: int, chance: Random) -> Try:
    del material
    kind = ("see", "see colour", "see count", "see shape", "see number")[number % 5]
    picture = _draw(chance, number, _is_digit if kind == "see number" else _is_shape)
    question = typed(chance.choice(QUESTIONS[kind]), chance)
    seed = chance.randrange(1 << 30)
    messages: tuple[tuple[Role, str], ...] = (("system", USUAL_PROMPT), ("user", question))
    return Try(
        kind,
        SessionInput(np.zeros(0, np.float32), seed),
        (answer_about(kind, picture.scene),),
        chat=ChatInput(messages, seed, picture=picture.jpeg()),
    )


def picture_rows() -> Iterator[Row]:
    """Yield the rows that need a model that sees."""
    yield Row("pictures: colours", "answers", _session("see colour", _is_shape))
    yield Row("pictures: shapes", "answers", _session("see shape", _is_shape))
    yield Row("pictures: counts", "answers", _session("see count", _is_shape))
    yield Row("pictures: all three", "answers", _session("see", _is_shape))
    yield Row("pictures: digits", "answers", _session("see number", _is_digit))
    yield Row("no picture, or a texture", "answers", _blind)
    yield Row("typed chats with pictures", "answers", _chat)
