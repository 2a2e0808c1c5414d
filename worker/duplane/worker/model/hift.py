"""The HiFT generator: mel to samples, by a harmonic source and an inverse short-time transform.

Decides the layers; what is kept between chunks is the vocoder's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.model.checkpoint import CheckpointError, field, section

F0_LAYERS = 5


@dataclass(frozen=True)
class HiFTConfig:
    """Dimensions of the generator; the defaults are those of the released model."""

    in_channels: int = 80
    base_channels: int = 512
    nb_harmonics: int = 8
    sampling_rate: int = 24_000
    nsf_alpha: float = 0.1
    nsf_sigma: float = 0.003
    nsf_voiced_threshold: float = 10.0
    upsample_rates: tuple[int, ...] = (8, 5, 3)
    upsample_kernel_sizes: tuple[int, ...] = (16, 11, 7)
    n_fft: int = 16
    hop_len: int = 4
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    source_resblock_kernel_sizes: tuple[int, ...] = (7, 7, 11)
    resblock_dilations: tuple[int, ...] = (1, 3, 5)
    lrelu_slope: float = 0.1
    audio_limit: float = 0.99
    f0_cond_channels: int = 512

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> HiFTConfig:
        """Read hift_dims.json; absent values are the released model's."""
        base = cls()
        istft = section(config, "istft") if "istft" in config else {}
        return cls(
            in_channels=field(config, "in_channels", int, base.in_channels),
            base_channels=field(config, "base_channels", int, base.base_channels),
            nb_harmonics=field(config, "nb_harmonics", int, base.nb_harmonics),
            upsample_rates=_sizes(config, "upsample_rates", base.upsample_rates),
            upsample_kernel_sizes=_sizes(
                config, "upsample_kernel_sizes", base.upsample_kernel_sizes
            ),
            n_fft=field(istft, "n_fft", int, base.n_fft),
            hop_len=field(istft, "hop_len", int, base.hop_len),
            f0_cond_channels=field(config, "f0_cond_channels", int, base.f0_cond_channels),
        )

    @property
    def frame_samples(self) -> int:
        """Samples per mel frame."""
        return math.prod(self.upsample_rates) * self.hop_len


