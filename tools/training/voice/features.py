"""Features of the assistant's voice: frames of log-mel, pitch and voicing, as in the vocoder."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from duplane.worker.models.minicpm_o.types import OUTPUT_SAMPLE_RATE
from duplane.worker.models.minicpm_o.vocoder.harmonic import FRAME
from duplane.worker.models.minicpm_o.vocoder.voice import PROMPT_BINS, prompt_mel
from duplane.worker.models.types import FloatArray

MEL_BINS = PROMPT_BINS
FRAME_WIDTH = MEL_BINS + 2
LOWEST_HERTZ, HIGHEST_HERTZ = 60.0, 260.0
LEAST_CORRELATION = 0.55
LEAST_LOG_MEL = -9.0
"""Frames whose mean log-mel is lower count as silent."""
SPAN = 1920


def frames_of(samples: FloatArray) -> FloatArray:
    """Return the frames [n // FRAME, FRAME_WIDTH] of samples [n] at 24 kHz."""
    count = len(samples) // FRAME
    mel = prompt_mel(torch.tensor(samples), count).numpy()
    pitch, is_voiced = _pitch(samples, count)
    is_voiced &= mel.mean(-1) > LEAST_LOG_MEL
    at = np.flatnonzero(is_voiced)
    known = np.log(pitch[at]) if len(at) else np.array([np.log(100.0)])
    smooth = np.interp(np.arange(count), at if len(at) else [0], known)
    return np.concatenate((mel, smooth[:, None], is_voiced[:, None]), -1).astype(np.float32)


def _pitch(samples: FloatArray, count: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return pitch in hertz and voicing of each frame, by normalised autocorrelation."""
    margin = (SPAN - FRAME) // 2
    padded = np.pad(samples, (margin, margin + FRAME))
    windows = np.lib.stride_tricks.sliding_window_view(padded, SPAN)[::FRAME][:count]
    windows = windows * np.hanning(SPAN)
    spectrum = np.fft.rfft(windows, 2 * SPAN)
    correlation = np.fft.irfft(np.square(np.abs(spectrum)))[:, :SPAN]
    taper = np.fft.irfft(np.square(np.abs(np.fft.rfft(np.hanning(SPAN), 2 * SPAN))))[:SPAN]
    shortest = int(OUTPUT_SAMPLE_RATE / HIGHEST_HERTZ)
    longest = int(OUTPUT_SAMPLE_RATE / LOWEST_HERTZ)
    lags = slice(shortest, longest)
    scores = correlation / (correlation[:, :1] + 1e-9) / (taper / taper[0] + 1e-3)
    best = scores[:, lags].argmax(-1) + shortest
    rows = np.arange(len(best))
    left, middle, right = (scores[rows, best + shift] for shift in (-1, 0, 1))
    curve = left - 2 * middle + right
    shift = np.where(np.abs(curve) > 1e-9, 0.5 * (left - right) / np.where(curve == 0, 1, curve), 0)
    return OUTPUT_SAMPLE_RATE / (best + shift.clip(-0.5, 0.5)), middle > LEAST_CORRELATION
