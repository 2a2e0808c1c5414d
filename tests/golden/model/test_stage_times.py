"""The durations of the stages of a unit: each is measured, and only those that ran have one."""

from __future__ import annotations

import numpy as np
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_audio
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import ConversationOptions, DecodeMode, Unit, UnitOutput

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 8 * UNIT)
GREEDY = ConversationOptions(decode_mode=DecodeMode.GREEDY, force_listen_count=0, seed=0)


def outputs(model: DuplexModel) -> list[UnitOutput]:
    """Return the outputs of the same conversation's units, the second of which has to listen."""
    model.open(0, GREEDY)
    found: list[UnitOutput] = []
    for number in range(8):
        audio = TALK[number * UNIT : (number + 1) * UNIT]
        (output,) = model.step([Unit(0, audio, number == 1)])
        assert isinstance(output, UnitOutput), output
        model.settle([0])
        found.append(output)
    return found


def test_the_input_of_the_talker_is_a_measured_part_of_it(model: DuplexModel) -> None:
    spoken = [output for output in outputs(model) if not output.is_listen]
    assert spoken
    for output in spoken:
        assert 0 < output.stage_s["condition"] < output.stage_s["talker"]


def test_a_unit_that_listens_has_the_passes_of_the_language_model_and_no_speech(
    model: DuplexModel,
) -> None:
    silent = [output for output in outputs(model) if output.is_listen]
    assert silent
    for output in silent:
        assert output.stage_s["prefill"] > 0
        assert output.stage_s.keys().isdisjoint({"condition", "talker", "vocoder"})


def test_the_speech_of_a_turn_begins_with_the_silence_of_the_reference(model: DuplexModel) -> None:
    """HiFT holds back 160 ms for the cross-fade, and the reference sends zeros instead."""
    with np.load(GOLDEN / "token2wav" / "golden.npz") as recorded:
        zeros = np.flatnonzero(recorded["c0_wav"].ravel())[0]
    assert zeros == 0.16 * 24_000
    first = next(output for output in outputs(model) if output.audio.size)
    assert np.flatnonzero(first.audio)[0] == zeros
