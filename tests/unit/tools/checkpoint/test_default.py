"""The default model: it waits, answers the questions of the samples, and is quiet on noise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from duplane.tools.talk.client import read_sound
from duplane.tools.talk.duplex import SAMPLE
from duplane.worker.checkpoints import DEFAULT_CHECKPOINT
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    FloatArray,
    Unit,
    UnitOutput,
)

pytestmark = pytest.mark.slow

MOST_BYTES = 20_000_000
RATE = 16_000


@pytest.fixture(scope="module")
def model() -> DuplexModel:
    return DuplexModel.load(DEFAULT_CHECKPOINT, slot_count=1, context_capacity=1024)


def outputs(model: DuplexModel, sound: FloatArray) -> Iterator[UnitOutput]:
    """Yield the output of each second of a conversation with greedy decoding."""
    model.open(0, ConversationOptions(decode_mode=DecodeMode.GREEDY))
    try:
        for start in range(0, len(sound) - RATE + 1, RATE):
            (output,) = model.step([Unit(0, sound[start : start + RATE].copy())])
            assert isinstance(output, UnitOutput)
            yield output
            model.settle([0])
    finally:
        model.close(0)


def test_checkpoint_is_small() -> None:
    sizes = [path.stat().st_size for path in DEFAULT_CHECKPOINT.rglob("*") if path.is_file()]
    assert sum(sizes) <= MOST_BYTES


def test_it_answers_the_questions_of_the_sample(model: DuplexModel) -> None:
    sound = read_sound(SAMPLE)
    noise = np.random.default_rng(1).standard_normal(3 * RATE).astype(np.float32) * 1e-3
    units = list(outputs(model, np.concatenate((sound, noise))))
    said = "".join("\n" if unit.is_listen else unit.text for unit in units)
    assert [line for line in said.splitlines() if line] == [
        "hello how can i help you",
        "two plus three is five",
        "the sky is blue",
        "you are welcome",
    ]
    assert all(len(unit.audio) for unit in units if unit.text)


@pytest.mark.parametrize("level", [0.0, 1e-3, 0.03])
def test_it_is_quiet_in_noise(model: DuplexModel, level: float) -> None:
    noise = np.random.default_rng(2).standard_normal(20 * RATE) * level
    assert all(unit.is_listen for unit in outputs(model, noise.astype(np.float32)))
