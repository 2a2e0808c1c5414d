"""Voices of the vocoder: made from a client's clip or built into a checkpoint.

The mel of the prompt is computed as in CosyVoice (https://arxiv.org/abs/2407.05407), the filter
banks for the speaker network as in CAM++ (https://arxiv.org/abs/2303.00332). Both follow the class
`Token2wav` of the package `stepaudio2` in minicpmo-utils 1.0.6. The speech tokenizer and the
speaker network are ONNX files.
"""

from __future__ import annotations

import hashlib
import threading
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingTypeStubs]  it ships none
import safetensors.numpy
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none
import soxr  # pyright: ignore[reportMissingTypeStubs]  it ships none
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers.audio_utils import mel_filter_bank

from duplane.worker.models.minicpm_o.audio.mel import FFT_SIZE, HOP, LogMel, dynamic_floor
from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.minicpm_o.vocoder.types import VocoderVoice
from duplane.worker.models.types import FloatArray, OptionError

PROMPT_VOICE = Path("assets", "system_ref_audio.wav")
SPOKEN_VOICE = Path("assets", "HT_ref_audio.wav")
VOCODER_VOICE = "voice.safetensors"
CACHED_VOICES = 64
"""Maximum number of voices of clips that are cached. Each has some hundred kilobytes."""

TOKENIZER_FILE = "speech_tokenizer_v2_25hz.onnx"
SPEAKER_FILE = "campplus.onnx"
MEL_BINS = 128
MEL_FRAMES_PER_TOKEN = 2
TOKEN_SAMPLES = 640
"""Samples of the clip per speech token."""
FEWEST_SAMPLES = INPUT_SAMPLE_RATE // 10

PROMPT_RATE = 24_000
PROMPT_FFT = 1920
PROMPT_HOP = 480
PROMPT_BINS = 80
PROMPT_TOP_HERTZ = 8000.0
PROMPT_FLOOR = 1e-5

SPEAKER_RATE = 16_000
SPEAKER_FRAME = 400
SPEAKER_HOP = 160
SPEAKER_FFT = 512
SPEAKER_BINS = 80
SPEAKER_BOTTOM_HERTZ = 20.0
PREEMPHASIS = 0.97


class Voices:
    """Chooses the vocoder's voice of a conversation. Several threads may use it concurrently.

    The voices of the most recently used clips are cached by the content of the clip. So several
    conversations with the same clip compute its voice once.

    - `networks` compute the voice of a client's clip.
    - `built_in`: the voice if the client sends no clip.
    """

    def __init__(
        self,
        networks: VoiceNetworks | None,
        built_in: VocoderVoice | None,
        count: int = CACHED_VOICES,
    ) -> None:
        self.networks, self.built_in = networks, built_in
        self._cache: LRUCache[bytes, VocoderVoice] = LRUCache(count)
        self._lock = threading.Lock()

    @property
    def reads_clips(self) -> bool:
        """Whether a client's clip can become the vocoder's voice."""
        return self.networks is not None

    def choose(
        self, tts_voice: FloatArray | None = None, llm_voice: FloatArray | None = None
    ) -> VocoderVoice | None:
        """Return the voice of the TTS clip, else of the LLM clip, else the built-in voice.

        Raises `OptionError` for a clip that cannot be used as a voice.
        """
        for name, clip in (("tts_voice", tts_voice), ("llm_voice", llm_voice)):
            if clip is not None and self.networks is not None:
                try:
                    return self._read(clip, self.networks)
                except ValueError as error:
                    raise OptionError(name, str(error)) from error
        return self.built_in

    def _read(self, clip: FloatArray, networks: VoiceNetworks) -> VocoderVoice:
        key = hashlib.blake2b(clip.tobytes(), digest_size=16).digest()
        with self._lock:
            voice = self._cache.get(key)
        if voice is None:
            voice = networks.read(clip)  # this takes seconds, so the lock is released
            with self._lock:
                self._cache[key] = voice
        return voice


