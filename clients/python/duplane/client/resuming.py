"""What a client keeps so that it can return to its session on another socket. Pure."""

from __future__ import annotations

import base64
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from duplane.client.events import INPUT_RATE, Event

KEPT_S = 10.0
"""Seconds of input that are kept; older input is lost if the server does not have it."""
ATTEMPTS = 5
"""Connections that are tried after a loss. A server that says `resume_busy` costs no attempt."""
REFUSALS = frozenset({"resume_refused", "resume_expired", "resume_lost", "resume_stale"})
"""Codes of errors after which a client cannot have its session again."""
BUSY = "resume_busy"
_KEPT_SAMPLES = int(KEPT_S * INPUT_RATE)
# Sound beyond the units that the server has begun, while a client catches up after a return. A
# server drops the oldest of more than four units that wait.
_AHEAD_SAMPLES = 2 * INPUT_RATE
_MIN_WAIT_S, _MAX_WAIT_S = 0.25, 4.0
_WAV_HEAD = b"UklGR"  # base64 of `RIFF`, as `encoded` writes int16
_WAV_HEAD_BYTES = 44

ReturnWait = Callable[[int], float]
"""Returns the seconds before an attempt, counted from 0."""


def return_wait_s(attempt: int) -> float:
    """Return the wait before an attempt: 0.25 to 4 s, half of it random."""
    longest_s = min(_MAX_WAIT_S, 2 * _MIN_WAIT_S * 2.0 ** min(attempt, 10))
    return longest_s * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Return:
    """A return to the session on another socket.

    `gap_s` is how long the server had no socket, `away_s` how long this client had none, and
    `took_s` the part of it from the last attempt to the server's answer. `lost_samples` of the
    input are lost, because they were older than what a client keeps. A client that `was_asked` left
    a server that shuts down.
    """

    gap_s: float
    away_s: float
    took_s: float
    attempts: int
    lost_samples: int
    was_asked: bool = False


@dataclass(frozen=True, slots=True)
class Input:
    """One append: its first sample, counted from the begin of the session, and its content."""

    first: int
    count: int
    audio: bytes  # base64; empty for pictures alone
    frames: Sequence[str] = ()
    force_listen: bool = False
    input_id: str | None = None

    @property
    def end(self) -> int:
        """The first sample after this input."""
        return self.first + self.count

    def split(self, sample: int) -> tuple[Input, Input]:
        """Return the parts before and from a sample that is inside of this input."""
        skipped = sample - self.first
        audio = base64.b64decode(self.audio)
        is_wav = self.audio.startswith(_WAV_HEAD)
        head, width = (audio[:_WAV_HEAD_BYTES], 2) if is_wav else (b"", 4)
        at = len(head) + width * skipped
        before, after = (
            base64.b64encode(_with_size(head, len(sound)) + sound)
            for sound in (audio[len(head) : at], audio[at:])
        )
        return (
            replace(self, count=skipped, audio=before),
            replace(self, first=sample, count=self.count - skipped, audio=after),
        )


def _with_size(wav_head: bytes, size: int) -> bytes:
    """Return the head of a WAV file for another size of its sound."""
    if not wav_head:
        return b""
    whole = (size + _WAV_HEAD_BYTES - 8).to_bytes(4, "little")
    return wav_head[:4] + whole + wav_head[8:-4] + size.to_bytes(4, "little")


def sample_count(audio: bytes) -> int:
    """Return the number of samples of an append: base64 of a WAV file or of float32."""
    size = len(audio) // 4 * 3 - audio[-2:].count(b"=")
    return (size - _WAV_HEAD_BYTES) // 2 if audio.startswith(_WAV_HEAD) else size // 4