def _sizes(config: Mapping[str, Any], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value: object = config.get(name, default)
    sizes = tuple(cast("Sequence[object]", value)) if isinstance(value, list | tuple) else ()
    if len(sizes) != len(default) or not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointError(f"{name} is {value!r}, not {len(default)} whole numbers")
    return cast("tuple[int, ...]", sizes)


class Snake(nn.Module):
    """x + sin(alpha x)^2 / alpha, with an alpha per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self._rate = self._height = torch.empty(0)

    def prepare(self) -> None:
        """Lay out what depends on alpha alone."""
        self._rate = self.alpha[:, None]
        self._height = 1.0 / (self._rate + 1e-9)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape `[batch, channels, time]`."""
        wave = (x * self._rate).sin_()
        return torch.addcmul(x, wave, wave * self._height)


FEW_CHANNELS = 16


class SameConv1d(nn.Conv1d):
    """A convolution padded to keep the length; parameters are those of `nn.Conv1d`.

    On a CPU, oneDNN fills channels up to the width of a vector. Where a small model has fewer,
    one matrix product over the kernel's windows takes less than half the time.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map `[batch, in, time]` to `[batch, out, time]`."""
        is_narrow = self.in_channels <= FEW_CHANNELS and input.device.type == "cpu"
        if not is_narrow or self.bias is None:
            return super().forward(input)
        kernel, dilation = self.kernel_size[0], self.dilation[0]
        margin = (kernel - 1) * dilation // 2
        padded = functional.pad(input, (margin, margin))
        batch, channel, time = padded.stride()
        windows = padded.as_strided(
            (*input.shape[:2], kernel, input.shape[2]), (batch, channel, dilation * time, time)
        )
        weight = self.weight.flatten(1).expand(len(input), -1, -1)
        return torch.baddbmm(self.bias[:, None], weight, windows.flatten(1, 2))


def same_conv(inputs: int, outputs: int, kernel: int, dilation: int = 1) -> SameConv1d:
    """Make one."""
    margin = (kernel - 1) * dilation // 2
    return SameConv1d(inputs, outputs, kernel, dilation=dilation, padding=margin)


class ResBlock(nn.Module):
    """Pairs of convolutions, the first of each pair dilated, with Snake before every one."""

    def __init__(self, channels: int, kernel: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            same_conv(channels, channels, kernel, dilation) for dilation in dilations
        )
        self.convs2 = nn.ModuleList(same_conv(channels, channels, kernel) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape `[batch, channels, time]`."""
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for snake1, conv1, snake2, conv2 in layers:
            x = x + conv2(snake2(conv1(snake1(x))))
        return x


class F0Predictor(nn.Module):
    """Mel to the fundamental frequency in Hz, one value per frame."""

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        width = config.f0_cond_channels
        sizes = [config.in_channels] + [width] * F0_LAYERS
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Conv1d(before, after, 3, padding=1), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, 1)

    def forward(self, mel: Tensor) -> Tensor:
        """Map `[batch, mel, frames]` to `[batch, frames]`."""
        return self.classifier(self.condnet(mel).transpose(1, 2)).squeeze(-1).abs()


class HarmonicSource(nn.Module):
    """A sine at the fundamental and its harmonics where there is a voice, noise elsewhere."""

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        self.l_linear = nn.Linear(config.nb_harmonics + 1, 1)

    def forward(self, f0: Tensor, noise: Tensor | None) -> Tensor:
        """Map `[batch, frames]` to `[batch, samples]`.

        `noise` is normal noise `[batch, samples]`; None means silence in its place. The phase
        starts at 0 and is summed per frame, then drawn out to samples linearly. Each harmonic
        has noise of its own; their weighted sum is one noise of the weights' norm.
        """
        config, scale = self.config, self.config.frame_samples
        multiples = torch.arange(1, config.nb_harmonics + 2, device=f0.device, dtype=f0.dtype)
        turns = (f0[:, None] * multiples[:, None] / config.sampling_rate) % 1
        phase = turns.cumsum(-1) * (2 * math.pi) * scale
        phase = functional.interpolate(phase, scale_factor=float(scale), mode="linear")
        voiced = (f0 > config.nsf_voiced_threshold).to(f0.dtype).repeat_interleave(scale, 1)
        weight, bias = self.l_linear.weight, self.l_linear.bias
        wave = (weight @ phase.sin_()).squeeze(1) * (config.nsf_alpha * voiced)
        if noise is not None:
            strength = voiced * config.nsf_sigma + (1 - voiced) * (config.nsf_alpha / 3)
            wave = torch.addcmul(wave, strength * weight.square().sum().sqrt(), noise)
        return torch.tanh(wave + bias)


class HiFT(nn.Module):
    """The whole generator; parameters are named as in hift.pt, weight norm folded."""

    window: Tensor

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        base, spectrum = config.base_channels, config.n_fft + 2
        rates = config.upsample_rates
        widths = [base // 2**level for level in range(len(rates) + 1)]
        self.m_source = HarmonicSource(config)
        self.f0_predictor = F0Predictor(config)
        self.conv_pre = nn.Conv1d(config.in_channels, base, 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(wide, narrow, kernel, rate, padding=(kernel - rate) // 2)
            for wide, narrow, rate, kernel in zip(
                widths, widths[1:], rates, config.upsample_kernel_sizes, strict=False
            )
        )
        downs = [math.prod(rates[level + 1 :]) for level in range(len(rates))]
        self.source_downs = nn.ModuleList(
            nn.Conv1d(spectrum, width, 1)
            if down == 1
            else nn.Conv1d(spectrum, width, 2 * down, down, padding=down // 2)
            for width, down in zip(widths[1:], downs, strict=True)
        )
        dilations = config.resblock_dilations
        self.source_resblocks = nn.ModuleList(
            ResBlock(width, kernel, dilations)
            for width, kernel in zip(widths[1:], config.source_resblock_kernel_sizes, strict=True)
        )
        self.resblocks = nn.ModuleList(
            ResBlock(width, kernel, dilations)
            for width in widths[1:]
            for kernel in config.resblock_kernel_sizes
        )
        self.conv_post = same_conv(widths[-1], spectrum, 7)
        self.register_buffer("window", torch.empty(0), persistent=False)

    def prepare(self) -> None:
        """Compute what depends on the parameters alone: the window, what Snake is made of."""
        window = torch.hann_window(self.config.n_fft, dtype=torch.float64)
        self.window = window.to(self.conv_pre.weight.device, torch.float32)
        for module in self.modules():
            if isinstance(module, Snake):
                module.prepare()

    def source(self, mel: Tensor, noise: Tensor | None) -> Tensor:
        """Map `[batch, mel, frames]` to the source signal `[batch, samples]`."""
        return self.m_source(self.f0_predictor(mel), noise)

    def forward(self, mel: Tensor, source: Tensor) -> Tensor:
        """Map mel `[batch, mel, frames]` and a source of as many frames to `[batch, samples]`."""
        spectrum = self._spectrum(source)
        kernels = len(self.config.resblock_kernel_sizes)
        x = self.conv_pre(mel)
        for level, up in enumerate(self.ups):
            x = up(functional.leaky_relu(x, self.config.lrelu_slope))
            if level == len(self.ups) - 1:
                x = functional.pad(x, (1, 0), mode="reflect")
            down = self.source_downs[level](spectrum)
            x = x + self.source_resblocks[level](down)
            first = level * kernels
            mixed = self.resblocks[first](x)
            for place in range(first + 1, first + kernels):
                mixed = mixed + self.resblocks[place](x)
            x = mixed / kernels
        # Here the reference leaves the slope at the library's default.
        return self._samples(self.conv_post(functional.leaky_relu(x)))

    def _spectrum(self, source: Tensor) -> Tensor:
        """Map `[batch, samples]` to real and imaginary parts, `[batch, n_fft + 2, columns]`."""
        config = self.config
        spectrum = torch.stft(
            source, config.n_fft, config.hop_len, window=self.window, return_complex=True
        )
        return torch.cat((spectrum.real, spectrum.imag), 1)

    def _samples(self, x: Tensor) -> Tensor:
        """Read log magnitude and phase, `[batch, n_fft + 2, columns]`, as samples."""
        config = self.config
        bins = config.n_fft // 2 + 1
        magnitude = torch.exp(x[:, :bins]).clamp(max=1e2)
        spectrum = torch.polar(magnitude, torch.sin(x[:, bins:]))
        # torch ships no type for the inverse transform.
        inverse = cast("Any", torch).istft
        samples = cast(
            "Tensor", inverse(spectrum, config.n_fft, config.hop_len, window=self.window)
        )
        return samples.clamp(-config.audio_limit, config.audio_limit)
