"""The rows about pictures: what they show and ask, and how the answers are judged."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from duplane.worker.models.chat import ChatImage
from duplane.worker.models.minicpm_o.audio.mel import UNIT_SAMPLES
from duplane.worker.models.types import FloatArray
from training.evaluation import model_runner, tries
from training.evaluation.hearing import measured_rows, sees
from training.evaluation.inputs import ChatInput, Role, SessionInput
from training.evaluation.material import Engine, Material, Voice
from training.evaluation.scores import Answered
from training.evaluation.seen import picture_rows
from training.evaluation.tries import Row, draw_tries
from training.vision.questions import BLIND

TRIES = 4


class Humming(Material):
    """Speaks every text as a hum."""

    def voice(self, engine: Engine, chance: Random) -> Voice:
        del engine, chance
        return lambda text: _hum(0.2 * len(text.split()))


def _hum(duration_s: float) -> FloatArray:
    at = np.arange(int(duration_s * 16_000)) / 16_000
    return (0.1 * np.sin(2 * np.pi * 200 * at)).astype(np.float32)


class Guesser:
    """Answers alike: each session in the unit before its last, and each chat."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    async def sessions(self, inputs: Sequence[SessionInput]) -> list[list[Answered]]:
        """Return the outputs of all units of each session."""
        found: list[list[Answered]] = []
        for one in inputs:
            units = [Answered(speaks=False)] * (len(one.samples) // UNIT_SAMPLES)
            units[-2] = Answered(True, self._answer, True)
            found.append(units)
        return found

    async def chats(self, inputs: Sequence[ChatInput]) -> list[str]:
        """Return the text of each answer."""
        return [self._answer for _ in inputs]


@pytest.fixture
def material(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Material:
    monkeypatch.setattr(tries, "answer_units", lambda _: 1)
    return Humming(tmp_path)


def row(name: str) -> Row:
    return next(one for one in picture_rows() if one.name == name)


def test_every_row_is_drawn_by_seed_with_pictures(material: Material) -> None:
    for one in picture_rows():
        drawn, again = (draw_tries(one, material, TRIES, seed=1) for _ in range(2))
        assert len(drawn) == TRIES
        pictures = [[each.given.pictures, each.chat and each.chat.picture] for each in drawn]
        assert pictures == [
            [each.given.pictures, each.chat and each.chat.picture] for each in again
        ]
        assert [each.wanted for each in drawn] == [each.wanted for each in again]
        if one.name.startswith("pictures"):
            assert all(each.given.frames(0) != each.given.frames(9) for each in drawn)
            for each in drawn:
                with Image.open(io.BytesIO(each.given.frames(9)[0])) as image:
                    assert image.format == "JPEG"


async def test_only_the_answer_about_the_picture_is_right(material: Material) -> None:
    for name in ("pictures: colours", "typed chats with pictures"):
        drawn = draw_tries(row(name), material, TRIES, seed=2)
        (wanted,) = drawn[0].wanted
        same = sum(one.wanted == (wanted,) for one in drawn)
        assert same < TRIES
        found = await measured_rows(Guesser(wanted), [(row(name), drawn)])
        assert found[name]["total"]["right"] == same
        assert found[name]["total"]["wrong"] == TRIES - same


async def test_a_model_that_sees_nothing_is_right_only_without_a_picture(
    material: Material,
) -> None:
    drawn = [(one, draw_tries(one, material, TRIES, seed=3)) for one in picture_rows()]
    found = await measured_rows(Guesser(BLIND), drawn)
    right = {name for name, values in found.items() if values["total"].get("right")}
    assert right == {"no picture, or a texture"}
    assert set(found["no picture, or a texture"]["parts"]) == {"no picture", "texture"}


def test_last_picture_is_shown_until_the_session_ends() -> None:
    given = SessionInput(np.zeros(0, np.float32), 1, pictures=(b"first", b"second"))
    assert [given.frames(unit) for unit in range(3)] == [(b"first",), (b"second",), (b"second",)]
    assert SessionInput(np.zeros(0, np.float32), 1).frames(0) == ()


def test_picture_of_a_chat_is_before_the_text_of_its_last_message() -> None:
    messages: tuple[tuple[Role, str], ...] = (("system", "Be brief."), ("user", "How many?"))
    made = model_runner.chat_request(ChatInput(messages, 1, picture=b"jpeg"))
    assert made.messages[0].parts == ("Be brief.",)
    assert made.messages[1].parts == (ChatImage(b"jpeg"), "How many?")


def test_checkpoint_without_a_vision_tower_does_not_see(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"init_vision": false}')
    assert not sees(tmp_path)
