"""What is measured of a voice clip: mel for the vocoder's prompt, filter banks for the speaker.

Pure functions over samples; knows nothing of the networks that read them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers.audio_utils import mel_filter_bank

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


def prompt_mel(samples: Tensor, frames: int) -> Tensor:
    """Map `[n]` at 24 kHz to natural-log mel `[frames, 80]`, 50 frames per second.

    Magnitude (not power) in 80 Slaney bands up to 8 kHz. A frame is centred on its hop; the edges
    are mirrored. There are n // 480 frames; the last is repeated, or later ones are dropped, to
    give `frames`, twice the clip's speech tokens. Raises `ValueError` for a clip without a frame
    or too short to mirror.
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

    Log power in 80 bands from 20 Hz to 8 kHz as Kaldi computes it by default, without dither: no
    frame reaches over the edges, each has its mean removed, is pre-emphasised and goes through the
    "povey" window. The mean over time is subtracted at the end. Raises `ValueError` for a clip
    shorter than a frame.
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
    """Weights `[frequencies, bands]`, of equal area."""
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
    """Weights `[frequencies, bands]`, triangles on the mel axis."""
    return mel_filter_bank(
        num_frequency_bins=SPEAKER_FFT // 2 + 1,
        num_mel_filters=SPEAKER_BINS,
        min_frequency=SPEAKER_BOTTOM_HERTZ,
        max_frequency=SPEAKER_RATE / 2,
        sampling_rate=SPEAKER_RATE,
        mel_scale="kaldi",
        triangularize_in_mel_space=True,
    ).astype(np.float32)
