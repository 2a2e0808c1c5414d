"""What a comparison with recorded traces can watch. The model runs without one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SpokenUnit:
    """One call of the talker: where in the turn it began, what it was given and what it said."""

    start: int
    condition: Tensor
    tokens: list[int]
    length: int


class Probe:
    """Called at each stage, per slot; every method may be overridden and does nothing here.

    Tensors are the model's own: copy what is to be kept. Lengths are rows in the LLM's cache.
    """

    def prepared(self, slot: int, voice: Tensor | None) -> None:
        """The prompt was fed; `voice` [rows, hidden] are the embeddings of the voice in it."""

    def heard(self, slot: int, embeds: Tensor) -> None:
        """A unit's audio was encoded: [rows, hidden]."""

    def saw(self, slot: int, embeds: Tensor) -> None:
        """A unit's frames were encoded: [images and slices, rows, hidden]."""

    def prefilled(self, slot: int, logits: Tensor, length: int) -> None:
        """A unit's input was fed; its logits [ids]."""

    def decided(self, slot: int, logits: Tensor, token: int) -> None:
        """The model chose an id from raw logits [ids]."""

    def fed(self, slot: int, token: int, hidden: Tensor) -> None:
        """An id was fed during generation; `hidden` [hidden] is the state behind it."""

    def spoke(self, slot: int, speech: SpokenUnit) -> None:
        """The talker ran."""

    def vocoded(self, slot: int, tokens: list[int], is_last: bool, sample_count: int) -> None:
        """The vocoder decoded a piece."""

    def settled(self, slot: int, length: int) -> None:
        """The unit is complete in the context."""
