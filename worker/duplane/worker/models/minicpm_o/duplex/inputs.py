"""The input of a unit: checks, encodes and feeds its frames and audio, and counts their rows.

Source: `DuplexCapability.streaming_prefill` in `MiniCPMO45/modeling_minicpmo_unified.py` of
OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import chain, islice

import torch
from torch import Tensor

from duplane.worker.models.minicpm_o.audio.mel import AudioBacklogError
from duplane.worker.models.minicpm_o.duplex.conversation import InputRows, RunningUnit
from duplane.worker.models.minicpm_o.loader import ModelParts
from duplane.worker.models.minicpm_o.preparer_parts import PromptParts
from duplane.worker.models.minicpm_o.types import PreparedImage
from duplane.worker.models.minicpm_o.vision.layout import ImageMarks, duplex_layout, tile_count
from duplane.worker.models.minicpm_o.vision.pixels import USUAL_SCANS, PlannedImage
from duplane.worker.models.minicpm_o.vision.preprocessing import Pictures
from duplane.worker.models.minicpm_o.vision.seen_tiles import see
from duplane.worker.models.types import ImageError, Unit, UnitFailure

MAX_FRAME_PIXELS = 1 << 23
"""Maximum number of pixels of one frame; decoding a larger frame would delay a conversation for too
long."""
MAX_UNIT_PIXELS = 1 << 24
"""Maximum number of pixels of all frames of a unit together. Frames that bring a unit above it are
refused by their headers. The pixels times the scans are bounded in the same way."""


class UnitInputs:
    """Prepares and encodes the input of units, for one model."""

    def __init__(self, parts: ModelParts) -> None:
        self._audio, self._vision = parts.audio, parts.vision
        self._llm, self._tokens = parts.llm, parts.tokens
        self._marks: dict[str, int] = {}
        self._image_marks = marks = ImageMarks() if parts.vision is None else parts.vision.marks
        if parts.vision is not None:
            names = (marks.image_start, marks.image_end, marks.slice_start, marks.slice_end)
            self._marks = {name: parts.tokens.id_of(name) for name in names}
        self._prompts = parts.prompts

    def prepare(self, unit: Unit) -> Unit | UnitFailure:
        """Decode the unit's frames that are not decoded yet; safe in any thread."""
        return prepare_unit(self._prompts.pictures, unit)

    def count_rows(self, unit: Unit) -> InputRows:
        """Count the rows that a prepared unit's input adds to the context."""
        return count_rows(self._prompts, unit)

    def buffer_audio(self, unit: Unit) -> UnitFailure | None:
        """Add the unit's audio to the slot's buffer, and consume one unit of audio from the buffer.

        Returns a failure if the audio is refused or the buffer holds less than a unit.
        """
        try:
            is_complete = self._audio.mel.push(unit.slot, unit.audio)
        except AudioBacklogError as error:
            return refusal(unit, "AUDIO_BACKLOG", str(error))
        except ValueError as error:
            return refusal(unit, "AUDIO_INVALID", str(error))
        if not is_complete:
            buffered = self._audio.mel.buffered(unit.slot)
            return refusal(unit, "AUDIO_TOO_SHORT", f"{buffered} samples are no whole unit yet")
        self._audio.mel.take(unit.slot)
        return None

    def encode_tiles(self, units: Sequence[RunningUnit]) -> None:
        """Encode the next tiles of all units in one batch: at most `granted` of each unit."""
        if self._vision is not None:  # otherwise `prepare_unit` has refused the frames
            see(self._vision, units)

    def encode_audio(self, units: Sequence[RunningUnit]) -> None:
        """Encode the audio that `buffer_audio` has taken for each unit: [rows, hidden] per unit."""
        embeds = self._audio.encode([unit.slot for unit in units])
        for unit, rows in zip(units, embeds.unbind(), strict=True):
            unit.audio_embeds = rows

    def embed_units(self, units: Sequence[RunningUnit]) -> None:
        """Embed the whole input of each unit. The pending ids of the conversation come first."""
        embedded = self.embed(units, [unit.conversation.pending_ids for unit in units])
        for unit, rows in zip(units, embedded, strict=True):
            unit.embeds, unit.conversation.pending_ids = rows, ()

    def embed(self, units: Sequence[RunningUnit], before: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the rows [n, hidden] of each unit's input.

        These are, in this order: the ids `before` the unit, `<unit>`, the encoded frames between
        their marks, and the audio.
        """
        ids = [self._tokens.unit, *self._marks.values(), *chain.from_iterable(before)]
        sizes = [1] * (1 + len(self._marks)) + [len(own) for own in before]
        unit_mark, *others = torch.split_with_sizes(self._llm.embed(ids), sizes)
        marks = dict(zip(self._marks, others, strict=False))
        embedded: list[Tensor] = []
        for unit, first in zip(units, others[len(marks) :], strict=True):
            rows, tiles = [first, unit_mark], iter(unit.seen.embeds)
            for image in unit.images:
                own = list(islice(tiles, len(image.tiles)))
                layout = duplex_layout(self._image_marks, image.grid)
                rows += [marks[part] if isinstance(part, str) else own[part] for part in layout]
            if unit.audio_embeds is not None:
                rows.append(unit.audio_embeds)
            embedded.append(torch.cat([row.to(unit_mark.dtype) for row in rows]))
        return embedded


def prepare_unit(pictures: Pictures | None, unit: Unit) -> Unit | UnitFailure:
    """Return the unit with decoded frames, or its refusal."""
    steps = prepare_steps(pictures, unit)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def prepare_steps(
    pictures: Pictures | None, unit: Unit
) -> Generator[None, None, Unit | UnitFailure]:
    """Return the unit with decoded frames, or its refusal. Yields between frames.

    The headers of all frames are judged first, so a refused unit costs no decoding.
    """
    if not unit.frames:
        return unit
    if pictures is None:
        return refusal(unit, "FRAMES_UNSUPPORTED", "this model does not see frames")
    planned = _plan_frames(pictures, unit)
    if isinstance(planned, UnitFailure):
        return planned
    images: list[PreparedImage] = []
    for index, frame in enumerate(planned):
        if isinstance(frame, PreparedImage):
            images.append(frame)
            continue
        if images:
            yield
        try:
            images.append(pictures.decode_frame(frame))
        except ImageError as error:
            return _bad_frame(unit, index, str(error))
    return replace(unit, frames=tuple(images))


def _plan_frames(
    pictures: Pictures, unit: Unit
) -> list[PlannedImage | PreparedImage] | UnitFailure:
    """Judge the frames by their headers, also together. Decoded frames stay as they are."""
    planned: list[PlannedImage | PreparedImage] = []
    pixels, scanned = 0, 0
    for index, frame in enumerate(unit.frames):
        if isinstance(frame, PreparedImage):
            planned.append(frame)
            continue
        if not isinstance(frame, bytes):
            raise TypeError("the frame was prepared for another family of models")
        try:
            image = pictures.plan(frame, unit.max_slices, MAX_FRAME_PIXELS)
        except ImageError as error:
            return _bad_frame(unit, index, str(error))
        pixels += image.pixels
        scanned += image.pixels * image.scans
        if pixels > MAX_UNIT_PIXELS:
            fault = f"it brings the pictures of the unit to more than {MAX_UNIT_PIXELS} pixels"
            return _bad_frame(unit, index, fault)
        if scanned > USUAL_SCANS * MAX_UNIT_PIXELS:
            return _bad_frame(unit, index, "the pictures of the unit have too many scans together")
        planned.append(image)
    return planned


def _bad_frame(unit: Unit, index: int, message: str) -> UnitFailure:
    return UnitFailure(unit.slot, "IMAGE_INVALID", message, False, f"frames[{index}]")


def count_rows(parts: PromptParts, unit: Unit) -> InputRows:
    """Count the rows that a prepared unit's input adds to the context."""
    images = (frame for frame in unit.frames if isinstance(frame, PreparedImage))
    tiles = sum(tile_count(image.grid) for image in images)
    tile_rows = 0 if parts.pictures is None else parts.pictures.rows
    audio = parts.unit_rows if unit.audio.size or not unit.frames else 0
    return InputRows(1 + 2 * tiles, tiles * tile_rows, audio)


def refusal(unit: Unit, reason: str, message: str) -> UnitFailure:
    """Return the failure of a refused unit, which has not changed its conversation."""
    return UnitFailure(unit.slot, reason, message, is_fatal=False)