class SentInput:
    """The input of the last seconds. One part of it is sent, the other part waits for a socket.

    Above `KEPT_S` the oldest input is dropped, except while a return `is_asked`: the server then
    knows from which sample on the client can send.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self.is_away = False  # there is no socket, so all input waits
        self._dropped = 0  # samples that were never sent
        self._limit: int | None = None  # of the input to send, while the client catches up
        self._sent: deque[Input] = deque()
        self._waiting: deque[Input] = deque()
        self._end = 0

    @property
    def first_sample(self) -> int:
        """The first sample that is kept."""
        kept = self._sent or self._waiting
        return kept[0].first if kept else self._end

    def add(
        self,
        audio: bytes,
        frames: Sequence[str] = (),
        *,
        force_listen: bool = False,
        input_id: str | None = None,
    ) -> None:
        """Keep the next input; it waits for a socket."""
        count = sample_count(audio) if audio else 0
        self._waiting.append(Input(self._end, count, audio, frames, force_listen, input_id))
        self._end += count
        if not self.is_asked:
            self._drop_old()

    def take(self) -> Input | None:
        """Return the next input to send; None if there is none that the server can take now."""
        if not self._waiting:
            self._limit = None
        if not self._waiting or self.is_away:
            return None
        if self._limit is not None and self._waiting[0].first >= self._limit:
            return None
        taken = self._waiting.popleft()
        self._sent.append(taken)
        return taken

    def rewind(self, next_sample: int) -> int:
        """Let all input from a sample on wait again. Return how many samples before it are lost."""
        lost = max(self._dropped, self.first_sample - next_sample)
        self._dropped = 0
        kept = deque((*self._sent, *self._waiting))
        self._sent.clear()
        while kept and kept[0].end <= next_sample:
            self._sent.append(kept.popleft())
        if kept and kept[0].first < next_sample:
            before, kept[0] = kept[0].split(next_sample)
            self._sent.append(before)
        self._waiting = kept
        self._limit = next_sample + _AHEAD_SAMPLES
        self.is_asked = self.is_away = False
        return lost

    def begun(self, event: Event) -> bool:
        """Read the `next_sample` of an event. Return whether there is more input to send now."""
        match event:
            case {"next_sample": int(sample)} if self._limit is not None:
                self._limit = max(self._limit, sample + _AHEAD_SAMPLES)
                return True
            case _:
                return False

    def _drop_old(self) -> None:
        for kept in (self._sent, self._waiting):
            while kept and kept[0].end <= self._end - _KEPT_SAMPLES:
                dropped = kept.popleft()
                self._dropped += dropped.count if kept is self._waiting else 0


class Resumption:
    """The token of a session, and the last event of a unit that the client has."""

    def __init__(self) -> None:
        self.within_s = 0.0
        self.queue_token = ""
        self._token = ""
        self._unit = self._part = -1

    def read(self, event: Event) -> Event:
        """Note the tokens in an event. Return the event without them, for those who log it."""
        if token := event.get("queue_token"):
            self.queue_token = str(token)
            return {name: value for name, value in event.items() if name != "queue_token"}
        match event:
            case {"type": "session.created", "resume": {"token": str(token), **rest}}:
                self._token = token
                self.within_s = float(rest.get("within_s", 0.0))
                return {**event, "resume": rest}
            case {"type": "session.resumed"}:
                self.within_s = float(event.get("within_s", self.within_s))
            case _:
                pass
        return event

    @property
    def settings(self) -> Mapping[str, object]:
        """The fields of the settings that ask for a session to which the client can return."""
        place = {"queue_token": self.queue_token} if self.queue_token else {}
        return {"resumable": True, **place}

    @property
    def is_possible(self) -> bool:
        """Whether the server lets the client return."""
        return bool(self._token)

    def is_new(self, event: Event) -> bool:
        """Move the cursor to an event of a unit; False if the client has this event already."""
        match event:
            case {"unit": int(unit), "part": int(part)} if "gap_s" not in event:
                if (unit, part) <= (self._unit, self._part):
                    return False
                self._unit, self._part = unit, part
            case _:
                pass
        return True

    def request(self, first_sample: int) -> dict[str, object]:
        """Return the first event of another socket."""
        cursor = {"unit": self._unit, "part": self._part} if self._unit >= 0 else {}
        return {
            "type": "session.resume",
            "token": self._token,
            **cursor,
            "from_sample": first_sample,
        }
