"""The tiny checkpoint has all files of the public format; its model listens and speaks."""

from __future__ import annotations

import re
import wave
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from support.paths import GOLDEN
from support.test_checkpoint.build import build_test_checkpoint

from duplane.tools.checkpoint.text import SPOKEN
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    FloatArray,
    Unit,
    UnitOutput,
)

pytestmark = pytest.mark.slow

SEEDS = (0, 1, 7)
UNITS = 18
PROMPT = "Streaming Omni Conversation."


def speech_like() -> FloatArray:
    """Return ten seconds of gliding harmonics in syllables, words and pauses."""
    time = np.arange(160_000) / 16000
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.4 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / 16000
    tone = sum(np.sin(number * phase) / number for number in range(1, 12))
    syllables = np.clip(np.sin(2 * np.pi * 3.1 * time), 0, 1)
    pauses = (time % 2.7) < 1.9
    breath = np.random.default_rng(0).normal(0, 0.003, len(time))
    return (0.15 * tone * syllables * pauses + breath).astype(np.float32)


def recorded_speech() -> FloatArray:
    with wave.open(str(GOLDEN / "audio" / "talk.wav")) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return samples.astype(np.float32) / np.float32(32768)


SPEECH = {"synthetic": speech_like(), "recorded": recorded_speech()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {seed: tmp_path_factory.mktemp("tiny") / str(seed) for seed in SEEDS}
    for seed, folder in folders.items():
        build_test_checkpoint(folder, seed)
    return folders


@pytest.fixture(scope="module")
def models(checkpoints: dict[int, Path]) -> dict[int, DuplexModel]:
    return {
        seed: DuplexModel.load(folder, slot_count=1, context_capacity=1024)
        for seed, folder in checkpoints.items()
    }


@dataclass
class Turn:
    """Consecutive units that all listen or all speak."""

    is_listening: bool
    units: list[UnitOutput]


def converse(model: DuplexModel, speech: FloatArray, mode: DecodeMode) -> list[UnitOutput]:
    audio = np.resize(speech, UNITS * 16000).reshape(UNITS, 16000)
    model.open(0, ConversationOptions(system_prompt=PROMPT, decode_mode=mode, seed=3))
    outputs: list[UnitOutput] = []
    for unit in audio:
        (output,) = model.step([Unit(0, unit)])
        assert isinstance(output, UnitOutput)
        outputs.append(output)
        model.settle([0])
    model.close(0)
    return outputs


def turns_of(outputs: list[UnitOutput]) -> list[Turn]:
    groups = groupby(outputs, key=lambda output: output.is_listen)
    return [Turn(is_listening, list(units)) for is_listening, units in groups]


@pytest.fixture(
    scope="module",
    params=[
        (seed, kind, mode)
        for seed in SEEDS
        for kind in SPEECH
        for mode in (DecodeMode.GREEDY, DecodeMode.SAMPLING)
    ],
    ids=lambda param: f"{param[0]}-{param[1]}-{param[2].value}",
)
def outputs(request: pytest.FixtureRequest, models: dict[int, DuplexModel]) -> list[UnitOutput]:
    seed, kind, mode = request.param
    return converse(models[seed], SPEECH[kind], mode)


def test_the_same_seed_gives_the_same_bytes(checkpoints: dict[int, Path], tmp_path: Path) -> None:
    build_test_checkpoint(tmp_path / "again", 0)
    again = {path.relative_to(tmp_path / "again"): path for path in files(tmp_path / "again")}
    first = {path.relative_to(checkpoints[0]): path for path in files(checkpoints[0])}
    assert again.keys() == first.keys()
    different = [name for name in first if first[name].read_bytes() != again[name].read_bytes()]
    assert different == []


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_another_seed_gives_other_weights(checkpoints: dict[int, Path]) -> None:
    for name in ("model-00001-of-00002.safetensors", "assets/token2wav/flow.pt"):
        assert (checkpoints[0] / name).read_bytes() != (checkpoints[1] / name).read_bytes()


def test_it_has_the_tensors_of_the_public_format(checkpoints: dict[int, Path]) -> None:
    ours, theirs = (
        orjson.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"].keys()
        for folder in (checkpoints[0], GOLDEN / "checkpoint")
    )
    assert ours == theirs


def test_it_has_the_files_and_settings_of_the_public_format(checkpoints: dict[int, Path]) -> None:
    folder, golden = checkpoints[0], GOLDEN / "checkpoint"
    assert {path.name for path in golden.iterdir()} <= {path.name for path in folder.iterdir()}
    for name in ("config.json", "preprocessor_config.json", "tokenizer_config.json"):
        ours, theirs = (orjson.loads((place / name).read_bytes()) for place in (folder, golden))
        assert theirs.keys() <= ours.keys()


def test_it_has_the_vocoders_tensors(checkpoints: dict[int, Path]) -> None:
    for name in ("flow.pt", "hift.pt"):
        ours, theirs = (
            set(torch.load(place / name, weights_only=True))
            for place in (checkpoints[0] / "assets" / "token2wav", GOLDEN / "token2wav")
        )
        missing = {name for name in theirs - ours if not re.search(r"estimator\.blocks\.", name)}
        assert ours <= theirs
        assert missing == set()


def test_it_has_the_added_tokens_in_the_released_order(checkpoints: dict[int, Path]) -> None:
    ours, theirs = (
        orjson.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
        for folder in (checkpoints[0], GOLDEN / "checkpoint")
    )
    first_ours, first_theirs = ours[0]["id"], theirs[0]["id"]
    for our, their in zip(ours, theirs, strict=True):
        assert our.pop("id") - first_ours == their.pop("id") - first_theirs
        assert our == their


def test_it_listens_and_speaks_in_turns(outputs: list[UnitOutput]) -> None:
    turns = turns_of(outputs)
    assert [turn.is_listening for turn in turns[:3]] == [True, False, True]
    assert all(2 <= len(turn.units) <= 6 for turn in turns[:-1])


def test_its_turns_end_with_their_last_unit(outputs: list[UnitOutput]) -> None:
    spoken = [turn for turn in turns_of(outputs)[:-1] if not turn.is_listening]
    for turn in spoken:
        assert [unit.end_of_turn for unit in turn.units] == [False] * (len(turn.units) - 1) + [True]


def test_it_speaks_in_words_of_its_sentences(outputs: list[UnitOutput]) -> None:
    words = set(re.findall(r"\w+", " ".join(SPOKEN)))
    texts = [output.text for output in outputs if not output.is_listen]
    spoken = re.findall(r"\w+", "".join(texts))
    assert len(spoken) > len(texts)
    assert set(spoken) <= words
    assert len(set(spoken)) >= 8
    assert all(len(text) < 28 for text in texts)


def test_it_speaks_a_second_per_unit_and_less_at_a_turns_end(outputs: list[UnitOutput]) -> None:
    inside = [unit for unit in outputs if not (unit.is_listen or unit.end_of_turn)]
    ends = [unit for unit in outputs if unit.end_of_turn]
    assert all(unit.audio_token_count == 25 for unit in inside)
    assert all(5 <= unit.audio_token_count < 25 for unit in ends)


def test_its_voice_is_audible_and_below_full_scale(outputs: list[UnitOutput]) -> None:
    assert all(not len(output.audio) for output in outputs if output.is_listen)
    for output in outputs:
        if not output.is_listen:
            assert np.isfinite(output.audio).all()
            assert np.abs(output.audio).max() < 1.0
            assert 0.02 < output.audio.std() < 0.2


def test_a_prompt_voice_does_not_upset_it(models: dict[int, DuplexModel]) -> None:
    model, speech = models[0], SPEECH["recorded"]
    model.open(0, ConversationOptions(llm_voice=SPEECH["synthetic"][:50_000], seed=0))
    heard: list[bool] = []
    for unit in np.resize(speech, UNITS * 16000).reshape(UNITS, 16000):
        (output,) = model.step([Unit(0, unit)])
        assert isinstance(output, UnitOutput)
        heard.append(output.is_listen)
        model.settle([0])
    model.close(0)
    assert {True, False} == set(heard[3:12])


def test_it_keeps_taking_turns_in_half_precision(checkpoints: dict[int, Path]) -> None:
    model = DuplexModel.load(checkpoints[0], slot_count=1, context_capacity=1024, dtype="bfloat16")
    turns = turns_of(converse(model, SPEECH["synthetic"], DecodeMode.GREEDY))
    assert [turn.is_listening for turn in turns[:3]] == [True, False, True]
