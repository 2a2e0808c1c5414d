"""The streaming audio encoder: maps the live audio of many slots to embeddings for the LLM.

Its parts are the mel spectrogram, Whisper's encoder with a cache for each slot, and the projector,
which ends with average pooling.
Source: `MiniCPMO45/modeling_minicpmo_unified.py` of OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from duplane.worker.models.minicpm_o.audio.clip import (
    ClipSegment,
    batches,
    clip_buckets,
    encode_batch,
    split_clips,
    warm_up_batches,
)
from duplane.worker.models.minicpm_o.audio.mel import CONTEXT_FRAMES, UNIT_FRAMES, MelStream
from duplane.worker.models.minicpm_o.audio.whisper import (
    UNIT_POSITIONS,
    AudioConfig,
    AudioProjector,
    LayerHistory,
    WhisperEncoder,
)
from duplane.worker.models.minicpm_o.batch_sizes import padded_size, padded_sizes
from duplane.worker.models.minicpm_o.layers import allocate
from duplane.worker.models.minicpm_o.transfer import upload

_CONTEXT_POSITIONS = CONTEXT_FRAMES // 2
RUN_UNITS = 32
"""Batches of `encode_run` with more units may have a size that `warm_up` has not run."""


class AudioEncoder(nn.Module):
    """Encodes the live audio of each slot unit by unit, and whole clips.

    `mel` buffers the live audio. The weights of `apm` and `audio_projection_layer` are loaded from
    the tensors of the checkpoint whose names begin with these names. The state of the slots is
    allocated once and reset, never freed.
    """

    cache: Tensor

    def __init__(
        self,
        config: AudioConfig,
        slot_count: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.apm = WhisperEncoder(config)
            self.audio_projection_layer = AudioProjector(config)
        allocate(self.apm, device, dtype)
        self.apm.pack()
        allocate(self.audio_projection_layer, device, dtype)
        self.mel = MelStream(config.mel_bins, slot_count, device)
        head_dim = config.width // config.head_count
        cache = torch.zeros(
            (config.layer_count, 2, slot_count, config.head_count, config.position_count, head_dim),
            device=device,
            dtype=dtype,
        )
        self.register_buffer("cache", cache, persistent=False)
        self._lengths = [0] * slot_count
        self.has_buckets = torch.device(device).type == "cuda"
        """Whether batches of units and of segments are padded to few sizes; see `batch_sizes`."""

    @property
    def unit_rows(self) -> int:
        """The number of embeddings of one unit."""
        return UNIT_POSITIONS // self.config.pool

    def cache_length(self, slot: int) -> int:
        """Return how many positions the slot's attention cache holds."""
        return self._lengths[slot]

    @torch.inference_mode()
    def encode(self, slots: Sequence[int]) -> Tensor:
        """Return embeddings [n, unit_rows, hidden] of the unit that `mel` last consumed per slot.

        The slots must be different; no result depends on another slot. After an exception the call
        can be repeated for the same units, with the same result.
        """
        features, is_first = self.mel.features(slots)
        device = features.device
        hidden = self._convolve(features, is_first)
        begins = [self._begin(slot) for slot in slots]
        rows, starts = upload([slots, begins], device).unsqueeze(-1).unbind()
        columns = starts + torch.arange(UNIT_POSITIONS, device=device)
        hidden = hidden + self.apm.embed_positions(columns)

        neighbours: slice | Tensor = rows[:, 0]
        if list(slots) == list(range(slots[0], slots[0] + len(slots))):
            neighbours = slice(slots[0], slots[0] + len(slots))
        span = max(begins) + UNIT_POSITIONS
        mask = None
        if min(begins) < max(begins):
            seen = torch.arange(span, device=device) < starts + UNIT_POSITIONS
            mask = seen[:, None, None]
        for layer, cache in zip(self.apm.layers, self.cache, strict=True):
            hidden = layer(hidden, mask, LayerHistory(cache, neighbours, rows, columns, span))
        embeds = self.audio_projection_layer(self.apm.layer_norm(hidden))
        for slot, begin in zip(slots, begins, strict=True):
            self._lengths[slot] = begin + UNIT_POSITIONS
        return embeds

    def _convolve(self, features: Tensor, is_first: list[bool]) -> Tensor:
        """Map the features of units [n, frames, mel_bins] to positions [n, positions, width]."""
        count = len(features)
        firsts = is_first
        if self.has_buckets:
            padding = padded_size(count) - count
            features = torch.cat((features, features[:1].expand(padding, -1, -1)))
            firsts = is_first + is_first[:1] * padding
        hidden = self.apm.convolve(features, upload(firsts, features.device))
        return hidden[:count, _CONTEXT_POSITIONS : _CONTEXT_POSITIONS + UNIT_POSITIONS]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the convolutions of units and the encoder of clips once for each padded size.

        No state changes.
        """
        weight = self.apm.conv1.weight
        for size in padded_sizes(max(len(self._lengths), RUN_UNITS)):
            features = torch.zeros((size, UNIT_FRAMES, self.config.mel_bins), device=weight.device)
            self._convolve(features, [False] * size)
        for batch in warm_up_batches(self.config):
            self.encode_segments(batch)

    @property
    def _last_begin(self) -> int:
        """The first column at which a unit may not begin, because its end would not fit.

        As in the reference, the unit needs room for its context frames, too.
        """
        return self.config.position_count - UNIT_FRAMES // 2

    @property
    def period_units(self) -> int:
        """The number of units that the cache holds before it begins anew."""
        return max(1, -(-self._last_begin // UNIT_POSITIONS))

    def _begin(self, slot: int) -> int:
        """Return the column where the slot's next unit begins: 0 if no unit fits after the last."""
        length = self._lengths[slot]
        return length if length < self._last_begin else 0

    @torch.inference_mode()
    def encode_run(self, slot: int, units: Sequence[tuple[Tensor, list[bool]]]) -> Tensor:
        """Return embeddings [units, unit_rows, hidden] of consecutive units of one slot.

        `units` are the results of `mel.features` for the slot, unit by unit. The result is as if
        `encode` had run for each unit, but units are encoded in one pass until the cache is full.
        """
        features = torch.cat([rows for rows, _ in units])
        is_first = [first for _, firsts in units for first in firsts]
        hidden = self._convolve(features, is_first)
        found: list[Tensor] = []
        while len(hidden):
            room = self._last_begin - self._begin(slot)
            count = max(1, -(-room // UNIT_POSITIONS))
            found.append(self._encode_together(slot, hidden[:count]))
            hidden = hidden[count:]
        return torch.cat(found)

    def _encode_together(self, slot: int, hidden: Tensor) -> Tensor:
        """Encode units [units, positions, width], all of which fit into the slot's cache.

        A unit attends to itself and to the units before it.
        """
        begin = self._begin(slot)
        device = hidden.device
        units = torch.arange(len(hidden), device=device).repeat_interleave(UNIT_POSITIONS)
        ends = begin + (units + 1) * UNIT_POSITIONS
        span = begin + len(units)
        mask = torch.arange(span, device=device) < ends[:, None]
        rows = upload([[slot]], device)
        columns = torch.arange(begin, span, device=device)[None]
        states = hidden.flatten(0, 1)[None] + self.apm.embed_positions(columns)
        for layer, cache in zip(self.apm.layers, self.cache, strict=True):
            history = LayerHistory(cache, slice(slot, slot + 1), rows, columns, span)
            states = layer(states, mask, history)
        states = self.apm.layer_norm(states)[0].unflatten(0, (-1, UNIT_POSITIONS))
        self._lengths[slot] = span
        return self.audio_projection_layer(states)

    def encode_clip(self, samples: np.ndarray) -> Tensor:
        """Encode a whole 16 kHz clip [n] to embeddings [rows, hidden], without a slot."""
        (segments,) = split_clips(self.config, [samples])
        weight = self.apm.conv1.weight
        none = torch.zeros((0, self.config.hidden), device=weight.device, dtype=weight.dtype)
        found = (rows for batch in self.batches(segments) for rows in self.encode_segments(batch))
        return torch.cat([none, *found])

    def batches(self, segments: Sequence[ClipSegment]) -> Iterator[Sequence[ClipSegment]]:
        """Group segments of clips, in order, into batches for `encode_segments`."""
        return batches(segments, self._clip_buckets)

    @property
    def _clip_buckets(self) -> Sequence[int]:
        return clip_buckets(self.config) if self.has_buckets else ()

    @torch.inference_mode()
    def encode_segments(
        self, segments: Sequence[ClipSegment], *, is_blockwise: bool = True
    ) -> list[Tensor]:
        """Encode segments of clips in one batch; see `clip.encode_batch`."""
        return encode_batch(
            self.apm,
            self.audio_projection_layer,
            self.mel.log_mel,
            segments,
            self._clip_buckets,
            is_blockwise=is_blockwise,
        )

    def reset(self, slot: int) -> None:
        """Zero all state of the slot."""
        self.mel.reset(slot)
        self.cache[:, :, slot].zero_()
        self._lengths[slot] = 0

    def is_clean(self, slot: int) -> bool:
        """True if all state of the slot is zero."""
        if self._lengths[slot]:
            return False
        return not bool(self.cache[:, :, slot].any()) and self.mel.is_clean(slot)
