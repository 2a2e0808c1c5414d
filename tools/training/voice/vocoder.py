"""Trains the vocoder to turn the codec's tokens into the sound of the assistant's voice."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.vocoder.harmonic import FRAME, HarmonicConfig, HarmonicNetwork
from duplane.worker.models.types import FloatArray
from training.torch_calls import backward, length, seed_all, take_step
from training.voice.codec import nearest, silence_token, token_features
from training.voice.features import MEL_BINS

WIDTH = 128
SIZES = (512, 1024, 2048)
CROP_TOKENS = 25
LOOKAHEAD = 3
RATE = 1.5e-3
WARM_UP = 20


def build_vocoder(table: Tensor, seed: int) -> HarmonicNetwork:
    """Build the network for the codec's table.

    Before training, its convolutions add nothing to the log-mels of the table.
    """
    config = HarmonicConfig(
        vocabulary=len(table),
        mel_bins=MEL_BINS,
        width=WIDTH,
        silence_token_id=silence_token(table),
        lookahead=LOOKAHEAD,
    )
    seed_all(seed)
    network = HarmonicNetwork(config)
    network.table.copy_(table)
    with torch.no_grad():
        for parameter in network.conv3.parameters():
            parameter.zero_()
        # A first estimate of the factor between log-mel and amplitude: the Hann window of the mel
        # has an area of 960, and higher bands are wider. Training refines it.
        network.offsets[:] = -5.0
    return network


def spectral_loss(made: Tensor, wanted: Tensor) -> Tensor:
    """Return the distance between the spectra of two sounds [n, samples], for several FFT sizes."""
    total = torch.zeros(())
    for size in SIZES:
        window = torch.hann_window(size)
        magnitudes = [
            torch.stft(sound, size, size // 4, window=window, return_complex=True).abs() + 1e-3
            for sound in (made, wanted)
        ]
        first, second = magnitudes
        total = total + (first.log() - second.log()).abs().mean()
        total = total + length(first - second) / (length(second) + 1e-3)
    return total / len(SIZES)


def train_vocoder(
    network: HarmonicNetwork,
    sounds: Sequence[FloatArray],
    *,
    steps: int,
    seed: int,
    batch: int = 8,
) -> None:
    """Train on random parts of the sounds.

    In 60 % of the inputs, frames are rounded to codec tokens.
    """
    generator = np.random.default_rng(seed)
    features = [token_features(samples) for samples in sounds]
    optimiser = torch.optim.AdamW(
        [
            {"params": [network.offsets], "lr_factor": 20.0},
            {
                "params": [
                    value for name, value in network.named_parameters() if name != "offsets"
                ],
                "lr_factor": 1.0,
            },
        ],
        lr=RATE,
        betas=(0.8, 0.98),
    )
    samples_per_token = FRAME * 2
    began, mean = time.process_time(), 0.0
    for step in range(steps):
        inputs, targets = list[Tensor](), list[FloatArray]()
        for _ in range(batch):
            index = int(generator.integers(len(sounds)))
            start = int(generator.integers(max(1, len(features[index]) - CROP_TOKENS)))
            stop = start + CROP_TOKENS
            own = features[index][start:stop]
            if generator.random() < 0.6:
                own = network.table[nearest(own, network.table)]
            short = CROP_TOKENS - len(own)
            silence = network.table[network.config.silence_token_id].expand(short, -1, -1)
            inputs.append(torch.cat((own, silence)).flatten(0, 1))
            sound = sounds[index][start * samples_per_token : stop * samples_per_token]
            targets.append(np.pad(sound, (0, CROP_TOKENS * samples_per_token - len(sound))))
        wanted = torch.tensor(np.stack(targets))
        noise = torch.randn(wanted.shape)
        phase = torch.rand(batch, dtype=torch.float64)
        made, _ = network(torch.stack(inputs), phase, noise)
        loss = spectral_loss(made, wanted)
        factor = min(1.0, (step + 1) / WARM_UP, 2 * (steps - step) / steps)
        for group in optimiser.param_groups:
            group["lr"] = RATE * factor * group["lr_factor"]
        optimiser.zero_grad()
        backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        take_step(optimiser)
        mean = 0.9 * mean + 0.1 * loss.item() if step else loss.item()
        if step % 10 == 9:
            seconds = time.process_time() - began
            sys.stderr.write(f"vocoder {step + 1}/{steps}  {seconds:.0f} s  loss {mean:.3f}\n")
