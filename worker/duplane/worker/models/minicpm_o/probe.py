"""Observation points of the model, used to compare its stages with recorded traces."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SpokenUnit:
    """One call of the talker. The turn has `start` rows before the call and `length` after it."""

    start: int
    condition: Tensor
    tokens: list[int]
    length: int


class Probe:
    """Has a method for each stage, which the stage calls once per slot. Subclasses override some.

    The model may overwrite the tensors later, so copy them to keep them. Lengths are numbers of
    rows in the LLM's cache.
    """

    def prepared(self, slot: int, voice: Tensor | None) -> None:
        """The prompt was fed. `voice` [rows, hidden] are the embeddings of its voice."""

    def audio_encoded(self, slot: int, embeds: Tensor) -> None:
        """A unit's audio was encoded: [rows, hidden]."""

    def frames_encoded(self, slot: int, embeds: Tensor) -> None:
        """A unit's frames were encoded: [images and slices, rows, hidden]."""

    def prefilled(self, slot: int, logits: Tensor, length: int) -> None:
        """A unit's input was fed; `logits` [ids] follow from it."""

    def chosen(self, slot: int, logits: Tensor, token: int) -> None:
        """The id `token` was chosen from raw logits [ids]."""

    def fed(self, slot: int, token: int, hidden: Tensor) -> None:
        """A generated id was fed; `hidden` [hidden] is the last layer's state of its row."""

    def spoke(self, slot: int, speech: SpokenUnit) -> None:
        """The talker ran."""

    def vocoded(self, slot: int, tokens: list[int], is_last: bool, sample_count: int) -> None:
        """The vocoder decoded a chunk of speech tokens."""

    def settled(self, slot: int, length: int) -> None:
        """The unit is complete in the context."""
