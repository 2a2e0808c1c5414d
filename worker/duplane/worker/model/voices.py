"""The voices that come with a checkpoint: one for the prompt, one for the vocoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import safetensors.numpy
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none
import soxr  # pyright: ignore[reportMissingTypeStubs]  it ships none

from duplane.worker.model.checkpoint import CheckpointError
from duplane.worker.model.types import INPUT_SAMPLE_RATE, FloatArray
from duplane.worker.model.vocoder import VocoderVoice

PROMPT_VOICE = Path("assets", "system_ref_audio.wav")
VOCODER_VOICE = "voice.safetensors"


def load_prompt_voice(checkpoint: Path) -> FloatArray | None:
    """The voice heard in the prompt when the client sends none: float32 [n] at 16 kHz."""
    path = checkpoint / PROMPT_VOICE
    if not path.exists():
        return None
    try:
        samples, rate = cast("Any", soundfile).read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return cast("Any", soxr).resample(samples.mean(axis=1), rate, INPUT_SAMPLE_RATE)


def load_vocoder_voice(directory: Path) -> VocoderVoice | None:
    """The vocoder's built-in voice: `prompt_tokens`, `prompt_mel` and `speaker_embedding`."""
    path = directory / VOCODER_VOICE
    if not path.exists():
        return None
    try:
        tensors = cast("Any", safetensors.numpy).load_file(path)
        return VocoderVoice(
            prompt_tokens=tensors["prompt_tokens"],
            prompt_mel=tensors["prompt_mel"],
            speaker_embedding=tensors["speaker_embedding"],
        )
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
