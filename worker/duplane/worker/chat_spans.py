"""The spans of one chat: its own, and below it one for each thing it goes through.

Costs nothing but a comparison per step when nothing is exported.
"""

from __future__ import annotations

from opentelemetry.trace import Span, StatusCode
from opentelemetry.util.types import AttributeValue

from duplane.fabric import telemetry
from duplane.fabric.telemetry import Telemetry


class ChatSpans:
    """`chat` is the span of the turn, and its caller's to end. One stretch runs at a time."""

    def __init__(self, tracer: Telemetry, chat: Span) -> None:
        self._tracer = tracer
        self._chat = chat
        self._context = telemetry.inject(chat)
        self._stretch: Span | None = None
        self._stages_s: dict[str, float] = {}
        self._all_stages_s: dict[str, float] = {}

    def note(self, name: str, value: AttributeValue) -> None:
        """Say something of the whole turn."""
        self._chat.set_attribute(name, value)

    def begin(self, name: str) -> None:
        """Begin a stretch."""
        self._stages_s = {}
        if self._context is not None:
            self._stretch = self._tracer.start(name, parent=self._context)

    def took(self, stages_s: dict[str, float]) -> None:
        """Count what a step of the stretch that runs took."""
        for stage, seconds in stages_s.items():
            self._stages_s[stage] = self._stages_s.get(stage, 0.0) + seconds
            self._all_stages_s[stage] = self._all_stages_s.get(stage, 0.0) + seconds

    def end(self, attributes: dict[str, AttributeValue] | None = None) -> None:
        """End the stretch that runs."""
        if self._stretch is None:
            return
        self._stretch.set_attributes({**(attributes or {}), **_stage_attributes(self._stages_s)})
        self._stretch.end()
        self._stretch = None

    def close(self, reason: str | None) -> None:
        """Say where the time of the turn went, and why it failed, if it did.

        A stretch that runs is ended with it if it is to blame, and else forgotten.
        """
        self._chat.set_attributes(_stage_attributes(self._all_stages_s))
        if reason is None:
            return
        for span in (self._chat, self._stretch):
            if span is not None:
                span.set_attribute(telemetry.ERROR_TYPE, reason)
                span.set_status(StatusCode.ERROR)
        self.end()


def _stage_attributes(stages_s: dict[str, float]) -> dict[str, AttributeValue]:
    return {f"{telemetry.STAGE_PREFIX}{name}_ms": s * 1e3 for name, s in stages_s.items()}
