"""The two networks that read a voice clip: speech tokens, and what sets the speaker apart.

Decides what they are given and what may come back; runs on the CPU, in any thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingTypeStubs]  it ships none
import soxr  # pyright: ignore[reportMissingTypeStubs]  it ships none
import torch
from numpy.typing import NDArray
from torch.nn import functional

from duplane.worker.model.checkpoint import CheckpointError
from duplane.worker.model.mel import FFT_SIZE, HOP, LogMel, dynamic_floor
from duplane.worker.model.types import INPUT_SAMPLE_RATE, FloatArray
from duplane.worker.model.vocoder_input import VocoderVoice
from duplane.worker.model.voice_features import PROMPT_RATE, prompt_mel, speaker_banks

TOKENIZER_FILE = "speech_tokenizer_v2_25hz.onnx"
SPEAKER_FILE = "campplus.onnx"
MEL_BINS = 128
MEL_FRAMES_PER_TOKEN = 2
TOKEN_SAMPLES = 640
"""Samples of the clip behind one speech token."""
FEWEST_SAMPLES = INPUT_SAMPLE_RATE // 10


def has_networks(folder: Path) -> bool:
    """Whether a vocoder's folder has both."""
    return (folder / TOKENIZER_FILE).exists() and (folder / SPEAKER_FILE).exists()


class VoiceNetworks:
    """Both networks, loaded from the vocoder's folder.

    The tokenizer maps log-mel `[1, 128, frames]` and its length, int32 `[1]`, to tokens; the
    speaker network maps filter banks `[1, frames, 80]` to an embedding. As names of inputs and
    outputs differ between exports, they are told apart by their order.
    """

    def __init__(self, tokenizer: Path, speaker: Path, *, max_tokens: int) -> None:
        """Load both; clips are cut to `max_tokens`. `CheckpointError` for unusable files."""
        self._tokenizer = _session(tokenizer, inputs=2)
        self._speaker = _session(speaker, inputs=1)
        self._log_mel = LogMel(MEL_BINS)
        self.max_tokens = max_tokens

    @classmethod
    def load(cls, folder: Path, *, max_tokens: int) -> VoiceNetworks | None:
        """Load them where the folder has both, else None."""
        if not has_networks(folder):
            return None
        return cls(folder / TOKENIZER_FILE, folder / SPEAKER_FILE, max_tokens=max_tokens)

    @torch.inference_mode()
    def read(self, clip: FloatArray) -> VocoderVoice:
        """Read a voice from `[n]` samples at 16 kHz, of which the first `max_tokens` count.

        Raises ValueError for a clip that is too short.
        """
        if len(clip) < FEWEST_SAMPLES:
            raise ValueError(f"has {len(clip)} samples, at least {FEWEST_SAMPLES} make a voice")
        clip = clip[: self.max_tokens * TOKEN_SAMPLES]
        samples = torch.tensor(clip)
        tokens = self._tokens(samples)
        wide = cast("Any", soxr).resample(clip, INPUT_SAMPLE_RATE, PROMPT_RATE)
        mel = prompt_mel(torch.tensor(wide), MEL_FRAMES_PER_TOKEN * len(tokens))
        banks = speaker_banks(samples)[None].numpy()
        embedding = _run(self._speaker, banks)
        return VocoderVoice(tokens, mel.numpy(), embedding.reshape(-1).astype(np.float32))

    def _tokens(self, samples: torch.Tensor) -> NDArray[np.int64]:
        """The speech tokens of a clip, 25 per second."""
        features = self._features(samples)
        length = np.array([features.shape[-1]], np.int32)
        found = _run(self._tokenizer, features, length).reshape(-1)[: self.max_tokens]
        if not np.issubdtype(found.dtype, np.integer) or not len(found):
            raise CheckpointError(f"{TOKENIZER_FILE} gave {len(found)} tokens of {found.dtype}")
        return found.astype(np.int64)

    def _features(self, samples: torch.Tensor) -> FloatArray:
        """Whisper's log-mel of the clip alone, `[1, 128, n // 160]`: nothing is padded to 30 s."""
        margin = FFT_SIZE // 2
        padded = functional.pad(samples[None], (margin, margin), mode="reflect")
        power = self._log_mel.power(padded)[:, : len(samples) // HOP]
        features = self._log_mel.scale(power, dynamic_floor(power.amax()))
        return features.transpose(1, 2).contiguous().numpy()


def _session(path: Path, *, inputs: int) -> Any:
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
