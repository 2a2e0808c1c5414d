"""`duplane replay`: sends the client events of a recording again and compares the answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import orjson
import pybase64
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.edge.recording.events import join
from duplane.edge.recording.storage import Meta, read_events, read_meta
from duplane.edge.routing import HTTP_CHAT_PATHS
from duplane.fabric.audio import OUTPUT_RATE_HERTZ
from duplane.tools.bench.report import show
from duplane.tools.command import UsageError
from duplane.tools.talk.client import ConnectError, connected, full_url

# Events about the service, which differ from run to run.
_SERVICE_EVENTS = frozenset(
    f"{prefix}{kind}"
    for prefix in ("session.", "")
    for kind in ("queued", "queue_update", "queue_done", "moving")
)
_REQUEST_FIRST = ("D", "E", "L")  # their clients send a request before they wait in the queue
# Events of E and L, whose sample rate is not known here. A has an event of this name, too.
_TEXTS = (
    "response.output_audio_transcript.delta",
    "response.output_text.delta",
    "session.output_transcript.delta",
)
_SOUNDS = ("response.output_audio.delta", "session.output_audio.delta")
_PATH_OF_E = "/openai/v1/realtime"  # on the path of A and B, `mode` would ask for these
_QUEUE_TIMEOUT_S = 3600.0
_MISSING = "-"


class ReplayError(UsageError):
    """The recording cannot be replayed; the message says why."""


@dataclass(frozen=True)
class ServerEvent:
    """The parts of a server event that should be equal in two runs of one session."""

    kind: str
    text: str
    audio_samples: int
    details: str

    def __str__(self) -> str:
        seconds = f"{self.audio_samples / OUTPUT_RATE_HERTZ:.3f} s" if self.audio_samples else ""
        text = repr(self.text) if self.text else ""
        return " ".join(filter(None, (self.kind, seconds, text, self.details)))


@dataclass(frozen=True)
class ClientEvent:
    """One client event: the time at which it was sent, and the number of answers before it."""

    frame: object
    at_s: float
    after_answers: int


@dataclass(frozen=True)
class Script:
    """One recording, ready to be replayed.

    Queue events are left out, because they depend on other clients.
    """

    directory: Path
    meta: Meta
    sent: list[ClientEvent]
    received: list[ServerEvent]

    def read(self, blob: str) -> bytes:
        """Return the content of a payload."""
        return (self.directory / blob).read_bytes()

    def content(self, sent: ClientEvent) -> bytes:
        """Return the bytes of a client event as it was sent."""
        event = join(sent.frame, self.read)
        if isinstance(sent.frame, str):  # a frame that was not JSON
            return pybase64.b64decode(str(event))
        return orjson.dumps(event)


@dataclass
class Outcome:
    """The answers to a replay."""

    received: list[ServerEvent] = field(default_factory=list[ServerEvent])
    failure: str = ""
    is_over: bool = False
    is_admitted: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def wait_for(self, answers: int, timeout_s: float) -> bool:
        """Wait for this number of answers; return False if they do not arrive in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self.news:
                await self.news.wait_for(lambda: len(self.received) >= answers or self.is_over)
        return len(self.received) >= answers


def read_script(directory: Path) -> Script:
    """Read a recording. Raises ReplayError."""
    meta = read_meta(directory)
    if meta is None:
        raise ReplayError(f"{directory} is not a recording")
    if meta.path in HTTP_CHAT_PATHS:
        raise ReplayError(f"{directory} records an HTTP request: send it to {meta.path} again")
    script = Script(directory, meta, [], [])
    try:
        for event in read_events(directory):
            _add(script, event)
    except (OSError, KeyError, TypeError) as error:
        raise ReplayError(f"{directory} cannot be read: {error}") from None
    if not script.sent:
        raise ReplayError(f"{directory}: the client sent nothing")
    return script


def _add(script: Script, event: dict[str, Any]) -> None:
    frame = event["frame"]
    if event["dir"] == "up":
        sent = ClientEvent(frame, event["ts"] - script.meta.created_at, len(script.received))
        script.sent.append(sent)
    elif frame.get("type") not in _SERVICE_EVENTS:
        script.received.append(_server_event(join(frame, script.read)))


def _transcript(event: Any) -> str:
    return event["delta"] if event.get("type") in _TEXTS else ""


def _server_event(event: Any) -> ServerEvent:
    kind = event.get("type")
    audio = event.get("audio") or event.get("audio_data") or ""
    error = event.get("error")
    code = cast("dict[str, Any]", error).get("code") if isinstance(error, dict) else error
    sound = event.get("delta") if kind in _SOUNDS else None
    details = [
        "end of turn" if event.get("end_of_turn") else "",
        str(event.get("reason") or ""),
        str(code or ""),
        f"{len(pybase64.b64decode(sound))} bytes" if sound else "",
    ]
    return ServerEvent(
        kind=":".join(filter(None, (str(kind), event.get("kind")))),
        text=event.get("text") or event.get("text_delta") or _transcript(event),
        audio_samples=len(pybase64.b64decode(audio)) // 4,
        details=" ".join(filter(None, details)),
    )


