"""A small vocoder for one fixed voice: a table of speech features, then sources and filters.

A table maps each speech token to two frames of log-mel, pitch and voicing. A small network maps the
frames to two spectral envelopes: one for a train of pulses, one for noise. Minimum-phase filters
with these envelopes shape the pulses and the noise. This design is duplane's own; the default
checkpoint uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers.audio_utils import hertz_to_mel

from duplane.worker.models.minicpm_o.batch_sizes import padded_size, padded_sizes
from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, field, read_json
from duplane.worker.models.minicpm_o.transfer import download, upload
from duplane.worker.models.minicpm_o.types import OUTPUT_SAMPLE_RATE
from duplane.worker.models.minicpm_o.vocoder.token_buffer import WINDOW_TOKENS
from duplane.worker.models.minicpm_o.vocoder.types import (
    Limits,
    VocoderChunk,
    VocoderError,
    VocoderVoice,
)
from duplane.worker.models.types import FloatArray

CONFIG = "vocoder.json"
WEIGHTS = "vocoder.safetensors"
KIND = "harmonic"

FRAME = 480
"""Samples of a frame of features; a token has two frames."""
TOKEN_FRAMES = 2
HOP = 240
FILTER_SIZE = 1024
CONTEXT_TOKENS = 4
"""Number of earlier tokens that affect the samples of a chunk."""
TOP_HERTZ = 8000.0
HIGHEST_HARMONIC = 11_000.0
NOISE_SECONDS = 10
NOISE_SEED = 0
VOICED = 0.5
_LEAST = 1e-9


@dataclass(frozen=True)
class HarmonicConfig:
    """The content of vocoder.json. `mel_bins` and `width` are dimensions of the network."""

    vocabulary: int
    mel_bins: int
    width: int
    silence_token_id: int
    lookahead: int

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> HarmonicConfig:
        """Read the configuration; raises `CheckpointError`."""
        if (kind := field(config, "type", str)) != KIND:
            raise CheckpointError(f"type is {kind!r}, not {KIND!r}")
        return cls(**{entry.name: field(config, entry.name, int) for entry in fields(cls)})

    @classmethod
    def load(cls, directory: Path) -> HarmonicConfig:
        """Read vocoder.json; raises `CheckpointError` that names the file."""
        path = directory / CONFIG
        try:
            return cls.from_json(read_json(path))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    @property
    def voice(self) -> VocoderVoice:
        """The only voice of the vocoder, which is in its weights: this value is empty."""
        none = np.zeros(0, np.float32)
        return VocoderVoice(np.zeros(0, np.int64), none.reshape(0, self.mel_bins), none)

    @property
    def frame_width(self) -> int:
        """The values of one frame: log-mel, the logarithm of the pitch in hertz, and voicing."""
        return self.mel_bins + 2


class HarmonicNetwork(nn.Module):
    """The table of tokens, and the network from frames to envelopes."""

    table: Tensor

    def __init__(self, config: HarmonicConfig) -> None:
        super().__init__()
        self.config = config
        frames = torch.zeros(config.vocabulary, TOKEN_FRAMES, config.frame_width)
        self.register_buffer("table", frames)
        self.conv1 = nn.Conv1d(config.frame_width, config.width, 3, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, 3, padding=1)
        self.conv3 = nn.Conv1d(config.width, 2 * config.mel_bins, 1)
        self.offsets = nn.Parameter(torch.zeros(2, 2, config.mel_bins))
        """Offsets of the log-mel, [unvoiced or voiced, pulses or noise, band]."""
        self.register_buffer("bands", _band_weights(config.mel_bins), persistent=False)
        self.register_buffer("window", torch.hann_window(2 * HOP), persistent=False)

    def envelopes(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Map frames [n, frames, values] to log amplitudes of pulses and noise, each in bands."""
        bins = self.config.mel_bins
        mel, is_voiced = frames[..., :bins], (frames[..., -1:] > VOICED).float()
        pitch = frames[..., bins : bins + 1] - 4.6  # centred: about zero at 100 Hz
        inputs = torch.cat((mel / 4.0 + 1.0, pitch, frames[..., -1:]), -1).transpose(1, 2)
        hidden = functional.gelu(self.conv1(inputs))
        found = self.conv3(functional.gelu(self.conv2(hidden))).transpose(1, 2)
        base = mel.unsqueeze(-2) + torch.lerp(
            self.offsets[0], self.offsets[1], is_voiced.unsqueeze(-1)
        )
        pulses, noise = (base + found.unflatten(-1, (2, bins))).unbind(-2)
        return pulses + (is_voiced - 1.0) * 20.0, noise

    def forward(self, frames: Tensor, phase: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Map frames [n, frames, values] to samples [n, frames * FRAME].

        `phase` [n] is the phase of the pulses before the second frame, in cycles. It is not the
        phase before the first frame, because the pitch of the first frame is not exact: it depends
        on the frame before. `noise` has a value for every sample. Also returns the phase after each
        sample.
        """
        pulses, phases = self._pulses(frames, phase)
        voiced, unvoiced = self.envelopes(frames)
        return self._filter(pulses, voiced) + self._filter(noise, unvoiced), phases

    def _pulses(self, frames: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
        """Return a band-limited pulse train that follows the pitch, and its phase in cycles."""
        pitch = frames[..., self.config.mel_bins]
        hertz = _stretched(pitch.exp()[:, None], FRAME)[:, 0].double()
        passed = (hertz / OUTPUT_SAMPLE_RATE).cumsum(-1)
        turns = phase[:, None] + passed - passed[:, FRAME - 1 : FRAME]
        count = (HIGHEST_HARMONIC / hertz).floor()
        angle = torch.pi * (turns - turns.floor())
        bottom = angle.sin()
        train = torch.where(
            bottom.abs() < 1e-6, 2.0 * count, ((2 * count + 1) * angle).sin() / bottom - 1.0
        )
        return train.float(), turns - turns.floor()

    def _filter(self, source: Tensor, envelope: Tensor) -> Tensor:
        """Filter a source [n, samples] with log amplitudes in bands [n, frames, bands]."""
        steps = FRAME // HOP
        bands = _stretched(envelope.transpose(1, 2), steps).transpose(1, 2)
        response = minimum_phase(bands @ cast("Tensor", self.bands))
        # A window is two hops long, and the next window begins one hop later. The first window
        # begins one hop before the first sample.
        padded = functional.pad(source, (HOP, HOP))
        frames = padded.unfold(-1, 2 * HOP, HOP) * cast("Tensor", self.window)
        response = torch.cat((response[:, :1], response), 1)
        shaped = _samples(_spectrum(frames) * response)
        count = shaped.shape[1]
        whole = functional.fold(
            shaped.transpose(1, 2),
            (1, (count - 1) * HOP + FILTER_SIZE),
            (1, FILTER_SIZE),
            stride=(1, HOP),
        )
        return whole[:, 0, 0, HOP : HOP + source.shape[1]]


def minimum_phase(logarithm: Tensor) -> Tensor:
    """Return the minimum-phase response of log amplitudes [..., FILTER_SIZE // 2 + 1]."""
    cepstrum = _samples(logarithm.to(torch.complex64))
    half = FILTER_SIZE // 2
    fold = torch.zeros(FILTER_SIZE, device=logarithm.device)
    fold[0] = fold[half] = 1.0
    fold[1:half] = 2.0
    return _spectrum(cepstrum * fold).exp()


def _spectrum(samples: Tensor) -> Tensor:
    # torch ships no type for the transforms.
    return cast("Any", torch.fft).rfft(samples, FILTER_SIZE)


def _samples(spectrum: Tensor) -> Tensor:
    return cast("Any", torch.fft).irfft(spectrum, FILTER_SIZE)


def _stretched(values: Tensor, factor: int) -> Tensor:
    """Interpolate [n, channels, frames] linearly to `factor` values per frame."""
    return functional.interpolate(values, scale_factor=factor, mode="linear", align_corners=False)


def _band_weights(bins: int) -> Tensor:
    """Return the weights [bands, frequencies] that interpolate bands to the filter's frequencies.

    All frequencies above the highest band have the weight of that band.
    """
    edges = np.linspace(0.0, hertz_to_mel(TOP_HERTZ, "slaney"), bins + 2)[1:-1]
    hertz = np.linspace(0.0, OUTPUT_SAMPLE_RATE / 2, FILTER_SIZE // 2 + 1)
    numbers = np.arange(bins, dtype=np.float64)
    at = np.asarray(np.interp(hertz_to_mel(hertz, "slaney"), edges, numbers))
    weights = np.maximum(0.0, 1.0 - np.abs(at - numbers[:, None]))
    return torch.tensor(weights, dtype=torch.float32)


@dataclass
class _Turn:
    """The turn of one slot: its last tokens, and the samples decoded so far."""

    tokens: list[int]
    position: int = 0


class HarmonicVocoder:
    """The vocoder of `slot_count` slots; see `loader.SpeechVocoder`.

    On a CUDA device it `has_buckets`: it pads batches to few sizes (see `batch_sizes`) and all
    chunks to the longest one, because CUDA plans the transforms of each new shape.
    """

    def __init__(self, network: HarmonicNetwork, *, slot_count: int) -> None:
        config = network.config
        self.network = network.requires_grad_(False).eval()
        self.device = network.table.device
        self.has_buckets = self.device.type == "cuda"
        self.silence_token_id, self.lookahead = config.silence_token_id, config.lookahead
        self.limits = Limits(
            vocabulary=config.vocabulary,
            stride=TOKEN_FRAMES,
            mel_width=config.mel_bins,
            speaker_width=0,
            lookahead=config.lookahead,
            max_prompt_frames=0,
            max_chunk_tokens=WINDOW_TOKENS + config.lookahead,
            min_first_frames=1,
        )
        generator = torch.Generator().manual_seed(NOISE_SEED)
        count = NOISE_SECONDS * OUTPUT_SAMPLE_RATE
        self._noise = torch.randn(count, generator=generator).to(self.device)
        self._phases = torch.zeros(slot_count, dtype=torch.float64, device=self.device)
        self._turns: list[_Turn | None] = [None] * slot_count

    @classmethod
    def load(cls, directory: Path, *, slot_count: int, device: str = "cpu") -> HarmonicVocoder:
        """Load vocoder.json and vocoder.safetensors; raises `CheckpointError`."""
        network = HarmonicNetwork(HarmonicConfig.load(directory))
        path = directory / WEIGHTS
        try:
            state = cast("Any", safetensors.torch).load_file(path)
            network.load_state_dict({name: value.float() for name, value in state.items()})
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return cls(network.to(device), slot_count=slot_count)

    @property
    def memory_bytes(self) -> int:
        """The size of all weights, tables and state."""
        owned = (*self.network.parameters(), *self.network.buffers(), self._noise, self._phases)
        return sum(tensor.nbytes for tensor in owned)

    def prime(
        self, slot: int, voice: VocoderVoice, *, seed: int | None = None, is_quick: bool = False
    ) -> None:
        """Start the slot's first turn. Nothing but `slot` has an effect here."""
        del voice, seed, is_quick
        self.start_turn(slot)

    def has_prompt(self, slot: int) -> bool:
        """Return True: the voice has no prompt, so `start_turn` is quick."""
        del slot
        return True

    def start_turn(self, slot: int) -> None:
        """Begin a turn of the slot."""
        self._turns[slot] = _Turn([self.silence_token_id] * CONTEXT_TOKENS)
        self._phases[slot] = 0.0

    def decode(self, chunks: Sequence[VocoderChunk]) -> list[FloatArray]:
        """Decode chunks to float32 samples at 24 kHz, in the same order.

        A chunk gives 960 samples per token, not counting lookahead.
        """
        return [self.decode_mel([chunk], self.encode([chunk]))[0] for chunk in chunks]

    @torch.inference_mode()
    def encode(self, chunks: Sequence[VocoderChunk]) -> list[Tensor]:
        """Look up the frames [frames, values] of one chunk of each of several slots.

        The result includes the frames of earlier tokens and of the lookahead. In the last chunk of
        a turn the lookahead is silence.
        """
        found: list[Tensor] = []
        for chunk in chunks:
            turn = self._turn(chunk.slot)
            self.limits.check_chunk(chunk, is_first=turn.position == 0)
            ahead = [self.silence_token_id] * self.lookahead if chunk.is_last else []
            tokens = upload([*turn.tokens, *chunk.tokens, *ahead], self.device)
            found.append(self.network.table[tokens].flatten(0, 1))
        return found

    @torch.inference_mode()
    def decode_mel(
        self, chunks: Sequence[VocoderChunk], mels: Sequence[Tensor]
    ) -> list[FloatArray]:
        """Compute the samples for the frames of `encode`, for all slots together.

        After an exception the call can be repeated for the same chunks, with the same result.
        """
        slots = [chunk.slot for chunk in chunks]
        if self.has_buckets:
            count = padded_size(len(slots)) - len(slots)
            slots, mels = [*slots, *slots[-1:] * count], [*mels, *[mels[-1]] * count]
        # Frames after a chunk do not affect its samples, so padding does not change them.
        frames = pad_sequence(list(mels), batch_first=True)
        if self.has_buckets:
            frames = functional.pad(frames, (0, 0, 0, self._most_frames - frames.shape[1]))
        starts = [self._turn(slot).position for slot in slots]
        offsets = torch.arange(frames.shape[1] * FRAME, device=self.device)
        at = upload(starts, self.device)[:, None] + offsets
        noise = self._noise[at % len(self._noise)]
        samples, phases = self.network(frames, self._phases[upload(slots, self.device)], noise)
        done = [frame * FRAME for frame in self._counts(chunks)]
        context = CONTEXT_TOKENS * TOKEN_FRAMES * FRAME
        rows = download(samples[: len(done)])
        results = [row[context : context + count] for row, count in zip(rows, done, strict=True)]
        for row, (chunk, count) in enumerate(zip(chunks, done, strict=True)):
            turn = self._turn(chunk.slot)
            if chunk.is_last:
                self._turns[chunk.slot] = None
                continue
            spoken = [*turn.tokens, *chunk.tokens][: len(turn.tokens) + count // FRAME // 2]
            turn.tokens, turn.position = spoken[-CONTEXT_TOKENS:], turn.position + count
            self._phases[chunk.slot] = phases[row, count + FRAME - 1]
        return results

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute a batch of every padded size once. No state changes."""
        for count in padded_sizes(len(self._phases)):
            frames = torch.zeros(count, self._most_frames, self.network.config.frame_width)
            noise = torch.zeros(count, self._most_frames * FRAME, device=self.device)
            self.network(frames.to(self.device), self._phases.new_zeros(count), noise)

    @property
    def most_rows(self) -> int:
        """The maximum number of chunks in one call of `encode`: one of each slot."""
        return len(self._turns)

    def capture(self) -> None:
        """Do nothing: its few launches are not captured."""

    @property
    def _most_frames(self) -> int:
        """The number of frames of the longest chunk, with its context and its lookahead."""
        tokens = CONTEXT_TOKENS + self.limits.max_chunk_tokens + self.lookahead
        return TOKEN_FRAMES * tokens

    def _counts(self, chunks: Sequence[VocoderChunk]) -> Iterator[int]:
        """Yield, for each chunk, the number of frames that are decoded."""
        for chunk in chunks:
            tokens = len(chunk.tokens) - (0 if chunk.is_last else self.lookahead)
            yield tokens * TOKEN_FRAMES

    def skip(self, chunks: Sequence[VocoderChunk]) -> None:
        """Do nothing: no state lasts longer than a turn."""

    def repeat(self, chunk: VocoderChunk, *, is_recent: bool) -> None:
        """Restore the state after `chunk`, an earlier chunk of the open turn."""
        del is_recent
        self.decode([chunk])

    def reset(self, slot: int) -> None:
        """Remove the slot's turn and zero its state."""
        self._turns[slot] = None
        self._phases[slot] = 0.0

    def is_clean(self, slot: int) -> bool:
        """True if the slot has no turn and its state is zero."""
        return self._turns[slot] is None and not bool(self._phases[slot])

    def _turn(self, slot: int) -> _Turn:
        turn = self._turns[slot]
        if turn is None:
            raise VocoderError(f"slot {slot} has no turn; start one")
        return turn
