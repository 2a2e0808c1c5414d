"""What a model is made of, and how it is loaded from a checkpoint directory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from duplane.worker.model.audio_encoder import AudioEncoder
from duplane.worker.model.chat_template import ChatTemplate
from duplane.worker.model.checkpoint import Checkpoint, CheckpointError, read_json
from duplane.worker.model.checkpoint import field as read_field
from duplane.worker.model.image_layout import duplex_rows
from duplane.worker.model.language_model import LanguageModel
from duplane.worker.model.talker import Talker
from duplane.worker.model.tokens import Tokens
from duplane.worker.model.types import INPUT_SAMPLE_RATE, ConversationOptions, FloatArray
from duplane.worker.model.vision import Vision
from duplane.worker.model.vocoder import (
    Vocoder,
    VocoderChunk,
    VocoderError,
    VocoderOptions,
    VocoderVoice,
)
from duplane.worker.model.voice_networks import MEL_FRAMES_PER_TOKEN, VoiceNetworks
from duplane.worker.model.voices import load_prompt_voice, load_vocoder_voice
from duplane.worker.model.whisper import UNIT_POSITIONS, AudioConfig
from duplane.worker.model.windows import WindowRules

GENERATION_FILE = "generation_config.json"
VOCODER_FOLDER = Path("assets", "token2wav")
MAX_VOICE_TOKENS = 250
"""Of a client's voice, the first 10 s are used."""
CLOSING_ROWS = 2
"""Rows that close a unit: its terminator and `</unit>`."""

log = logging.getLogger(__name__)