# --- replaying ---


async def play(script: Script, url: str, *, is_paced: bool, timeout_s: float = 30.0) -> Outcome:
    """Send the client events again. Raises ReplayError if no connection can be opened.

    With `is_paced`, each event is sent at its recorded time. Otherwise each event waits for the
    answers that preceded it in the recording; if one of these answers does not arrive within
    `timeout_s`, the replay ends.
    """
    outcome = Outcome()
    try:
        async with (
            connected(session_url(url, script.meta)) as connection,
            asyncio.TaskGroup() as tasks,
        ):
            receiving = tasks.create_task(_receive(connection, outcome))
            await _send_all(connection, script, outcome, is_paced=is_paced, timeout_s=timeout_s)
            receiving.cancel()
    except ConnectError as error:
        raise ReplayError(str(error)) from None
    return outcome


def session_url(url: str, meta: Meta) -> str:
    """Return the URL of the recorded session on the server of `url`, unless `url` has a path."""
    path = _PATH_OF_E if meta.dialect == "E" else meta.path
    return full_url(url, f"{quote(path)}?mode={quote(meta.mode)}")


async def _receive(connection: ClientConnection, outcome: Outcome) -> None:
    async for event in _events(connection):
        async with outcome.news:
            if event.get("type") not in _SERVICE_EVENTS:
                outcome.received.append(_server_event(event))
            if event.get("type") not in ("session.queued", "queued"):
                outcome.is_admitted.set()
            outcome.news.notify_all()
    async with outcome.news:
        outcome.is_over = True
        outcome.is_admitted.set()
        outcome.news.notify_all()


async def _events(connection: ClientConnection) -> AsyncIterator[dict[str, Any]]:
    with contextlib.suppress(ConnectionClosed):
        async for message in connection:
            yield orjson.loads(message)


async def _send_all(
    connection: ClientConnection,
    script: Script,
    outcome: Outcome,
    *,
    is_paced: bool,
    timeout_s: float,
) -> None:
    if script.meta.dialect not in _REQUEST_FIRST:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_QUEUE_TIMEOUT_S):
                await outcome.is_admitted.wait()
    begin = time.monotonic()
    first_s = script.sent[0].at_s
    last = len(script.sent) - 1
    for number, sent in enumerate(script.sent):
        if is_paced:
            await asyncio.sleep(max(0.0, begin + sent.at_s - first_s - time.monotonic()))
        # The last event may close the session, so it always waits for the answers that preceded it.
        is_due = is_paced and number < last
        if not is_due and not await outcome.wait_for(sent.after_answers, timeout_s):
            outcome.failure = f"no further answer before client event {number}"
            return
        try:
            await connection.send(script.content(sent), text=True)
        except ConnectionClosed:
            outcome.failure = f"the server closed before client event {number}"
            return
    if not await outcome.wait_for(len(script.received), timeout_s):
        outcome.failure = "answers are missing at the end"
    elif script.meta.close_reason not in ("gone", "lost", None):
        # Wait until the server closes, to detect an answer that the recording does not have.
        await outcome.wait_for(len(script.received) + 1, timeout_s)


# --- comparing ---


def compare_events(
    recorded: list[ServerEvent], replayed: list[ServerEvent]
) -> Iterator[tuple[str, str, bool]]:
    """Yield pairs of a recorded and a replayed event, and whether they agree."""
    for was, came in itertools.zip_longest(recorded, replayed):
        yield str(was or _MISSING), str(came or _MISSING), was == came


def replay_recording(directory: Path, url: str, *, is_paced: bool) -> int:
    """Replay a recording, compare the answers and print a table; return 0 if all agree, else 1.

    Raises ReplayError if the recording cannot be replayed.
    """
    script = read_script(directory)
    outcome = asyncio.run(play(script, url, is_paced=is_paced))
    rows = list(compare_events(script.received, outcome.received))
    show(
        f"{script.meta.session_id}, dialect {script.meta.dialect}, replayed at {url}",
        ("", "recorded", "replayed", "event"),
        [
            ("ok" if is_same else "DIFFERS", was, came, str(number))
            for number, (was, came, is_same) in enumerate(rows)
        ],
    )
    different = sum(not is_same for *_, is_same in rows)
    notes = [outcome.failure, "the recording is incomplete" if script.meta.is_incomplete else ""]
    summary = "; ".join(filter(None, (f"{len(rows)} events, {different} differ", *notes)))
    sys.stdout.write(f"{summary}\n")
    return 1 if different or outcome.failure else 0
