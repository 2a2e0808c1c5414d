"""The rows of `make hearing`, with invented voices: their draws, their judgement and the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest
from support.tools.command import captured

from duplane.worker.models.minicpm_o.audio.mel import UNIT_SAMPLES
from duplane.worker.models.types import FloatArray
from training import __main__ as command
from training.__main__ import run
from training.corpus.espeak import SynthesisError
from training.domain import DIGITS, STOPS, UNKNOWN
from training.evaluation import hearing, tries
from training.evaluation.hearing import HearingPlan, as_text, measure_hearing, measured_rows
from training.evaluation.inputs import ChatInput, SessionInput
from training.evaluation.material import Engine, Material, MissingError, Voice
from training.evaluation.scores import Answered
from training.evaluation.seen import picture_rows
from training.evaluation.tries import Row, Try, draw_tries, rows

LISTENS = Answered(speaks=False)
COUNT = ("one two three four five", " six seven eight", " nine ten")
TRIES = 4


PEOPLE = (
    "people: digits repeated",
    "people: sums",
    "many people: digits repeated",
    "many people: sums",
    "told to stop by people",
)
"""The rows that need `--recordings`."""


class InventedMaterial(Material):
    """Each word is a tone of 150 ms; a room is a hum."""

    def voice(self, engine: Engine, chance: Random) -> Voice:
        hertz = chance.uniform(150.0, 400.0) + len(engine)
        return lambda text: tone(hertz, 0.15 * len(text.split()))

    def say(self) -> FloatArray:
        return tone(200.0, 0.2)

    def woman(self, name: str) -> FloatArray:
        return tone(200.0 + len(name), 0.2)

    def phrases(self) -> Sequence[tuple[str, FloatArray]]:
        return [("hello", tone(200.0, 0.2)), ("bye", tone(250.0, 0.2))]

    def other_sentences(self) -> Sequence[FloatArray]:
        return [tone(300.0, 1.0)]

    def room(self, name: str) -> FloatArray:
        return tone(50.0 + len(name), 1.0)


def tone(hertz: float, duration_s: float) -> FloatArray:
    at = np.arange(int(duration_s * 16_000)) / 16_000
    return (0.1 * np.sin(2 * np.pi * hertz * at)).astype(np.float32)


class ScriptedRunner:
    """Acts as a model that counts to ten, in the unit in which the first try expects it.

    It stops in the unit in which an interruption can be noticed if the sound has one, or never if
    it `is_deaf`.
    """

    def __init__(self, drawn: Sequence[Try], *, is_deaf: bool) -> None:
        self._tries = drawn
        self._is_deaf = is_deaf

    async def sessions(self, inputs: Sequence[SessionInput]) -> list[list[Answered]]:
        """Return the outputs for the tries, then for the tries without interruption."""
        found: list[list[Answered]] = []
        for given in inputs:
            one = next(one for one in self._tries if given is one.given or given is one.alone)
            found.append(self._units(one, is_cut=given is one.given and not self._is_deaf))
        return found

    async def chats(self, inputs: Sequence[ChatInput]) -> list[str]:
        """Answer no chats."""
        del inputs
        return []

    def _units(self, one: Try, *, is_cut: bool) -> list[Answered]:
        units = [LISTENS] * (len(one.given.samples) // UNIT_SAMPLES)
        for number, text in enumerate(COUNT):
            units[one.first_unit + number] = Answered(True, text, number == len(COUNT) - 1)
        if is_cut:
            units[one.noticed_unit :] = [Answered(True, "", True), *units[one.noticed_unit + 1 :]]
            units[one.noticed_unit + 1 :] = [LISTENS] * (len(units) - one.noticed_unit - 1)
        return units


@pytest.fixture
def material(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Material:
    def units_of(text: str) -> int:
        return -(-len(text.split()) // 4)

    monkeypatch.setattr(tries, "answer_units", units_of)
    monkeypatch.setattr(tries, "SILENT_UNITS", 20)
    return InventedMaterial(tmp_path)


def row(name: str) -> Row:
    return next(one for one in rows() if one.name == name)


def test_every_row_is_drawn_by_seed_with_sessions_of_one_length(material: Material) -> None:
    names: set[str] = set()
    for one in rows():
        if one.name in PEOPLE:
            with pytest.raises(MissingError, match="no --recordings are named"):
                draw_tries(one, material, TRIES, seed=1)
            continue
        drawn = draw_tries(one, material, TRIES, seed=1)
        again = draw_tries(one, material, TRIES, seed=1)
        other = draw_tries(one, material, TRIES, seed=2)
        sounds = [[each.given.samples for each in some] for some in (drawn, again, other)]
        assert len(drawn) == (one.count or TRIES)
        assert len({len(sound) for sound in sounds[0]}) == 1
        assert not len(sounds[0][0]) % UNIT_SAMPLES
        assert all(map(np.array_equal, sounds[0], sounds[1]))
        assert one.name == "five minutes of silence" or not np.array_equal(
            sounds[0][0], sounds[2][0]
        )
        assert all(np.abs(sound).max() <= 1.0 for sound in sounds[0])
        for each in drawn:
            assert each.first_unit + len(each.wanted) < len(each.given.samples) / UNIT_SAMPLES
        names.add(one.name)
    assert len(names) == len(list(rows())) - len(PEOPLE)


@pytest.mark.parametrize("name", PEOPLE)
def test_rows_of_people_have_only_speakers_that_judge(
    name: str, material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ann, who is the first by name, and 0a judge; bob, 1b and 2c are for training."""
    for speaker in ("ann", "bob"):
        for digit in range(10):
            (tmp_path / f"{digit}_{speaker}_0.wav").touch()
    for word in (*DIGITS, *STOPS[:1]):
        (tmp_path / word).mkdir()
        for speaker in ("0a", "1b", "2c"):
            (tmp_path / word / f"{speaker}_nohash_0.wav").touch()
    heard: list[Path] = []

    def take(path: Path) -> FloatArray:
        heard.append(path)
        return tone(200.0, 0.3)

    material.recordings = tmp_path
    monkeypatch.setattr(material, "take", take)
    drawn = draw_tries(row(name), material, TRIES, seed=1)
    parts = [path.stem.split("_") for path in heard]
    speakers = {part[0] if "nohash" in part else part[1] for part in parts}
    assert speakers == {"ann" if name.startswith("people") else "0a"}
    words = {path.parent.name for path in heard} if speakers == {"0a"} else set[str]()
    assert (words == {"stop"}) == ("stop" in name)
    assert len(drawn) == TRIES


