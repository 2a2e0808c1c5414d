"""What the preparer needs of a checkpoint, read from its files without the model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from duplane.worker.models.minicpm_o.audio.whisper import UNIT_POSITIONS, AudioConfig
from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, read_config, read_json
from duplane.worker.models.minicpm_o.checkpoint import field as read_field
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.minicpm_o.types import WindowRules
from duplane.worker.models.minicpm_o.vision.preprocessing import Pictures
from duplane.worker.models.minicpm_o.vocoder import harmonic
from duplane.worker.models.minicpm_o.vocoder.harmonic import HarmonicConfig
from duplane.worker.models.minicpm_o.vocoder.voice import (
    PROMPT_VOICE,
    SPOKEN_VOICE,
    VoiceNetworks,
    Voices,
    load_clip,
    load_vocoder_voice,
)
from duplane.worker.models.types import ConversationOptions, FloatArray, WindowMode

GENERATION_FILE = "generation_config.json"
VOCODER_FOLDER = Path("assets", "token2wav")
MAX_VOICE_TOKENS = 250
"""A client's voice is cut to this many speech tokens, which are its first 10 s."""


@dataclass(frozen=True)
class PromptParts:
    """What laying out a prompt or a unit needs of a checkpoint. It has no weights.

    `unit_rows` is the number of rows of the sound of one unit. `pictures` is None if the model
    refuses frames.
    """

    tokens: Tokens
    audio: AudioConfig
    pictures: Pictures | None

    @property
    def unit_rows(self) -> int:
        return UNIT_POSITIONS // self.audio.pool


@dataclass(frozen=True)
class PreparerParts:
    """What preparing conversations, units and chats needs of a checkpoint.

    - `prompt_voice`: the voice in the prompt if the client sends no voice.
    - `windows`: the values of window options that the client does not set.
    - `voices` to speak with; None if the model answers with text only. Its networks are the only
      ones here.
    """

    prompts: PromptParts
    windows: WindowRules
    prompt_voice: FloatArray | None = None
    voices: Voices | None = None


def load_preparer_parts(directory: Path) -> PreparerParts:
    """Read the parts from a checkpoint directory, but none of the model's weights.

    Raises `CheckpointError` for files that cannot be used.
    """
    config, tokens = read_config(directory), Tokens.load(directory)
    generation, prompt_voice = directory / GENERATION_FILE, load_clip(directory / PROMPT_VOICE)
    voices = None
    if read_field(config, "init_tts", bool, True):
        voices = _load_voices(directory, prompt_voice)
    return PreparerParts(
        prompts=PromptParts(
            tokens, AudioConfig.from_json(config), Pictures.load(directory, config)
        ),
        windows=window_rules(read_json(generation) if generation.exists() else {}),
        prompt_voice=prompt_voice,
        voices=voices,
    )


def _load_voices(directory: Path, prompt_voice: FloatArray | None) -> Voices | None:
    """Load the voices of the vocoder. Return None if it has no voice and can make none.

    The voice for clients that send none is that of the vocoder's folder; else it is made from the
    clip of the checkpoint for this, or else from the prompt's voice.
    """
    folder = directory / VOCODER_FOLDER
    if (folder / harmonic.CONFIG).exists():
        return Voices(None, HarmonicConfig.load(folder).voice)
    networks = VoiceNetworks.load(folder, max_tokens=MAX_VOICE_TOKENS)
    voice = load_vocoder_voice(folder)
    if voice is None and networks is not None:
        clip = load_clip(directory / SPOKEN_VOICE)
        clip = prompt_voice if clip is None else clip
        voice = None if clip is None else networks.read(clip)
    return None if voice is None and networks is None else Voices(networks, voice)


def window_rules(config: Mapping[str, Any]) -> WindowRules:
    """Read the window rules of a generation_config.json; raises `CheckpointError`."""
    default = WindowRules()
    mode = read_field(config, "sliding_window_mode", str, default.sliding_window_mode.value)
    numbers: dict[str, Any] = {
        entry.name: read_field(config, entry.name, int, getattr(default, entry.name))
        for entry in fields(default)
        if entry.name != "sliding_window_mode"
    }
    try:
        rules = WindowRules(WindowMode(mode), **numbers)
        ConversationOptions(sliding_window_mode=rules.sliding_window_mode, **numbers)
        rules.check()
    except ValueError as error:
        raise CheckpointError(f"{GENERATION_FILE}: {error}") from error
    return rules
