"""The default model hears what it was asked to say: requested texts are spoken intelligibly."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import soxr  # pyright: ignore[reportMissingTypeStubs]  it ships none
from support.paths import ROOT

from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE, OUTPUT_SAMPLE_RATE
from duplane.worker.models.types import (
    ConversationOptions,
    FloatArray,
    SpeechRequest,
    Unit,
    UnitOutput,
)

pytestmark = pytest.mark.slow

CHECKPOINT = ROOT / "worker/duplane/worker/checkpoints/default"
QUESTIONS = {
    "two plus four": "two plus four is six",
    "four plus four": "four plus four is eight",
    "six plus four": "six plus four is ten",
    "eight plus four": "eight plus four is twelve",
}
LEAD, UNITS = int(2.6 * INPUT_SAMPLE_RATE), 7


@pytest.fixture(scope="module")
def model() -> DuplexModel:
    return DuplexModel.load(CHECKPOINT, slot_count=1, context_capacity=512)


@pytest.fixture(autouse=True)
def clean(model: DuplexModel) -> Iterator[None]:
    yield
    model.close(0)


def outputs(
    model: DuplexModel, sound: FloatArray, *requests: SpeechRequest
) -> Iterator[UnitOutput]:
    """Run a conversation whose first unit has the requests."""
    model.open(0, ConversationOptions(seed=3))
    for number in range(len(sound) // INPUT_SAMPLE_RATE):
        audio = sound[number * INPUT_SAMPLE_RATE :][:INPUT_SAMPLE_RATE]
        unit = model.preparer.unit(
            Unit(0, audio, sequence=number, speech=() if number else requests)
        )
        assert isinstance(unit, Unit)
        (result,) = model.step([unit])
        assert isinstance(result, UnitOutput)
        assert not model.settle([0])
        yield result
    model.close(0)


def spoken(model: DuplexModel, text: str) -> FloatArray:
    """Return the sound of a text that is requested before the user speaks."""
    silence = np.zeros(UNITS * INPUT_SAMPLE_RATE, np.float32)
    ran = list(outputs(model, silence, SpeechRequest(0, text)))
    said = [output for output in ran if output.speech_request == 0]
    assert ran[: len(said)] == said
    assert "".join(output.text for output in said) == text
    return np.concatenate([output.audio for output in said])


def test_the_model_understands_what_it_was_asked_to_say(model: DuplexModel) -> None:
    answers: dict[str, str] = {}
    for question in QUESTIONS:
        words = soxr.resample(spoken(model, question), OUTPUT_SAMPLE_RATE, INPUT_SAMPLE_RATE)
        noise = np.random.default_rng(0).standard_normal(UNITS * INPUT_SAMPLE_RATE) * 1e-3
        sound = noise.astype(np.float32)
        sound[LEAD : LEAD + len(words)] += words[: len(sound) - LEAD]
        answers[question] = "".join(output.text for output in outputs(model, sound)).strip()
    understood = [question for question in QUESTIONS if answers[question] == QUESTIONS[question]]
    assert len(understood) >= 3, answers
