"""What a unit brings: its frames and audio, checked, counted in rows, and laid out in order.

Decides which units are refused; what becomes of the rows is the decoder's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from duplane.worker.model.image_layout import duplex_layout, duplex_rows
from duplane.worker.model.images import ImageError, PreparedImage
from duplane.worker.model.mel import AudioBacklogError
from duplane.worker.model.parts import ModelParts
from duplane.worker.model.running_unit import RunningUnit, UnitContent
from duplane.worker.model.types import UnitFailure, UnitInput

MAX_FRAME_PIXELS = 1 << 23
"""Pixels of one frame; a larger one would hold up a conversation that has a second for a unit."""


class Intake:
    """Takes units in, for one model."""

    def __init__(self, parts: ModelParts) -> None:
        self._audio, self._vision = parts.audio, parts.vision
        self._llm, self._tokens = parts.llm, parts.tokens
        self._marks: dict[str, int] = {}
        if parts.vision is not None:
            marks = parts.vision.marks
            names = (marks.image_start, marks.image_end, marks.slice_start, marks.slice_end)
            self._marks = {name: parts.tokens.id_of(name) for name in names}
        self.frame_rows = 0 if parts.vision is None else parts.vision.rows

    def prepare(self, unit: UnitInput) -> UnitInput | UnitFailure:
        """Decode the unit's frames, where that has not been done; safe in any thread."""
        images: list[PreparedImage] = []
        for index, frame in enumerate(unit.frames):
            if self._vision is None:
                return refused(unit, "FRAMES_UNSUPPORTED", "this model does not see frames")
            try:
                images.append(
                    frame
                    if isinstance(frame, PreparedImage)
                    else self._vision.prepare(frame, unit.max_slices, MAX_FRAME_PIXELS)
                )
            except ImageError as error:
                return refused(unit, "IMAGE_INVALID", f"frames[{index}]: {error}")
        return replace(unit, frames=tuple(images)) if images else unit

    def content(self, unit: UnitInput) -> UnitContent:
        """What a prepared unit brings. One without frames has audio, even if it is none."""
        images = tuple(frame for frame in unit.frames if isinstance(frame, PreparedImage))
        return UnitContent(images, has_audio=bool(unit.audio.size) or not images)

    def rows(self, content: UnitContent) -> int:
        """Rows that it takes in the context, `<unit>` included."""
        seen = duplex_rows((image.grid for image in content.images), self.frame_rows)
        return 1 + seen + (self._audio.unit_rows if content.has_audio else 0)

    def hear(self, unit: UnitInput) -> UnitFailure | None:
        """Take the unit's audio, or say why there is no whole unit of it."""
        try:
            is_ready = self._audio.push(unit.slot, unit.audio)
        except AudioBacklogError as error:
            return refused(unit, "AUDIO_BACKLOG", str(error))
        except ValueError as error:
            return refused(unit, "AUDIO_INVALID", str(error))
        if not is_ready:
            buffered = self._audio.buffered(unit.slot)
            return refused(unit, "AUDIO_TOO_SHORT", f"{buffered} samples are no whole unit yet")
        self._audio.take(unit.slot)
        return None

    def see(self, units: Sequence[RunningUnit]) -> list[list[Tensor]]:
        """The embeddings [pieces, rows, hidden] of the images of each unit, all encoded at once."""
        images = [image for unit in units for image in unit.content.images]
        if self._vision is None or not images:
            return [[] for _ in units]
        embeds = iter(self._vision.encode(images))
        return [[next(embeds) for _ in unit.content.images] for unit in units]

    def listen(self, units: Sequence[RunningUnit]) -> list[Tensor]:
        """The embeddings [rows, hidden] of the audio that each unit was heard with."""
        return list(self._audio.encode([unit.slot for unit in units]).unbind())

    def lay_out(self, units: Sequence[RunningUnit]) -> list[Tensor]:
        """The rows [n, hidden] of each unit: `<unit>`, frames between their marks, audio."""
        ids = [self._tokens.unit, *self._marks.values()]
        unit_mark, *others = self._llm.embed(ids).unsqueeze(1).unbind()
        marks = dict(zip(self._marks, others, strict=True))
        laid_out: list[Tensor] = []
        for unit in units:
            rows = [unit_mark]
            for image, pieces in zip(unit.content.images, unit.seen, strict=True):
                rows += self._frame(image, pieces, marks)
            if unit.heard is not None:
                rows.append(unit.heard)
            laid_out.append(torch.cat([row.to(unit_mark.dtype) for row in rows]))
        return laid_out

    def _frame(
        self, image: PreparedImage, pieces: Tensor, marks: dict[str, Tensor]
    ) -> list[Tensor]:
        """The rows of one frame, in the order of its layout."""
        if self._vision is None:
            return []
        layout = duplex_layout(self._vision.marks, image.grid)
        return [marks[part] if isinstance(part, str) else pieces[part] for part in layout]


def refused(unit: UnitInput, reason: str, message: str) -> UnitFailure:
    """A failure that has not touched the conversation."""
    return UnitFailure(unit.slot, reason, message, is_fatal=False)
