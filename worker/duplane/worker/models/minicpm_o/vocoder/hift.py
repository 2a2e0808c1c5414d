"""The HiFT generator: maps mel frames to samples, and keeps state between the chunks of a turn.

Sources: HiFTNet (https://arxiv.org/abs/2309.09493), Snake (https://arxiv.org/abs/2006.08195), and
`HiFTGenerator` of the package `stepaudio2` in minicpmo-utils 1.0.6.
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

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, field, section

F0_LAYERS = 5


@dataclass(frozen=True)
class HiFTConfig:
    """Dimensions of the HiFT generator; the defaults are those of the released model."""

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
        """Read hift_dims.json; absent fields have the values of the released model."""
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
        """The number of samples per mel frame."""
        return math.prod(self.upsample_rates) * self.hop_len


def _sizes(config: Mapping[str, Any], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value: object = config.get(name, default)
    sizes = tuple(cast("Sequence[object]", value)) if isinstance(value, list | tuple) else ()
    if len(sizes) != len(default) or not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointError(f"{name} is {value!r}, not {len(default)} whole numbers")
    return cast("tuple[int, ...]", sizes)


class Snake(nn.Module):
    """The activation x + sin(alpha x)^2 / alpha, with one alpha per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self._rate = self._height = torch.empty(0)

    def prepare(self) -> None:
        """Compute the values that depend only on alpha."""
        self._rate = self.alpha[:, None]
        self._height = 1.0 / (self._rate + 1e-9)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, channels, time]` to the same shape."""
        wave = (x * self._rate).sin_()
        return torch.addcmul(x, wave, wave * self._height)


class SameConv1d(nn.Conv1d):
    """A convolution padded to keep the length; the parameters are those of `nn.Conv1d`.

    On a CPU it runs as a 2D convolution with channels last, which takes a half to a quarter of the
    time: the 1D kernels of oneDNN reorder input and output, and are slow for few channels.
    """

    def prepare(self) -> None:
        """Store the weight with channels last, if it is on a CPU."""
        if self.weight.device.type != "cpu":
            return
        self.weight = nn.Parameter(channels_last(self.weight.detach()), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """Map `[batch, in, time]` to `[batch, out, time]`."""
        if input.device.type != "cpu":
            return super().forward(input)
        return functional.conv2d(
            channels_last(input).unsqueeze(2),
            self.weight.unsqueeze(2),
            self.bias,
            padding=(0, (self.kernel_size[0] - 1) * self.dilation[0] // 2),
            dilation=(1, self.dilation[0]),
        ).squeeze(2)


def channels_last(x: Tensor) -> Tensor:
    """Return `[batch, channels, time]` with the memory layout of `[batch, time, channels]`."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def same_conv(inputs: int, outputs: int, kernel: int, dilation: int = 1) -> SameConv1d:
    """Return a `SameConv1d` whose padding keeps the length."""
    margin = (kernel - 1) * dilation // 2
    return SameConv1d(inputs, outputs, kernel, dilation=dilation, padding=margin)


class ResBlock(nn.Module):
    """Residual pairs of convolutions, the first one dilated, with Snake before each."""

    def __init__(self, channels: int, kernel: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            same_conv(channels, channels, kernel, dilation) for dilation in dilations
        )
        self.convs2 = nn.ModuleList(same_conv(channels, channels, kernel) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map `[batch, channels, time]` to the same shape; see `masked` for `mask`."""
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for snake1, conv1, snake2, conv2 in layers:
            x = x + conv2(masked(snake2(conv1(masked(snake1(x), mask))), mask))
        return x


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return `x` [batch, channels, time], with zeros where `mask` [batch, 1, time] is 0.

    The input of each convolution is masked. So the result of a short row is the same as if the row
    were computed alone, where the convolution pads it with zeros. If `mask` is None, all rows are
    equally long.
    """
    return x if mask is None else x * mask


def valid(lengths: Tensor | None, time: int) -> Tensor | None:
    """Return the mask [batch, 1, time] of the first `lengths` [batch] columns of each row."""
    if lengths is None:
        return None
    columns = torch.arange(time, device=lengths.device)
    return (columns < lengths[:, None]).to(torch.float32)[:, None]


class F0Predictor(nn.Module):
    """Predicts the fundamental frequency in Hz of each mel frame."""

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        width = config.f0_cond_channels
        sizes = [config.in_channels] + [width] * F0_LAYERS
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Conv1d(before, after, 3, padding=1), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, 1)

    def forward(self, mel: Tensor, frames: Tensor | None = None) -> Tensor:
        """Map `[batch, mel, frames]` to `[batch, frames]`, with 0 where a row is padding."""
        mask = valid(frames, mel.shape[2])
        for layer in self.condnet:
            mel = masked(layer(mel), mask)
        pitch = self.classifier(mel.transpose(1, 2)).squeeze(-1).abs()
        return pitch if mask is None else pitch * mask[:, 0]


class HarmonicSource(nn.Module):
    """Sines at the fundamental and its harmonics in voiced frames, noise in the others."""

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        self.l_linear = nn.Linear(config.nb_harmonics + 1, 1)

    def forward(self, f0: Tensor, noise: Tensor | None) -> Tensor:
        """Map `[batch, frames]` to `[batch, samples]`.

        `noise` is normal noise `[batch, samples]`; None means no noise. The phase starts at 0, is
        summed per frame and interpolated linearly to samples. In the reference each harmonic has
        its own noise; here one noise, scaled by the norm of the weights, replaces their weighted
        sum.
        """
        config = self.config
        scale = self.config.frame_samples
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
    """The whole HiFT generator. Parameters are named as in hift.pt after `fold_weight_norm`."""

    window: Tensor

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        base = config.base_channels
        spectrum = config.n_fft + 2
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
        """Compute the window, and the values that depend only on the parameters."""
        window = torch.hann_window(self.config.n_fft, dtype=torch.float64)
        self.window = window.to(self.conv_pre.weight.device, torch.float32)
        for module in self.modules():
            if isinstance(module, Snake | SameConv1d):
                module.prepare()

    def source(self, mel: Tensor, noise: Tensor | None, frames: Tensor | None = None) -> Tensor:
        """Map mel `[batch, mel, frames]` to its source signal `[batch, samples]`.

        `frames` [batch] is the number of frames of each row, after which the row is zero. If it is
        None, all frames of all rows are used.
        The samples after the end of a row have no meaning.
        """
        return self.m_source(self.f0_predictor(mel, frames), noise)

    def forward(self, mel: Tensor, source: Tensor, frames: Tensor | None = None) -> Tensor:
        """Map mel `[batch, mel, frames]` and its source signal `[batch, samples]` to samples.

        `frames` has the same meaning as in `source`.
        """
        config = self.config
        if frames is not None:  # mirror each row at its own end, as `stft` does at the common end
            last = (frames * config.frame_samples - 1)[:, None]
            columns = torch.arange(source.shape[1], device=source.device)
            source = source.gather(1, (last - (columns - last).abs()).clamp_(min=0))
        complex_ = torch.stft(
            source, config.n_fft, config.hop_len, window=self.window, return_complex=True
        )
        spectrum = torch.cat((complex_.real, complex_.imag), 1)
        columns = None if frames is None else frames * math.prod(config.upsample_rates) + 1
        spectrum = masked(spectrum, valid(columns, spectrum.shape[2]))
        kernels = len(config.resblock_kernel_sizes)
        x = self.conv_pre(mel)
        for level, up in enumerate(self.ups):
            x = up(masked(functional.leaky_relu(x, config.lrelu_slope), valid(frames, x.shape[2])))
            frames = None if frames is None else frames * config.upsample_rates[level]
            if level == len(self.ups) - 1:
                x, frames = functional.pad(x, (1, 0), mode="reflect"), columns
            mask = valid(frames, x.shape[2])
            down = self.source_downs[level](spectrum)
            if x.device.type == "cpu":  # once for all convolutions at this rate
                x, down = channels_last(x), channels_last(down)
            x = x + self.source_resblocks[level](down, mask)
            first = level * kernels
            mixed = self.resblocks[first](x, mask)
            for index in range(first + 1, first + kernels):
                mixed = mixed + self.resblocks[index](x, mask)
            x = mixed / kernels
        # As in the reference, only this leaky ReLU has torch's default slope.
        mask = valid(columns, x.shape[2])
        return self._samples(self.conv_post(masked(functional.leaky_relu(x), mask)), mask)

    def _samples(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map log magnitude and phase `[batch, n_fft + 2, columns]` to samples."""
        config = self.config
        bins = config.n_fft // 2 + 1
        magnitude = torch.exp(x[:, :bins]).clamp(max=1e2)
        spectrum = torch.polar(magnitude, torch.sin(x[:, bins:]))
        # The overlap-add is written out, because torch.istft waits for the device to check its
        # envelope. torch ships no type for the inverse transform.
        frames = cast("Tensor", cast("Any", torch.fft).irfft(spectrum, config.n_fft, 1))
        window = self.window[None, :, None]
        length = config.n_fft + config.hop_len * (frames.shape[2] - 1)
        weights = window.square().expand(1, -1, frames.shape[2])
        samples, envelope = (
            functional.fold(
                masked(values, mask), (1, length), (1, config.n_fft), stride=(1, config.hop_len)
            ).flatten(1)
            for values in (frames * window, weights)
        )
        margin = config.n_fft // 2
        inside = slice(margin, length - margin)
        if mask is not None:  # after the end of a row the envelope is 0
            envelope = envelope.clamp_(min=1e-9)
        samples = samples[:, inside] / envelope[:, inside]
        return samples.clamp(-config.audio_limit, config.audio_limit)
