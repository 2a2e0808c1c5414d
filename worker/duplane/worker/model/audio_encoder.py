"""The streaming audio front end: mel, Whisper encoder with slotted caches, projector, pooling.

Turns each slot's live audio into embeddings for the decoder, many slots at once. Knows nothing
of what the embeddings mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from duplane.worker.model.audio_clip import encode_clips
from duplane.worker.model.mel import CONTEXT_FRAMES, UNIT_FRAMES, MelStream
from duplane.worker.model.whisper import (
    UNIT_POSITIONS,
    AudioConfig,
    AudioProjector,
    LayerHistory,
    WhisperEncoder,
)

_CONTEXT_POSITIONS = CONTEXT_FRAMES // 2


class AudioEncoder(nn.Module):
    """Live audio of each slot to embeddings, one unit at a time; and whole clips.

    The weights of `apm` and `audio_projection_layer` are left for `Checkpoint.load_into` to fill,
    under the prefixes of the same names. State per slot is allocated once and only reset.
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
            apm, projector = WhisperEncoder(config), AudioProjector(config)
        self.apm = apm.to(dtype).to_empty(device=device)
        self.audio_projection_layer = projector.to(dtype).to_empty(device=device)
        self.mel = MelStream(config.mel_bins, slot_count, device)
        head_dim = config.width // config.head_count
        cache = torch.zeros(
            (config.layer_count, 2, slot_count, config.head_count, config.position_count, head_dim),
            device=device,
            dtype=dtype,
        )
        self.register_buffer("cache", cache, persistent=False)
        self._lengths = [0] * slot_count

    @property
    def unit_rows(self) -> int:
        """Embeddings of one unit."""
        return UNIT_POSITIONS // self.config.pool

    def push(self, slot: int, samples: np.ndarray) -> bool:
        """Append 16 kHz samples [n] to the slot's input; True if a unit's worth is there.

        Raises ValueError as `MelStream.push` does, and then takes nothing.
        """
        return self.mel.push(slot, samples)

    def buffered(self, slot: int) -> int:
        """Samples of the slot's input that no unit has consumed yet."""
        return self.mel.buffered(slot)

    def cache_length(self, slot: int) -> int:
        """Positions the slot's attention cache holds."""
        return self._lengths[slot]

    @torch.inference_mode()
    def encode(self, slots: Sequence[int]) -> Tensor:
        """Consume one unit of each slot: embeddings [n, unit_rows, hidden].

        All slots must be ready and different; none sees another.
        """
        features, is_first = self.mel.emit(slots)
        device = features.device
        hidden = self.apm.convolve(features, torch.tensor(is_first, device=device))
        hidden = hidden[:, _CONTEXT_POSITIONS : _CONTEXT_POSITIONS + UNIT_POSITIONS]

        self._forget_full(slots)
        starts = torch.tensor([self._lengths[slot] for slot in slots], device=device)
        columns = starts[:, None] + torch.arange(UNIT_POSITIONS, device=device)
        hidden = hidden + self.apm.embed_positions(columns)

        rows = torch.tensor(slots, device=device)[:, None]
        lengths = {self._lengths[slot] for slot in slots}
        span = max(lengths) + UNIT_POSITIONS
        mask = None
        if len(lengths) > 1:
            seen = torch.arange(span, device=device) < starts[:, None] + UNIT_POSITIONS
            mask = seen[:, None, None]
        for layer, cache in zip(self.apm.layers, self.cache, strict=True):
            hidden = layer(hidden, mask, LayerHistory(cache, rows, columns, span))
        for slot in slots:
            self._lengths[slot] += UNIT_POSITIONS
        return self.audio_projection_layer(self.apm.layer_norm(hidden))

    def encode_clip(self, samples: np.ndarray) -> Tensor:
        """Embeddings [rows, hidden] of a whole 16 kHz clip [n]; touches no slot."""
        return self.encode_clips([samples])[0]

    @torch.inference_mode()
    def encode_clips(
        self, clips: Sequence[np.ndarray], *, is_blockwise: bool = True
    ) -> list[Tensor]:
        """Embeddings [rows, hidden] of each whole clip, as `audio_clip.encode_clips` does."""
        return encode_clips(
            self.apm,
            self.audio_projection_layer,
            self.mel.log_mel,
            clips,
            is_blockwise=is_blockwise,
        )

    def reset(self, slot: int) -> None:
        """Forget everything of the slot."""
        self.mel.reset(slot)
        self.cache[:, :, slot].zero_()
        self._lengths[slot] = 0

    def is_clean(self, slot: int) -> bool:
        """Whether nothing of a conversation is left in the slot."""
        held = bool(self.cache[:, :, slot].any())
        return self._lengths[slot] == 0 and not held and self.mel.is_clean(slot)

    def _forget_full(self, slots: Sequence[int]) -> None:
        """Start a slot's cache anew where the unit, its context counted, would fill it."""
        for slot in slots:
            if self._lengths[slot] + UNIT_FRAMES // 2 >= self.config.position_count:
                self._lengths[slot] = 0
