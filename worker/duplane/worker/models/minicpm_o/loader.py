"""Loads the parts of a model from a checkpoint directory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from duplane.worker.models.minicpm_o import precision
from duplane.worker.models.minicpm_o.audio.encoder import AudioEncoder
from duplane.worker.models.minicpm_o.audio.whisper import UNIT_POSITIONS, AudioConfig
from duplane.worker.models.minicpm_o.checkpoint import Checkpoint, CheckpointError
from duplane.worker.models.minicpm_o.checkpoint import field as read_field
from duplane.worker.models.minicpm_o.dtype import torch_dtype
from duplane.worker.models.minicpm_o.llm.language_model import LanguageModel
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.minicpm_o.packing import pack_products
from duplane.worker.models.minicpm_o.preparer_parts import (
    MAX_VOICE_TOKENS,
    VOCODER_FOLDER,
    PreparerParts,
    PromptParts,
    load_preparer_parts,
)
from duplane.worker.models.minicpm_o.tts.talker import TURN_ROWS, Talker
from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE, WindowRules
from duplane.worker.models.minicpm_o.vision.encoder import Vision
from duplane.worker.models.minicpm_o.vision.layout import duplex_rows
from duplane.worker.models.minicpm_o.vocoder import harmonic
from duplane.worker.models.minicpm_o.vocoder.harmonic import HarmonicVocoder
from duplane.worker.models.minicpm_o.vocoder.vocoder import (
    Vocoder,
    VocoderChunk,
    VocoderError,
    VocoderOptions,
    VocoderVoice,
)
from duplane.worker.models.minicpm_o.vocoder.voice import MEL_FRAMES_PER_TOKEN, Voices
from duplane.worker.models.types import ConversationOptions, FloatArray

TRAINING_TENSORS = ("tts.model.embed_tokens.", "tts.projector_spk.")
"""Prefixes of tensors in released checkpoints that only training uses."""
CLOSING_ROWS = 2
"""Rows that close a unit: its terminator and `</unit>`."""

log = logging.getLogger(__name__)


class SpeechVocoder(Protocol):
    """The methods of a vocoder that the model uses; see `vocoder.Vocoder`."""

    @property
    def silence_token_id(self) -> int: ...
    @property
    def lookahead(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def has_buckets(self) -> bool: ...
    @property
    def most_rows(self) -> int: ...
    def warm_up(self) -> None: ...
    def capture(self) -> None: ...
    def prime(
        self, slot: int, voice: VocoderVoice, *, seed: int | None = None, is_quick: bool = False
    ) -> None: ...
    def has_prompt(self, slot: int) -> bool: ...
    def start_turn(self, slot: int) -> None: ...
    def decode(self, chunks: Sequence[VocoderChunk]) -> list[FloatArray]: ...
    def encode(self, chunks: Sequence[VocoderChunk]) -> list[Tensor]: ...
    def decode_mel(
        self, chunks: Sequence[VocoderChunk], mels: Sequence[Tensor]
    ) -> list[FloatArray]: ...
    def skip(self, chunks: Sequence[VocoderChunk]) -> None: ...
    def repeat(self, chunk: VocoderChunk, *, is_recent: bool) -> None: ...
    def reset(self, slot: int) -> None: ...
    def is_clean(self, slot: int) -> bool: ...


@dataclass(frozen=True)
class ModelParts:
    """Loaded parts, all for the same number of slots.

    Without a talker, a vocoder or a voice for the vocoder, the model answers with text only.
    Without `vision` it refuses frames.

    - `voices`, `prompt_voice` and `windows` are those of `PreparerParts`.
    - `digest` identifies the weights and the settings that decide the output. It is empty if
      conversations cannot be rebuilt.
    """

    name: str
    tokens: Tokens
    llm: LanguageModel
    audio: AudioEncoder
    talker: Talker | None = None
    vocoder: SpeechVocoder | None = None
    voices: Voices | None = None
    prompt_voice: FloatArray | None = None
    windows: WindowRules = field(default_factory=WindowRules)
    digest: str = ""
    vision: Vision | None = None

    @property
    def prompts(self) -> PromptParts:
        """The parts that prompts need."""
        pictures = None if self.vision is None else self.vision.pictures
        return PromptParts(self.tokens, self.audio.config, pictures)

    @property
    def preparation(self) -> PreparerParts:
        """The parts that preparing needs."""
        voices = None if self.talker is None or self.vocoder is None else self.voices
        return PreparerParts(self.prompts, self.windows, self.prompt_voice, voices)

    @property
    def overhang(self) -> int:
        """Number of rows that the cache has in addition to its nominal capacity."""
        return overhang(self.audio.config, None if self.vision is None else self.vision.rows)


def generated_rows(max_tokens: int) -> int:
    """Return the largest number of rows that a unit adds after its input.

    These rows are the id that ends an interrupted turn, the generated ids, and the closing ids.
    """
    return 1 + max_tokens + CLOSING_ROWS


def overhang(audio: AudioConfig, image_rows: int | None) -> int:
    """Return the number of rows of a unit with default options, audio and one unsliced frame.

    The cache has this number of extra rows, so that the unit that reaches the nominal capacity can
    be completed. A unit that needs even more rows is refused. `image_rows` is the number of
    embeddings of a frame, or None if the model refuses frames.
    """
    seen = 0 if image_rows is None else duplex_rows((None,), image_rows)
    generated = generated_rows(ConversationOptions.max_new_speak_tokens_per_chunk)
    return 1 + seen + UNIT_POSITIONS // audio.pool + generated


def load_parts(
    directory: Path,
    *,
    slot_count: int,
    context_capacity: int,
    device: str,
    dtype: str,
    turn_rows: int = TURN_ROWS,
    context_share: float = 1.0,
    preparation: PreparerParts | None = None,
) -> ModelParts:
    """Load all parts in the directory. Raises `CheckpointError` if one cannot be used.

    Each slot reserves `context_share` of the memory of its context; see `PageTable`.
    `preparation` is what `load_preparer_parts` has read from the same directory before.
    """
    checkpoint = Checkpoint(directory)
    preparation = preparation or load_preparer_parts(directory)
    config, place, kind = checkpoint.config, torch.device(device), torch_dtype(dtype)
    precision.configure(place)
    tokens, heard = preparation.prompts.tokens, preparation.prompts.audio
    vision = Vision.from_checkpoint(checkpoint, place, kind)
    capacity = context_capacity + overhang(heard, None if vision is None else vision.rows)
    llm = LanguageModel(config, slot_count, capacity, place, kind, context_share)
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
        talker = modules["tts."] = Talker(config, slot_count, place, kind, rows=turn_rows)
        _check_talker(talker, llm, tokens)
    unused = checkpoint.load_all(modules)
    if surprising := [name for name in unused if not name.startswith(TRAINING_TENSORS)]:
        log.warning("%s: tensors that the model does not use: %s", directory, surprising)
    _speed_up(llm, "LLM")
    if talker is not None:
        talker.fold()
        _speed_up(talker, "talker")
    folder, vocoder = directory / VOCODER_FOLDER, None
    if preparation.voices is not None:
        vocoder = _load_vocoder(folder, preparation.voices, slot_count, device)
    elif talker is not None:
        log.warning("%s has no voice or no vocoder: answers are text without speech", folder)
    _warm_up(audio, vocoder)
    return ModelParts(
        name=_name(directory, checkpoint),
        tokens=tokens,
        llm=llm,
        audio=audio,
        talker=talker,
        vocoder=vocoder,
        voices=preparation.voices,
        prompt_voice=preparation.prompt_voice,
        digest=f"{checkpoint.digest()} {dtype} {context_capacity} {turn_rows}",
        windows=preparation.windows,
        vision=vision,
    )


def _speed_up(part: LanguageModel | Talker, name: str) -> None:
    """Use the kernels of a GPU, or the packed weights of a CPU."""
    match part.model.norm.weight.device.type:
        case "cuda":
            part.model.use_kernels(name)
        case "cpu":
            pack_products(part, name)
        case _:
            pass


def _warm_up(audio: AudioEncoder, vocoder: SpeechVocoder | None) -> None:
    """Run the stages that have padded batches once for each padded size, if the device has them."""
    if audio.has_buckets:
        audio.warm_up()
    if vocoder is not None and vocoder.has_buckets:
        vocoder.warm_up()


def _check_talker(talker: Talker, llm: LanguageModel, tokens: Tokens) -> None:
    """Raise `CheckpointError` unless the talker fits the LLM and the tokenizer."""
    dims = talker.dims
    if dims.llm_hidden_size != llm.hidden_size:
        raise CheckpointError(f"tts_config: llm_dim is {dims.llm_hidden_size}, not hidden_size")
    if max(len(tokens) - 1, dims.bos, dims.text_end) >= dims.text_rows:
        raise CheckpointError(f"tts_config: num_text_tokens is {dims.text_rows}, too few")


def _load_vocoder(folder: Path, voices: Voices, slot_count: int, device: str) -> SpeechVocoder:
    """Load a vocoder with memory for the longest voice prompt; check that it accepts `voices`."""
    if (folder / harmonic.CONFIG).exists():
        return HarmonicVocoder.load(folder, slot_count=slot_count, device=device)
    voice, networks = voices.built_in, voices.networks
    trials = [] if voice is None else [("the built-in voice", voice)]
    if networks is not None:
        silence = np.zeros(INPUT_SAMPLE_RATE, np.float32)
        trials.append(("what the voice networks make", networks.read(silence)))
    frames = prompt_room(voice, reads_clips=networks is not None)
    options = VocoderOptions(max_prompt_frames=frames)
    vocoder = Vocoder.load(folder, slot_count=slot_count, device=device, options=options)
    for what, trial in trials:
        try:
            vocoder.prime(0, trial)
        except VocoderError as error:
            raise CheckpointError(f"{folder}: {what}: {error}") from error
    vocoder.reset(0)
    return vocoder


def prompt_room(voice: VocoderVoice | None, *, reads_clips: bool) -> int:
    """Return the number of mel frames of the longest voice, built in or made from a clip."""
    own = 0 if voice is None else len(voice.prompt_mel)
    return max(own, MEL_FRAMES_PER_TOKEN * MAX_VOICE_TOKENS if reads_clips else 0)


def _name(directory: Path, checkpoint: Checkpoint) -> str:
    kind = read_field(checkpoint.config, "model_type", str, directory.name)
    version = checkpoint.config.get("version")
    return kind if version is None else f"{kind}-{version}"
