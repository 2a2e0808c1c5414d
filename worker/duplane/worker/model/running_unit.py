"""One unit on its way through the stages: what it brought, what became of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from duplane.worker.model.conversation import Conversation
from duplane.worker.model.duplex import UnitRules
from duplane.worker.model.image_layout import piece_count
from duplane.worker.model.images import PreparedImage
from duplane.worker.model.types import FloatArray, UnitFailure


@dataclass(frozen=True)
class UnitContent:
    """What one unit shows and lets hear."""

    images: tuple[PreparedImage, ...]
    has_audio: bool

    @property
    def piece_count(self) -> int:
        """Images and slices of them."""
        return sum(piece_count(image.grid) for image in self.images)


@dataclass
class RunningUnit:
    """One unit on its way through a batch.

    `is_interrupting` means that it cuts off a turn. `failure` is set where the unit, and with it
    its conversation, is lost. Stages leave here what the next ones need: `seen` embeddings of
    each frame, `heard` those of the audio, `hidden` one state per id of `rules.said`, `spoken`
    speech tokens, `pieces` samples.
    """

    slot: int
    conversation: Conversation
    rules: UnitRules
    content: UnitContent
    is_interrupting: bool = False
    failure: UnitFailure | None = None
    seen: list[Tensor] = field(default_factory=list[Tensor])
    heard: Tensor | None = None
    hidden: list[Tensor] = field(default_factory=list[Tensor])
    spoken: list[int] = field(default_factory=list[int])
    pieces: list[FloatArray] = field(default_factory=list[FloatArray])
