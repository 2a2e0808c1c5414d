"""One client's session as the edge decides it, from its first byte to its close. Pure.

The shell feeds it frames, fabric messages and the time; it answers with events for the client,
with requests for the worker when asked, with a deadline, and in the end with a farewell.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from typing import assert_never

import orjson

from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.detect import detect, implied_init, needs_init
from duplane.edge.dialects.dialect import (
    NO_TAG,
    OPEN,
    WAITING,
    Action,
    Answer,
    Append,
    Configure,
    Dialect,
    Identity,
    Leave,
    Moment,
    Phase,
    Turn,
    queue_event,
)
from duplane.edge.dialects.fields import Fields, parse
from duplane.edge.ends import WORKER_CLOSED, End, Ending, Farewell
from duplane.edge.faults import ClientError, ErrorCode, UnreadableError, name_fault
from duplane.edge.gather import Uplink
from duplane.edge.modes import Mode
from duplane.edge.owed import Owed
from duplane.edge.settings import Limits
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, session_pb2


class Wait(Enum):
    """What a session can wait for; each wait is bounded."""

    SCHEDULER = auto()
    SLOT = auto()
    QUEUE_UPDATE = auto()
    SETTINGS = auto()
    CONVERSATION = auto()
    AUDIO = auto()
    CLAIM = auto()
    WHOLE_SESSION = auto()


# How a wait that was too long ends the session.
_EXPIRED: Mapping[Wait, Ending] = {
    Wait.SCHEDULER: Ending(End.SERVICE_UNAVAILABLE, "no scheduler answers"),
    Wait.SLOT: Ending(End.WORKER_BUSY, "no worker became free in time"),
    Wait.SETTINGS: Ending(End.TIMEOUT, "no session settings in time"),
    Wait.AUDIO: Ending(End.TIMEOUT, "no audio for too long"),
    Wait.WHOLE_SESSION: Ending(End.TIMEOUT, "session time limit"),
}

# Why a wish for a slot was refused, as clients know it.
_REFUSED: Mapping[Reason, Ending] = {
    Reason.QUEUE_FULL: Ending(End.QUEUE_FULL, "Queue full"),
    Reason.TICKET_CANCELLED: Ending(End.WORKER_BUSY, "taken out of the queue"),
    Reason.KIND_NOT_SERVED: Ending(End.SERVICE_UNAVAILABLE, "no worker serves this mode"),
    Reason.UNAVAILABLE: Ending(End.WORKER_CONNECT_FAILED, "the worker cannot be reached"),
}
_NOT_READY = Ending(End.SERVICE_UNAVAILABLE, "Service not ready")


class Session:
    """One session. Every method returns the events that go to the client because of it."""

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        mode: Mode,
        now: Moment,
        dialect: type[Dialect] | None = None,
    ) -> None:
        """Begin in `dialect`; None lets the client's first event decide."""
        self.identity = identity
        self.dialect: Dialect = (dialect or DialectA)(identity, limits, mode)
        self.farewell: Farewell | None = None
        self._is_decided = dialect is not None
        self._limits = limits
        self._mode = mode
        self.has_slot = False  # claimed, not only granted
        self._queued: lease_pb2.Queued | None = None
        self._settings: session_pb2.Open | None = None
        self._uplink = Uplink(limits.early_unit_count, limits.frame_count)
        self._owed = Owed()  # answers to appends, where the dialect counts them
        self._heard = b""
        self._requests: deque[tuple[int, session_pb2.ConverseRequest]] = deque()
        self._waits: dict[Wait, float] = {}
        self._wait(Wait.SCHEDULER, limits.scheduler_s, now)
        self._wait(Wait.SLOT, limits.queue_s, now)

    @property
    def is_running(self) -> bool:
        """Whether something is lost if the session ends now."""
        return self.has_slot

    def drain(self, now: Moment) -> list[bytes]:
        """Take that the edge shuts down: what is not running ends now, the rest has its time."""
        return [] if self.is_running else self.end(Ending(End.SHUTDOWN), now)

    # --- the client speaks ---

    def receive(self, message: bytes | Fields, now: Moment) -> list[bytes]:
        """Take one text frame, or what it holds."""
        if self.farewell:
            return []
        try:
            is_parsed = not isinstance(message, bytes)
            actions = self._read(message if is_parsed else parse(message, self._limits))
        except ClientError as fault:
            return self._refuse(fault, now)
        except UnreadableError as fault:
            return self.end(Ending(End.UNREADABLE, str(fault)), now)
        return [told for action in actions for told in self._act(action, now)]

    def _refuse(self, fault: ClientError, now: Moment) -> list[bytes]:
        """Tell of an event that cannot be used; the session goes on."""
        return [self.dialect.error(fault.code, fault.message, now, fault.input_id)]

    def _read(self, event: Fields) -> list[Action]:
        """Read one event, deciding the dialect if it is still open. Raises ClientError."""
        kind = event.get("type")
        chosen = None if self._is_decided else detect(kind)
        if chosen is None:
            return [self.dialect.receive(event)]
        self.dialect = chosen(self.identity, self._limits, self._mode)
        if not needs_init(kind):
            self._is_decided = True
            return [self.dialect.receive(event)]
        # Settings are implied only by audio that can be used.
        trial = chosen(self.identity, self._limits, self._mode)
        actions = [trial.receive(implied_init()), trial.receive(event)]
        self.dialect, self._is_decided = trial, True
        return actions

    def _act(self, action: Action, now: Moment) -> list[bytes]:
        match action:
            case Configure():
                self._settings = action.settings
                self._waits.pop(Wait.SETTINGS, None)
                if self.has_slot:
                    self._wait(Wait.CONVERSATION, self._limits.open_s, now)
            case Append():
                return self._take_append(action, now)
            case Answer():
                self._ask(action.request, now)
                return list(action.events)
            case Turn():
                return self._take_turn(action, now)
            case Leave():
                return self.end(Ending(End.CLIENT, client_reason=action.reason), now)
            case _:
                assert_never(action)
        return []

    def _take_append(self, append: Append, now: Moment) -> list[bytes]:
        if self.dialect.phase in WAITING and self._owed.is_full:
            # Nothing can be answered yet, so that nothing more can be owed.
            message = "more audio than can be answered waits already"
            return [self.dialect.error(ErrorCode.NOT_READY, message, now, append.tag.input_id)]
        self._hear(append.audio)
        gathered_count = self._uplink.gathered_count
        self._uplink.add(append, now.wall_ns)
        if Wait.AUDIO in self._waits:
            self._wait(Wait.AUDIO, self._limits.idle_s, now)
        if self.dialect.answers_appends:
            self._owed.add(self._uplink.gathered_count)
            return self._answer_owed(now)
        if self._uplink.gathered_count == gathered_count:
            return self.dialect.gathered(append.tag, now)
        return []

    def _hear(self, audio: bytes) -> None:
        if self.identity.recording_id:
            self._heard = audio

    def take_heard(self) -> bytes:
        """Return what the last event let the user say, PCM at 16 kHz, if that is recorded."""
        heard, self._heard = self._heard, b""
        return heard

    def _take_turn(self, turn: Turn, now: Moment) -> list[bytes]:
        """Take a turn of chat: where units flow there are none."""
        del turn, now
        return []

    def _ask(self, request: session_pb2.ConverseRequest | None, now: Moment) -> None:
        if request is not None:
            self._ask_after_units(request)
        if self.dialect.phase is Phase.PAUSED:
            self._waits.pop(Wait.AUDIO, None)
        elif self.dialect.phase is Phase.ACTIVE:
            self._wait(Wait.AUDIO, self._limits.idle_s, now)

    def _ask_after_units(self, request: session_pb2.ConverseRequest) -> None:
        """Keep a request until the units that wait already have gone.

        Of several with no unit left between them only the last counts, so that they are no more
        than the units.
        """
        requests, taken = self._requests, self._uplink.taken_count
        at = self._uplink.gathered_count
        while requests and max(requests[-1][0], taken) == at:
            requests.pop()
        while len(requests) > 1 and requests[1][0] <= taken:
            requests.popleft()
        requests.append((at, request))

    # --- the scheduler speaks ---

    def queued(self, queued: lease_pb2.Queued, now: Moment) -> list[bytes]:
        """Take the session's place in the queue; a place that has not changed is not news."""
        if self.farewell:
            return []
        self._waits.pop(Wait.SCHEDULER, None)
        before, self._queued = self._queued, queued
        if before is None:
            self._wait(Wait.QUEUE_UPDATE, self._limits.queue_update_s, now)
            return [queue_event(f"{self.dialect.queue_prefix}queued", queued)]
        if (before.position, before.queue_length) == (queued.position, queued.queue_length):
            return []
        return self._queue_update(queued, now)

    def _queue_update(self, queued: lease_pb2.Queued, now: Moment) -> list[bytes]:
        self._wait(Wait.QUEUE_UPDATE, self._limits.queue_update_s, now)
        return [queue_event(f"{self.dialect.queue_prefix}queue_update", queued)]

    def granted(self, open_s: float, now: Moment) -> list[bytes]:
        """Take the slot, which is claimed; the session's clock starts.

        The worker waits `open_s` for settings; 0 means that it did not say.
        """
        if self.farewell:
            return []
        for wait in (Wait.SCHEDULER, Wait.SLOT, Wait.QUEUE_UPDATE):
            self._waits.pop(wait, None)
        self.has_slot = True
        self._wait(Wait.WHOLE_SESSION, self._limits.session_s or self._mode.session_s, now)
        if self._settings is None:
            self._wait(Wait.SETTINGS, min(self._limits.init_s, open_s or math.inf), now)
        else:
            self._wait(Wait.CONVERSATION, self._limits.open_s, now)
        return [orjson.dumps({"type": f"{self.dialect.queue_prefix}queue_done"})]

    # --- the worker speaks ---

    def answered(self, response: session_pb2.ConverseResponse, now: Moment) -> list[bytes]:
        """Take what the worker said."""
        if self.farewell:
            return []
        match response.WhichOneof("message"):
            case "opened":
                self._waits.pop(Wait.CONVERSATION, None)
                self._uplink.limit = self._limits.pending_unit_count
                self._wait(Wait.AUDIO, self._limits.idle_s, now)
                return self.dialect.opened(response.opened, now) + self._answer_owed(now)
            case "delta" | "failed":
                return self._unit_answered(response, now)
            case "closed":
                end = WORKER_CLOSED.get(response.closed.reason, End.FAILED)
                return self.end(Ending(end, response.closed.message), now)
            case _:
                return []

    def _unit_answered(self, response: session_pb2.ConverseResponse, now: Moment) -> list[bytes]:
        if self.dialect.phase not in OPEN:
            return []  # nothing was asked yet
        is_delta = response.WhichOneof("message") == "delta"
        outcome = response.delta if is_delta else response.failed
        tag, ordinal = self._uplink.answered(outcome.sequence)
        if self.dialect.answers_appends:
            self._owed.answered(ordinal, outcome)
            return self._answer_owed(now)
        if isinstance(outcome, session_pb2.Failed):
            return [self.dialect.failed(outcome, now, tag.input_id)]
        dropped_count = outcome.dropped_unit_count + self._uplink.take_dropped_count()
        return [*self.dialect.delta(outcome, tag, dropped_count, now)]

    def _answer_owed(self, now: Moment) -> list[bytes]:
        """Answer the appends whose units are answered, and those that completed none."""
        if self.dialect.phase not in OPEN:
            return []
        events: list[bytes] = []
        for outcome in self._owed.take():
            if isinstance(outcome, session_pb2.Failed):
                events.append(self.dialect.failed(outcome, now))
            else:
                dropped_count = outcome.dropped_unit_count + self._uplink.take_dropped_count()
                events += self.dialect.delta(outcome, NO_TAG, dropped_count, now)
        return events

    def lost(self, error: FabricError, now: Moment) -> list[bytes]:
        """Take the failure of the fabric: before the slot was held, or of the conversation."""
        if self.farewell:
            return []
        if not self.has_slot:
            return self.end(_REFUSED.get(error.reason, _NOT_READY), now)
        if error.reason is Reason.INVALID_FIELD:
            message = name_fault(error.field, error.message)
            told = [self.dialect.error(ErrorCode.INVALID_PAYLOAD, message, now)]
            return told + self.end(Ending(End.FAILED, "settings were refused"), now)
        if error.reason is Reason.OPEN_TIMEOUT:
            return self.end(_EXPIRED[Wait.SETTINGS], now)
        is_open = self.dialect.phase in OPEN
        end = End.FAILED if is_open else self.dialect.lost_while_opening
        return self.end(Ending(end, "the worker was lost"), now)

    # --- to the worker ---

    def next_request(self) -> session_pb2.ConverseRequest | None:
        """Return what the worker is to be told next, None when there is nothing yet."""
        if self.farewell:
            return None
        if self._settings is not None and self.has_slot:
            request = session_pb2.ConverseRequest(open=self._settings)
            self._settings = None
            return request
        if self.dialect.phase not in OPEN:
            return None
        if self._requests and self._requests[0][0] <= self._uplink.taken_count:
            return self._requests.popleft()[1]
        if (taken := self._uplink.take()) is None:
            return None
        sequence, gathered = taken
        request = session_pb2.ConverseRequest()
        unit = request.unit  # filled in place: the audio is copied once
        unit.sequence = sequence
        unit.audio = gathered.audio
        unit.force_listen = gathered.force_listen
        unit.video_frames.extend(gathered.frames)
        if gathered.max_slice_count is not None:
            unit.max_slice_count = gathered.max_slice_count
        seconds, nanos = divmod(gathered.receive_wall_ns, 1_000_000_000)
        unit.receive_time.seconds, unit.receive_time.nanos = seconds, nanos
        return request

    # --- time and the end ---

    @property
    def deadline(self) -> float:
        """When `expire` must be called next, in monotonic seconds."""
        return min(self._waits.values(), default=math.inf)

    def expire(self, now: Moment) -> list[bytes]:
        """End waits that are over."""
        for wait in [wait for wait, due in self._waits.items() if due <= now.monotonic_s]:
            if wait is Wait.QUEUE_UPDATE:
                return self._queue_update(self._queued or lease_pb2.Queued(), now)
            if wait is Wait.CONVERSATION:
                return self.lost(FabricError(Reason.UNAVAILABLE, "the worker is silent"), now)
            return self.end(_EXPIRED[wait], now)
        return []

    def end(self, ending: Ending, now: Moment) -> list[bytes]:
        """End the session, once; the first end is the one that counts."""
        if self.farewell:
            return []
        self._waits.clear()
        code = self.dialect.close_code(ending)
        self.farewell = Farewell(ending.end, code, ending.message or ending.end.value)
        return self.dialect.ended(ending, now)

    def _wait(self, wait: Wait, seconds: float, now: Moment) -> None:
        self._waits[wait] = now.monotonic_s + seconds
