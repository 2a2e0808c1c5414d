"""D's request over plain HTTP: answered whole, by one JSON object, with how long it took."""

from __future__ import annotations

from dataclasses import dataclass, replace

import orjson

from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.d import DialectD
from duplane.edge.dialects.dialect import Action, Moment, Turn, with_audio
from duplane.edge.dialects.fields import Fields
from duplane.edge.ends import Ending
from duplane.fabric.audio import OUTPUT_RATE_HERTZ
from duplane.fabric.v1 import session_pb2


@dataclass(frozen=True, slots=True)
class Waited:
    """How a request came to its slot; `until` is when it began to run."""

    until: Moment
    seconds: float
    estimated_s: float  # as told when it was queued; 0 when it was not


class DialectDHttp(DialectD):
    """One client that asks once. Only the answer is told here; refusals have a status code."""

    waited: Waited | None = None  # set before the turn begins

    def _read(self, kind: str, event: Fields) -> Action:
        action = super()._read(kind, event)
        return replace(action, is_streaming=False) if isinstance(action, Turn) else action

    def prefilled(self, prefilled: session_pb2.Prefilled, now: Moment) -> list[bytes]:
        """Keep the count."""
        ChatDialect.prefilled(self, prefilled, now)
        return []

    def done(self, done: session_pb2.Done, now: Moment) -> list[bytes]:
        """Render the answer. Nothing is cached: every request brings its whole history."""
        waited = self.waited or Waited(now, 0.0, 0.0)
        told, prompt = done.token_counts.output_text_token_count, self._prompt_token_count
        event: dict[str, object] = {
            "text": "".join(self._text),
            "success": True,
            "error": None,
            "audio_sample_rate": OUTPUT_RATE_HERTZ,
            "tokens_generated": told,
            "token_stats": {
                "cached_tokens": 0,
                "input_tokens": prompt,
                "generated_tokens": told,
                "total_tokens": prompt + told,
            },
            "duration_ms": round((now.monotonic_s - waited.until.monotonic_s) * 1e3, 1),
            "queue_wait_ms": round(waited.seconds * 1e3),
            "estimated_queue_wait_s": round(waited.estimated_s, 1),
            "recording_session_id": self.identity.recording_id or None,
        }
        if audio := b"".join(self._audio):
            return [with_audio(event, audio, "audio_data")]
        return [orjson.dumps({**event, "audio_data": None})]

    def ended(self, ending: Ending, now: Moment) -> list[bytes]:
        """Tell nothing."""
        super().ended(ending, now)
        return []