class SpeechVocoder(Protocol):
    """What the model needs of a vocoder; see `vocoder.Vocoder`."""

    @property
    def silence_token_id(self) -> int: ...
    @property
    def lookahead(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    def prime(self, slot: int, voice: VocoderVoice, *, seed: int | None = None) -> None: ...
    def start_turn(self, slot: int) -> None: ...
    def decode(self, chunks: Sequence[VocoderChunk]) -> list[FloatArray]: ...
    def encode(self, chunks: Sequence[VocoderChunk]) -> list[Tensor]: ...
    def decode_mel(
        self, chunks: Sequence[VocoderChunk], mels: Sequence[Tensor]
    ) -> list[FloatArray]: ...
    def reset(self, slot: int) -> None: ...
    def is_clean(self, slot: int) -> bool: ...


@dataclass(frozen=True)
class ModelParts:
    """Loaded parts, all for the same number of slots.

    Without talker, vocoder or any voice for it, the model answers in text alone.
    Without `vision` it sees no frames. `voice_networks` make voices of clips, `vocoder_voice` is
    the one without a clip. `prompt_voice` is the voice heard in the prompt when the client sends
    none, `windows` what becomes of long contexts when the client does not say.
    """

    name: str
    tokens: Tokens
    llm: LanguageModel
    audio: AudioEncoder
    talker: Talker | None = None
    vocoder: SpeechVocoder | None = None
    vocoder_voice: VocoderVoice | None = None
    voice_networks: VoiceNetworks | None = None
    prompt_voice: FloatArray | None = None
    windows: WindowRules = field(default_factory=WindowRules)
    vision: Vision | None = None
    chat_template: ChatTemplate | None = None

    @property
    def overhang(self) -> int:
        """Rows that the cache has beyond its nominal capacity."""
        return overhang(self.audio.config, None if self.vision is None else self.vision.rows)


def generated_rows(max_tokens: int) -> int:
    """The most rows that a unit adds to what it brings: the end of a turn that it cuts off, what
    the model says, and its closing.
    """
    return 1 + max_tokens + CLOSING_ROWS


def overhang(audio: AudioConfig, image_rows: int | None) -> int:
    """Rows of a unit with ordinary options, audio and one whole frame of `image_rows`: so that the
    unit which reaches the nominal capacity is complete. Larger ones are refused where they have no
    room. `image_rows` None means a model that sees no frames.
    """
    seen = 0 if image_rows is None else duplex_rows((None,), image_rows)
    generated = generated_rows(ConversationOptions.max_new_speak_tokens_per_chunk)
    return 1 + seen + UNIT_POSITIONS // audio.pool + generated


def load_parts(
    directory: Path, *, slot_count: int, context_capacity: int, device: str, dtype: str
) -> ModelParts:
    """Load everything the directory has; `CheckpointError` says what is wrong with it."""
    checkpoint = Checkpoint(directory)
    config, place, kind = checkpoint.config, torch.device(device), torch_dtype(dtype)
    tokens = Tokens.load(directory)
    heard, vision = AudioConfig.from_json(config), Vision.from_checkpoint(checkpoint, place, kind)
    capacity = context_capacity + overhang(heard, None if vision is None else vision.rows)
    llm = LanguageModel(config, slot_count, capacity, place, kind)
    if max(len(tokens) - 1, *tokens.forbidden) >= llm.vocabulary:
        raise CheckpointError(f"the tokenizer has ids beyond vocab_size {llm.vocabulary}")
    audio = AudioEncoder(heard, slot_count, place, kind)
    modules: dict[str, nn.Module] = {
        "llm.": llm,
        "apm.": audio.apm,
        "audio_projection_layer.": audio.audio_projection_layer,
    }
    if vision is not None:
        modules |= {"vpm.": vision.vpm, "resampler.": vision.resampler}
    talker = None
    if read_field(config, "init_tts", bool, True):
        talker = modules["tts."] = Talker(config, slot_count, place, kind)
        _check_talker(talker, llm, tokens)
    unused = checkpoint.load_all(modules)
    log.info("%s: no place for %s", directory, ", ".join(unused) or "nothing")
    if talker is not None:
        talker.fold()
    folder, prompt_voice = directory / VOCODER_FOLDER, load_prompt_voice(directory)
    networks = voice = vocoder = None
    if talker is not None:
        networks = VoiceNetworks.load(folder, max_tokens=MAX_VOICE_TOKENS)
        voice = _built_in_voice(folder, networks, prompt_voice)
    if networks is not None or voice is not None:
        vocoder = _load_vocoder(folder, networks, voice, slot_count, device)
    return ModelParts(
        name=_name(directory, checkpoint),
        tokens=tokens,
        llm=llm,
        audio=audio,
        talker=talker,
        vocoder=vocoder,
        vocoder_voice=voice,
        voice_networks=networks,
        prompt_voice=prompt_voice,
        windows=_window_rules(directory),
        vision=vision,
        chat_template=ChatTemplate.load(directory),
    )


def _window_rules(directory: Path) -> WindowRules:
    """The rules that the directory's generation settings name, else the ordinary ones."""
    path = directory / GENERATION_FILE
    return WindowRules.from_json(read_json(path)) if path.exists() else WindowRules()


def _check_talker(talker: Talker, llm: LanguageModel, tokens: Tokens) -> None:
    """See that the talker can be conditioned on the LLM."""
    dims = talker.dims
    if dims.llm_hidden_size != llm.hidden_size:
        raise CheckpointError(f"tts_config: llm_dim is {dims.llm_hidden_size}, not hidden_size")
    if max(len(tokens) - 1, dims.bos, dims.text_end) >= dims.text_rows:
        raise CheckpointError(f"tts_config: num_text_tokens is {dims.text_rows}, too few")


def _built_in_voice(
    folder: Path, networks: VoiceNetworks | None, prompt_voice: FloatArray | None
) -> VocoderVoice | None:
    """The voice of who brings none: the folder's own, else that of the prompt."""
    voice = load_vocoder_voice(folder)
    if voice is None and networks is not None and prompt_voice is not None:
        return networks.read(prompt_voice)
    return voice


def _load_vocoder(
    folder: Path,
    networks: VoiceNetworks | None,
    voice: VocoderVoice | None,
    slot_count: int,
    device: str,
) -> SpeechVocoder:
    """Load the vocoder with room for its voices, and see that they fit together."""
    trials = [] if voice is None else [("the built-in voice", voice)]
    frames = 0 if voice is None else len(voice.prompt_mel)
    if networks is not None:
        silence = np.zeros(INPUT_SAMPLE_RATE, np.float32)
        trials.append(("what the voice networks make", networks.read(silence)))
        frames = max(frames, MEL_FRAMES_PER_TOKEN * networks.max_tokens)
    options = VocoderOptions(max_prompt_frames=frames)
    vocoder = Vocoder.load(folder, slot_count=slot_count, device=device, options=options)
    for what, trial in trials:
        try:
            vocoder.prime(0, trial)
        except VocoderError as error:
            raise CheckpointError(f"{folder}: {what}: {error}") from error
    vocoder.reset(0)
    return vocoder


def torch_dtype(name: str) -> torch.dtype:
    """The numbers of this name; ValueError for those the model cannot work with."""
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in kinds:
        raise ValueError(f"dtype is {name!r}, not one of {', '.join(kinds)}")
    return kinds[name]


def _name(directory: Path, checkpoint: Checkpoint) -> str:
    kind = read_field(checkpoint.config, "model_type", str, directory.name)
    version = checkpoint.config.get("version")
    return kind if version is None else f"{kind}-{version}"