def test_an_interruption_changes_only_the_sound_after_the_reply_begins(material: Material) -> None:
    for name in ("told to stop", "interrupted by a question"):
        for one in draw_tries(row(name), material, TRIES, seed=3):
            assert one.alone is not None
            assert one.alone.seed == one.given.seed
            differs = np.flatnonzero(one.alone.samples != one.given.samples)
            begin = (one.first_unit + 1) * UNIT_SAMPLES  # the reply begins to sound here
            assert begin < differs[0] < begin + UNIT_SAMPLES
            assert one.noticed_unit == one.first_unit + 1


@pytest.mark.parametrize(("is_deaf", "right"), [(True, 0), (False, TRIES)], ids=["deaf", "hears"])
async def test_a_model_deaf_to_interruptions_scores_nothing(
    material: Material, *, is_deaf: bool, right: int
) -> None:
    """A deaf model counts to the end, and closes its turn as soon as it has."""
    for name in ("told to stop", "interrupted by a question"):
        drawn = draw_tries(row(name), material, TRIES, seed=3)
        runner = ScriptedRunner(drawn, is_deaf=is_deaf)
        found = await measured_rows(runner, [(row(name), drawn)])
        total = found[name]["total"]
        assert total.get("cut", 0) == right
        assert total["tries"] == TRIES
        assert total.get("ended by itself", 0) == 0


async def test_table_of_a_model_that_talks_without_reason(
    material: Material, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Talker:
        """Acts as a model that refuses in every fourth unit."""

        async def sessions(self, inputs: Sequence[SessionInput]) -> list[list[Answered]]:
            refuses = Answered(True, UNKNOWN, True)
            return [
                [refuses if number % 4 == 3 else LISTENS for number in range(length)]
                for length in (len(one.samples) // UNIT_SAMPLES for one in inputs)
            ]

    def draw(one: Row, _: Material, count: int, seed: int) -> list[Try]:
        if one.name == "Kokoro, neural voices":
            raise SynthesisError("onnxruntime is not installed")
        return draw_tries(one, material, count, seed)

    monkeypatch.setattr(hearing, "draw_tries", draw)
    (tmp_path / "config.json").write_text('{"init_vision": false}')
    monkeypatch.setattr(hearing.DuplexModel, "load", lambda *_, **__: None)
    monkeypatch.setattr(hearing, "ModelRunner", lambda _: Talker())
    found = await measure_hearing(
        tmp_path, HearingPlan(tmp_path, tmp_path, tries=TRIES, is_paced=False)
    )
    assert set(found["skipped"]) == {
        *PEOPLE,
        "Kokoro, neural voices",
        *(one.name for one in picture_rows()),
    }
    values = found["rows"]
    assert values["people: sentences to refuse"]["total"]["right"] == TRIES
    assert values["people: phrases of the domain"]["total"]["sorry"] == TRIES
    assert values["five minutes of silence"]["total"]["spoken"] == 6 * 5
    assert values["rooms alone"]["total"].get("quiet") == 0
    assert not found["late units"]
    text = as_text(found)
    assert "in this process" in text
    assert "skipped: Kokoro, neural voices: onnxruntime is not installed\n" in text
    assert "CC BY-SA 4.0" in text  # the credit for the recordings


def test_command_writes_the_table_and_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[HearingPlan] = []
    found: dict[str, Any] = {
        "rows": {"rooms alone": {"judged": "quiet", "total": {"tries": 2, "spoken": 7}}},
        "real time": True,
        "units": 20,
        "seconds": 30,
        "late units": 3,
        "skipped": {},
        "credits": [],
    }

    async def measure(_: Path, plan: HearingPlan) -> dict[str, Any]:
        plans.append(plan)
        return found

    monkeypatch.setattr(command, "measure_hearing", measure)
    path = tmp_path / "numbers.json"
    options = ("--cache", str(tmp_path), "--tries", "2", "--rows", "alone", "--json", str(path))
    code, output = captured(run, ("hearing", str(tmp_path), *options))
    assert code == 0, output
    assert plans == [HearingPlan(tmp_path, None, 2, part="alone")]
    assert [one.name for one in plans[0].rows()] == ["rooms alone"]
    line = next(line for line in output.splitlines() if line.startswith("rooms alone"))
    assert line.split() == ["rooms", "alone", "2", "0", "7", "0"]
    assert "3 units were late" in output
    assert "extra turns" not in output  # the heading of rows that were not measured
    assert orjson.loads(path.read_bytes()) == found


def test_name_of_no_row_is_refused(tmp_path: Path) -> None:
    code, output = captured(run, ("hearing", str(tmp_path), "--rows", "cats"))
    assert code == 2
    assert "rows is 'cats': no row has this in its name" in output
