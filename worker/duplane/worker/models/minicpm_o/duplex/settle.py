"""Settles units: completes the state of conversations after the outputs of units are sent."""

from __future__ import annotations

from collections.abc import Sequence

from duplane.worker.models.minicpm_o.duplex.conversation import Conversation, RunningUnit, Status
from duplane.worker.models.minicpm_o.duplex.pipeline import Pipeline
from duplane.worker.models.minicpm_o.duplex.unit_state import UnitRecord
from duplane.worker.models.minicpm_o.llm.kv_cache import KVCache, Slide


def settle(
    conversations: Sequence[Conversation],
    cache: KVCache,
    pipeline: Pipeline,
    *,
    is_deferred: bool,
) -> list[RunningUnit]:
    """Add the closing ids of each conversation's last unit, and apply its context window.

    Returns the units that were settled. A unit with a `failure` could not be settled, and its
    conversation is lost. See `DuplexModel.settle`.
    """
    units: list[RunningUnit] = []
    slides: list[tuple[RunningUnit, Slide | None]] = []
    for conversation in conversations:
        unit = conversation.unsettled
        if unit is None or not unit.state.is_over or conversation.status is Status.LOST:
            continue
        slide = _complete(conversation, unit, cache)
        units.append(unit)
        if slide or not is_deferred:
            slides.append((unit, slide))
    seconds = pipeline.apply(slides) if slides else 0.0
    for unit in units:
        unit.conversation.settle_s = seconds
        if unit.failure is not None:
            unit.conversation.status = Status.LOST
    return units


def _complete(conversation: Conversation, unit: RunningUnit, cache: KVCache) -> Slide | None:
    """Add the unit to the window's units. Return what the window drops; None if nothing."""
    state, closing_ids = unit.state, unit.state.closing_ids
    rows = cache.length(unit.slot) + len(closing_ids) - unit.start
    number = conversation.turn.unit_count - 1
    record = UnitRecord(number, rows, state.is_listen, tuple(state.text_ids))
    conversation.window.units.append(record)
    conversation.pending_ids = closing_ids
    conversation.unsettled = None
    conversation.status = Status.READY
    return conversation.window.slide() if conversation.window.is_on else None