def load_clip(path: Path) -> FloatArray | None:
    """Load the sound file of a voice: float32 [n] at 16 kHz. Return None if it does not exist."""
    if not path.exists():
        return None
    try:
        samples, rate = cast("Any", soundfile).read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return cast("Any", soxr).resample(samples.mean(axis=1), rate, INPUT_SAMPLE_RATE)


def load_vocoder_voice(directory: Path) -> VocoderVoice | None:
    """Load the vocoder's built-in voice from voice.safetensors, or return None without it."""
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


def has_networks(folder: Path) -> bool:
    """Whether the vocoder's folder has both networks."""
    return (folder / TOKENIZER_FILE).exists() and (folder / SPEAKER_FILE).exists()


class VoiceNetworks:
    """The speech tokenizer and the speaker network. They run on the CPU, in any thread.

    The tokenizer maps log-mel `[1, 128, frames]` and its length, int32 `[1]`, to tokens. The
    speaker network maps filter banks `[1, frames, 80]` to an embedding. Inputs and outputs are
    addressed by position, because their names differ between exported files.
    """

    def __init__(self, tokenizer: Path, speaker: Path, *, max_tokens: int) -> None:
        """Load both networks; raises `CheckpointError`. Clips are cut to `max_tokens` tokens."""
        self._tokenizer = _open_session(tokenizer, inputs=2)
        self._speaker = _open_session(speaker, inputs=1)
        self._log_mel = LogMel(MEL_BINS)
        self.max_tokens = max_tokens

    @classmethod
    def load(cls, folder: Path, *, max_tokens: int) -> VoiceNetworks | None:
        """Load both networks, or return None if the folder lacks one of them."""
        if not has_networks(folder):
            return None
        return cls(folder / TOKENIZER_FILE, folder / SPEAKER_FILE, max_tokens=max_tokens)

    @torch.inference_mode()
    def read(self, clip: FloatArray) -> VocoderVoice:
        """Compute the voice of a clip `[n]` at 16 kHz, cut to `max_tokens` tokens.

        Raises ValueError for a clip that is too short.
        """
        if len(clip) < FEWEST_SAMPLES:
            raise ValueError(f"has {len(clip)} samples, a voice needs at least {FEWEST_SAMPLES}")
        clip = clip[: self.max_tokens * TOKEN_SAMPLES]
        samples = torch.tensor(clip)
        tokens = self._tokens(samples)
        wide = cast("Any", soxr).resample(clip, INPUT_SAMPLE_RATE, PROMPT_RATE)
        mel = prompt_mel(torch.tensor(wide), MEL_FRAMES_PER_TOKEN * len(tokens))
        banks = speaker_banks(samples)[None].numpy()
        embedding = _run(self._speaker, banks)
        return VocoderVoice(tokens, mel.numpy(), embedding.reshape(-1).astype(np.float32))

    def _tokens(self, samples: torch.Tensor) -> NDArray[np.int64]:
        """Compute the speech tokens of a clip, 25 per second."""
        # Whisper's log-mel `[1, 128, n // 160]` of the clip, which is not padded to 30 s.
        margin = FFT_SIZE // 2
        padded = functional.pad(samples[None], (margin, margin), mode="reflect")
        power = self._log_mel.power(padded)[:, : len(samples) // HOP]
        scaled = self._log_mel.scale(power, dynamic_floor(power.amax()))
        features = scaled.transpose(1, 2).contiguous().numpy()
        length = np.array([features.shape[-1]], np.int32)
        found = _run(self._tokenizer, features, length).reshape(-1)[: self.max_tokens]
        if not np.issubdtype(found.dtype, np.integer) or not len(found):
            raise CheckpointError(f"{TOKENIZER_FILE} gave {len(found)} tokens of {found.dtype}")
        return found.astype(np.int64)


def _open_session(path: Path, *, inputs: int) -> Any:
    options = cast("Any", onnxruntime).SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = cast("Any", onnxruntime).InferenceSession(
            path, sess_options=options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    found = len(session.get_inputs())
    if found != inputs:
        raise CheckpointError(f"{path} has {found} inputs, not {inputs}")
    return session


def _run(session: Any, *values: NDArray[Any]) -> NDArray[Any]:
    names = [given.name for given in session.get_inputs()]
    return session.run(None, dict(zip(names, values, strict=True)))[0]


def prompt_mel(samples: Tensor, frames: int) -> Tensor:
    """Map `[n]` at 24 kHz to natural-log mel `[frames, 80]`, 50 frames per second.

    The 80 Slaney bands, up to 8 kHz, are computed from the magnitude, not from the power. Frames
    are centred on their hops, and the clip is reflected at its ends. If the clip has fewer than
    `frames` frames (n // 480), the last frame is repeated; if it has more, frames at the end are
    dropped. Raises `ValueError` for a clip that is too short to reflect.
    """
    margin = (PROMPT_FFT - PROMPT_HOP) // 2
    if len(samples) <= margin:
        raise ValueError(f"the voice has {len(samples)} samples at 24 kHz, at least {margin + 1}")
    window = torch.hann_window(PROMPT_FFT, device=samples.device)
    padded = functional.pad(samples[None], (margin, margin), mode="reflect")
    spectrum = torch.stft(
        padded, PROMPT_FFT, PROMPT_HOP, window=window, center=False, return_complex=True
    )[0]
    magnitude = (torch.view_as_real(spectrum).square().sum(-1) + 1e-9).sqrt()
    mel = torch.tensor(_prompt_filters(), device=samples.device).T @ magnitude
    mel = mel.clamp(min=PROMPT_FLOOR).log().T
    last = mel[-1:].expand(max(0, frames - len(mel)), -1)
    return torch.cat((mel[:frames], last))


def speaker_banks(samples: Tensor) -> Tensor:
    """Map `[n]` at 16 kHz, within [-1, 1], to `[1 + (n - 400) // 160, 80]`.

    These are Kaldi's default `fbank` features without dither: log power in 80 bands from 20 Hz to
    8 kHz. No frame extends over the ends of the clip. The mean of each frame is subtracted, then
    the frame is pre-emphasised and multiplied by the "povey" window. At the end the mean over time
    is subtracted. Raises `ValueError` for a clip shorter than a frame.
    """
    if len(samples) < SPEAKER_FRAME:
        raise ValueError(f"the voice has {len(samples)} samples at 16 kHz, at least 400")
    frames = samples.unfold(0, SPEAKER_FRAME, SPEAKER_HOP)
    frames = frames - frames.mean(1, keepdim=True)
    before = torch.cat((frames[:, :1], frames[:, :-1]), 1)
    window = torch.hann_window(SPEAKER_FRAME, periodic=False, device=samples.device).pow(0.85)
    frames = (frames - PREEMPHASIS * before) * window
    # torch ships no type for the transform.
    transform = cast("Any", torch.fft).rfft
    power = cast("Tensor", transform(frames, SPEAKER_FFT)).abs().square()
    banks = power @ torch.tensor(_speaker_filters(), device=samples.device)
    banks = banks.clamp(min=torch.finfo(torch.float32).eps).log()
    return banks - banks.mean(0, keepdim=True)


@cache
def _prompt_filters() -> NDArray[np.float32]:
    """Return the filters of `prompt_mel`, `[frequencies, bands]`. All have the same area."""
    return mel_filter_bank(
        num_frequency_bins=PROMPT_FFT // 2 + 1,
        num_mel_filters=PROMPT_BINS,
        min_frequency=0.0,
        max_frequency=PROMPT_TOP_HERTZ,
        sampling_rate=PROMPT_RATE,
        norm="slaney",
        mel_scale="slaney",
    ).astype(np.float32)


@cache
def _speaker_filters() -> NDArray[np.float32]:
    """Return the filters of `speaker_banks`, `[frequencies, bands]`: triangles on the mel scale."""
    return mel_filter_bank(
        num_frequency_bins=SPEAKER_FFT // 2 + 1,
        num_mel_filters=SPEAKER_BINS,
        min_frequency=SPEAKER_BOTTOM_HERTZ,
        max_frequency=SPEAKER_RATE / 2,
        sampling_rate=SPEAKER_RATE,
        mel_scale="kaldi",
        triangularize_in_mel_space=True,
    ).astype(np.float32)
