"""A half duplex session: each piece of the client's speech becomes a turn of chat. Pure.

The session hears the client while no turn waits or runs. A turn repeats the conversation so far,
so the client has a slot only while the model answers.
"""

from __future__ import annotations

from duplane.edge.clock import Moment
from duplane.edge.dialects.actions import Append, Turn
from duplane.edge.dialects.dialect import Phase
from duplane.edge.dialects.h import CHUNK, DialectH
from duplane.edge.payload.rates import INPUT_RATE_HERTZ
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.effects import AnswerBegan, CountSegment, CountUnheard
from duplane.edge.session.exchanges import Exchanges
from duplane.edge.settings import Limits
from duplane.edge.speech.scorers import ScorerFactory
from duplane.edge.speech.segments import Segment, Segments
from duplane.fabric.audio import SAMPLE_BYTES
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.model import DEFAULT_FORMAT, ModelFormat
from duplane.fabric.v1 import session_pb2

# The reference hears nothing for so long: its clients begin with the noise of a microphone.
_DEAF_S = 0.5


class HalfDuplexSession(ChatSession):
    """One half duplex session."""

    def __init__(
        self, dialect: DialectH, limits: Limits, now: Moment, new_scorer: ScorerFactory
    ) -> None:
        super().__init__(dialect, limits, now)
        self._half_duplex = dialect
        self._new_scorer = new_scorer
        self._exchanges, self._segments = self._begin()
        self._hears_from_s = 0.0  # monotonic
        # The conversation and the speech of the turn that waits or runs: the conversation may begin
        # again before its answer ends.
        self._asked = self._exchanges, b""
        self._silent_since_s: float | None = None  # monotonic; None after the answer has begun

    def _begin(self) -> tuple[Exchanges, Segments]:
        """Return the parts of a conversation that begins, with the dialect's settings."""
        settings = self._half_duplex.settings
        exchanges = Exchanges(settings, self._limits)
        max_samples = exchanges.max_samples(self._growth)
        return exchanges, Segments(self._new_scorer(), settings.detector, max_samples)

    @property
    def _growth(self) -> float:
        return max(1.0, self._model.input_rate_hertz / INPUT_RATE_HERTZ)

    @property
    def held_bytes(self) -> int:
        """The bytes of the client's sound that the session keeps."""
        return self._exchanges.speech_bytes + self._segments.held_bytes

    # --- the client ---

    def _configure(self, now: Moment) -> list[bytes]:
        """Begin the conversation, or begin it again."""
        was_speaking = self._segments.is_speaking
        self._exchanges, self._segments = self._begin()
        if self.dialect.phase is not Phase.ACTIVE:
            return super()._configure(now)
        events = [self._half_duplex.vad_state(is_speaking=False)] if was_speaking else []
        self._heard(now)
        return events + self._half_duplex.prepared()

    def _open(self, now: Moment) -> list[bytes]:
        self._hears_from_s = now.monotonic_s + _DEAF_S
        return super()._open(now)

    def _append(self, append: Append, now: Moment) -> list[bytes]:
        """Hear sound. While a turn waits or runs, and at the begin, sound is not heard."""
        self._heard(now)
        is_busy = self.is_running or self.turn_count
        is_early = self.dialect.phase is not Phase.ACTIVE or now.monotonic_s < self._hears_from_s
        if is_busy or is_early:
            self._segments.skip(append.audio)
            self.effects.append(CountUnheard())
            return []
        events: list[bytes] = []
        for found in self._segments.feed(append.audio):
            is_segment = isinstance(found, Segment)
            events.append(self._half_duplex.vad_state(is_speaking=not is_segment))
            if is_segment:
                self.effects.append(CountSegment(is_too_short=found.is_too_short))
            if is_segment and not found.is_too_short:
                events += self._ask(found, now)
        return events

    def _ask(self, segment: Segment, now: Moment) -> list[bytes]:
        """Add the turn that answers a piece of speech."""
        self._asked = self._exchanges, segment.audio
        self._silent_since_s = now.monotonic_s - segment.silent_samples / INPUT_RATE_HERTZ
        events = self._add_turn(self._turn(), now)
        return events + self._generating() if self.has_slot else events

    def _turn(self) -> Turn:
        """Return the turn that answers the last piece of speech."""
        exchanges, speech = self._asked
        request = exchanges.request(speech, self._growth)
        return Turn(request, paths=exchanges.settings.paths, kind=CHUNK)

    def _generating(self) -> list[bytes]:
        _, speech = self._asked
        milliseconds = len(speech) * 1000 // (SAMPLE_BYTES * INPUT_RATE_HERTZ)
        return [self._half_duplex.generating(milliseconds)]

    # --- the worker ---

    def granted(
        self,
        claim_s: float | None,
        now: Moment,
        model: ModelFormat = DEFAULT_FORMAT,
        model_name: str = "",
    ) -> list[bytes]:
        """Record a grant of a slot with this model, and tell the client that its turn begins."""
        events = super().granted(claim_s, now, model, model_name)
        is_first_try = self.turn_count and not self.is_retrying
        return events + self._generating() if is_first_try and not self.closed else events

    def responded(self, response: session_pb2.ChatResponse, now: Moment) -> list[bytes]:
        """Handle a message from the worker about the running turn."""
        if not self.is_running:
            return []
        if response.HasField("done"):
            exchanges, speech = self._asked
            if response.done.reason == session_pb2.FINISH_REASON_CONTEXT_FULL:
                exchanges.halve()
            exchanges.add(speech, self._half_duplex.answer_text)
        events = super().responded(response, now)
        if events and self._silent_since_s is not None and response.HasField("delta"):
            self.effects.append(AnswerBegan(now.monotonic_s - self._silent_since_s))
            self._silent_since_s = None
        return events

    def _call_failed(self, error: FabricError, now: Moment) -> list[bytes]:
        """Handle a failed turn. If its prompt is too long for the model, halve the conversation."""
        exchanges, _ = self._asked
        is_too_long = error.reason is Reason.INVALID_FIELD and error.field == "messages"
        if is_too_long and exchanges.count:
            exchanges.halve()
            self._retry(self._turn(), now)
            return []
        return super()._call_failed(error, now)
