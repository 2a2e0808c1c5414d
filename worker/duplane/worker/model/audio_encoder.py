"""The streaming audio front end: mel, Whisper encoder with slotted caches, projector, pooling.

Turns each slot's live audio into embeddings for the decoder, many slots at once. Knows nothing
of what the embeddings mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from duplane.worker.model.audio_clip import Piece, batches, cut, encode_batch
from duplane.worker.model.mel import CONTEXT_FRAMES, UNIT_FRAMES, MelStream
from duplane.worker.model.transfer import upload
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
        self._has_taken = [False] * slot_count

    @property
    def unit_rows(self) -> int:
        """Embeddings of one unit."""
        return UNIT_POSITIONS // self.config.pool

    def push(self, slot: int, samples: np.ndarray) -> bool:
        """Append 16 kHz samples [n] to the slot's input; True if a unit's worth is there.

        Raises ValueError as `MelStream.push` does, and then takes nothing.
        """
        return self.mel.push(slot, samples)

    def take(self, slot: int) -> None:
        """Consume one unit of the slot's input, for the next `encode`. ValueError without one."""
        self.mel.take(slot)
        self._has_taken[slot] = True

    def buffered(self, slot: int) -> int:
        """Samples of the slot's input that no unit has consumed yet."""
        return self.mel.buffered(slot)

    def cache_length(self, slot: int) -> int:
        """Positions the slot's attention cache holds."""
        return self._lengths[slot]

    @torch.inference_mode()
    def encode(self, slots: Sequence[int]) -> Tensor:
        """Encode the unit that each slot has taken, or takes now: [n, unit_rows, hidden].

        All slots must be different, none sees another. Until it returns it can be called again for
        the same units, and makes the same of them.
        """
        for slot in slots:
            if not self._has_taken[slot]:
                self.take(slot)
        features, is_first = self.mel.features(slots)
        device = features.device
        hidden = self.apm.convolve(features, upload(is_first, device))
        hidden = hidden[:, _CONTEXT_POSITIONS : _CONTEXT_POSITIONS + UNIT_POSITIONS]

        begins = [self._begin(slot) for slot in slots]
        rows, starts = upload([slots, begins], device).unsqueeze(-1).unbind()
        columns = starts + torch.arange(UNIT_POSITIONS, device=device)
        hidden = hidden + self.apm.embed_positions(columns)

        span = max(begins) + UNIT_POSITIONS
        mask = None
        if min(begins) < max(begins):
            seen = torch.arange(span, device=device) < starts + UNIT_POSITIONS
            mask = seen[:, None, None]
        for layer, cache in zip(self.apm.layers, self.cache, strict=True):
            hidden = layer(hidden, mask, LayerHistory(cache, rows, columns, span))
        embeds = self.audio_projection_layer(self.apm.layer_norm(hidden))
        for slot, begin in zip(slots, begins, strict=True):
            self._lengths[slot], self._has_taken[slot] = begin + UNIT_POSITIONS, False
        return embeds

    def encode_clip(self, samples: np.ndarray) -> Tensor:
        """Embeddings [rows, hidden] of a whole 16 kHz clip [n]; touches no slot."""
        (pieces,) = cut(self.config, [samples])
        weight = self.apm.conv1.weight
        none = torch.zeros((0, self.config.hidden), device=weight.device, dtype=weight.dtype)
        found = (rows for batch in batches(pieces) for rows in self.encode_pieces(batch))
        return torch.cat([none, *found])

    @torch.inference_mode()
    def encode_pieces(self, pieces: Sequence[Piece], *, is_blockwise: bool = True) -> list[Tensor]:
        """Embeddings [rows, hidden] of pieces of clips in one batch, as `encode_batch` does."""
        return encode_batch(
            self.apm,
            self.audio_projection_layer,
            self.mel.log_mel,
            pieces,
            is_blockwise=is_blockwise,
        )

    def reset(self, slot: int) -> None:
        """Forget everything of the slot."""
        self.mel.reset(slot)
        self.cache[:, :, slot].zero_()
        self._lengths[slot], self._has_taken[slot] = 0, False

    def is_clean(self, slot: int) -> bool:
        """Whether nothing of a conversation is left in the slot."""
        if self._lengths[slot] or self._has_taken[slot]:
            return False
        return not bool(self.cache[:, :, slot].any()) and self.mel.is_clean(slot)

    def _begin(self, slot: int) -> int:
        """Where the slot's unit goes: to the start if, its context counted, it would fill all."""
        length = self._lengths[slot]
        return 0 if length + UNIT_FRAMES // 2 >= self.config.position_count else length
