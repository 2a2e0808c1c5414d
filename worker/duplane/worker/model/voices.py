"""Voices: those that come with a checkpoint, and which one a conversation speaks with."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import safetensors.numpy
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none
import soxr  # pyright: ignore[reportMissingTypeStubs]  it ships none

from duplane.worker.model.checkpoint import CheckpointError
from duplane.worker.model.types import (
    INPUT_SAMPLE_RATE,
    FloatArray,
    OptionError,
)
from duplane.worker.model.vocoder import VocoderVoice
from duplane.worker.model.voice_networks import VoiceNetworks

PROMPT_VOICE = Path("assets", "system_ref_audio.wav")
VOCODER_VOICE = "voice.safetensors"
READ_VOICES = 64
"""Voices that are remembered once read: some hundred kilobytes each."""


class Voices:
    """Chooses the vocoder's voice for a conversation; may be used by several threads at once.

    A clip that was read is remembered by its content, and the one unused for longest is
    forgotten, so that a voice is read once for all the conversations that use it.
    """

    def __init__(
        self,
        networks: VoiceNetworks | None,
        built_in: VocoderVoice | None,
        count: int = READ_VOICES,
    ) -> None:
        self._networks, self._built_in, self._count = networks, built_in, count
        self._read: OrderedDict[bytes, VocoderVoice] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def reads_clips(self) -> bool:
        """Whether a client's clip can become the vocoder's voice."""
        return self._networks is not None

    def choose(
        self, tts_voice: FloatArray | None = None, llm_voice: FloatArray | None = None
    ) -> VocoderVoice | None:
        """The voice to speak with: the TTS clip's, else the LLM clip's, else the built-in one.

        Raises `OptionError` for a clip that no voice can be read from.
        """
        for name, clip in (("tts_voice", tts_voice), ("llm_voice", llm_voice)):
            if clip is not None and self._networks is not None:
                try:
                    return self._of(clip, self._networks)
                except ValueError as error:
                    raise OptionError(name, str(error)) from error
        return self._built_in

    def _of(self, clip: FloatArray, networks: VoiceNetworks) -> VocoderVoice:
        key = hashlib.blake2b(clip.tobytes(), digest_size=16).digest()
        with self._lock:
            voice = self._read.get(key)
            if voice is not None:
                self._read.move_to_end(key)
                return voice
        voice = networks.read(clip)  # seconds of sound: others need not wait for it
        with self._lock:
            self._read[key] = voice
            while len(self._read) > self._count:
                self._read.popitem(last=False)
        return voice


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
