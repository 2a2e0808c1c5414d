"""The questions about pictures, and their answers."""

from __future__ import annotations

from random import Random

from training.number_words import DIGITS, NUMBERS
from training.vision.scenes import (
    COLOURS,
    DIGIT,
    MOST_OBJECTS,
    NOTHING,
    PLURALS,
    SHAPES,
    Scene,
)

BLIND = "i see nothing"
"""The answer without a picture, and to a picture of nothing that the model knows."""
NO_NUMBER = "i see no number"
QUESTIONS: dict[str, tuple[str, ...]] = {
    "see": ("what do you see", "what can you see", "what is this", "what is in the picture"),
    "see colour": ("what colour is this", "what colour is it", "which colour do you see"),
    "see count": ("how many", "how many are there", "how many do you see"),
    "see number": ("what number is this", "which number is this", "which number do you see"),
    "see shape": ("what shape is this", "what shape is it", "which shape do you see"),
}
"""For each kind of question: its wordings."""


def draw_question(chance: Random) -> tuple[str, str]:
    """Draw the kind and the wording of a question about a picture."""
    kind = chance.choice(list(QUESTIONS))
    return kind, chance.choice(QUESTIONS[kind])


def answer_about(kind: str, scene: Scene | None) -> str:
    """Return the answer to a kind of question about the picture that is seen, or about none."""
    if scene is None or scene.shape == NOTHING:
        return BLIND
    number = DIGITS[scene.digit] if scene.digit >= 0 else ""
    answers = {
        "see": f"the number {number}" if number else _description(scene),
        "see shape": f"the number {number}" if number else _shape(scene),
        "see colour": scene.colour,
        "see count": NUMBERS[scene.count],
        "see number": number or NO_NUMBER,
    }
    return answers[kind]


def _shape(scene: Scene) -> str:
    return f"a {scene.shape}" if scene.count == 1 else PLURALS[SHAPES.index(scene.shape)]


def _description(scene: Scene) -> str:
    if scene.count == 1:
        return f"a {scene.colour} {scene.shape}"
    return f"{NUMBERS[scene.count]} {scene.colour} {PLURALS[SHAPES.index(scene.shape)]}"


def seen_answers() -> set[str]:
    """Return every answer about pictures."""
    scenes = [Scene(DIGIT, COLOURS[0], 1, digit) for digit in range(len(DIGITS))]
    scenes += [
        Scene(shape, colour, count)
        for shape in SHAPES
        for colour in COLOURS
        for count in range(1, MOST_OBJECTS + 1)
    ]
    return {answer_about(kind, scene) for kind in QUESTIONS for scene in (None, *scenes)}
