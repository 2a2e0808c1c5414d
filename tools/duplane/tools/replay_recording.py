"""`duplane replay`: plays the user's side of a recording again and compares what comes back."""

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
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from duplane.edge.entry import ASKED
from duplane.edge.recording.events import join
from duplane.edge.recording.shelf import Meta, read_events, read_meta
from duplane.fabric.audio import OUTPUT_RATE_HERTZ
from duplane.tools.bench.table import show
from duplane.tools.dial import dial, full_url

_QUEUE_EVENTS = frozenset(
    f"{prefix}{kind}" for prefix in ("session.", "") for kind in ("queued", "queue_update")
) | {"session.queue_done", "queue_done"}
_ASKS_FIRST = ("D",)  # dialects whose clients stand in no queue before they have spoken
_QUEUE_TIMEOUT_S = 3600.0
_MISSING = "-"


class ReplayFailed(Exception):  # noqa: N818  # reads as what happened
    """The recording cannot be played; the message says why."""


@dataclass(frozen=True)
class Told:
    """One server event, as far as two runs of one session should agree."""

    kind: str
    text: str
    audio_samples: int
    details: str

    def __str__(self) -> str:
        seconds = f"{self.audio_samples / OUTPUT_RATE_HERTZ:.3f} s" if self.audio_samples else ""
        text = repr(self.text) if self.text else ""
        return " ".join(filter(None, (self.kind, seconds, text, self.details)))


@dataclass(frozen=True)
class Said:
    """One client event: when it was sent, and after how many answers."""

    frame: object
    at_s: float
    after_answers: int


@dataclass(frozen=True)
class Script:
    """One recording, ready to be played. Queue events are left out: they are about others."""

    directory: Path
    meta: Meta
    said: list[Said]
    told: list[Told]

    def read(self, blob: str) -> bytes:
        """Return the content of a payload."""
        return (self.directory / blob).read_bytes()

    def content(self, said: Said) -> bytes:
        """Return a client event as it was sent."""
        event = join(said.frame, self.read)
        if isinstance(said.frame, str):  # a frame that was no JSON at all
            return pybase64.b64decode(str(event))
        return orjson.dumps(event)


@dataclass
class Take:
    """What came back this time."""

    told: list[Told] = field(default_factory=list[Told])
    failure: str = ""
    is_over: bool = False
    is_admitted: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def hear(self, answers: int, timeout_s: float) -> bool:
        """Wait until so many answers have come; False when they do not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self.news:
                await self.news.wait_for(lambda: len(self.told) >= answers or self.is_over)
        return len(self.told) >= answers


def read_script(directory: Path) -> Script:
    """Read a recording. Raises ReplayFailed."""
    meta = read_meta(directory)
    if meta is None:
        raise ReplayFailed(f"{directory} is not a recording")
    if meta.path == ASKED:
        raise ReplayFailed(f"{directory} is of one HTTP request: send it to {ASKED} again")
    script = Script(directory, meta, [], [])
    try:
        for event in read_events(directory):
            _take(script, event)
    except (OSError, KeyError, TypeError) as error:
        raise ReplayFailed(f"{directory} cannot be read: {error}") from None
    if not script.said:
        raise ReplayFailed(f"{directory}: the client said nothing")
    return script


def _take(script: Script, event: dict[str, Any]) -> None:
    frame = event["frame"]
    if event["dir"] == "up":
        said = Said(frame, event["ts"] - script.meta.created_at, len(script.told))
        script.said.append(said)
    elif frame.get("type") not in _QUEUE_EVENTS:
        script.told.append(_told(join(frame, script.read)))


def _told(event: Any) -> Told:
    audio = event.get("audio") or event.get("audio_data") or ""
    error = event.get("error")
    code = cast("dict[str, Any]", error).get("code") if isinstance(error, dict) else error
    details = [
        "end of turn" if event.get("end_of_turn") else "",
        str(event.get("reason") or ""),
        str(code or ""),
    ]
    return Told(
        kind=":".join(filter(None, (str(event.get("type")), event.get("kind")))),
        text=event.get("text") or event.get("text_delta") or "",
        audio_samples=len(pybase64.b64decode(audio)) // 4,
        details=" ".join(filter(None, details)),
    )


# --- playing ---


async def play(script: Script, url: str, *, is_paced: bool, timeout_s: float = 30.0) -> Take:
    """Say what the user said, as it was timed, or each thing once as many answers have come as
    had come before it. Raises ReplayFailed without a connection.

    A replay that gets no further within `timeout_s` ends there.
    """
    take = Take()
    try:
        async with (
            dial(session_url(url, script.meta)) as connection,
            asyncio.TaskGroup() as tasks,
        ):
            listening = tasks.create_task(_listen(connection, take))
            await _say_all(connection, script, take, is_paced=is_paced, timeout_s=timeout_s)
            listening.cancel()
    except (OSError, InvalidHandshake) as error:
        raise ReplayFailed(f"no connection to {url}: {error}") from None
    return take


def session_url(url: str, meta: Meta) -> str:
    """Return the URL a session was held at, on another server unless `url` has a path itself."""
    return full_url(url, f"{quote(meta.path)}?mode={quote(meta.mode)}")


async def _listen(connection: ClientConnection, take: Take) -> None:
    async for event in _events(connection):
        async with take.news:
            if event.get("type") not in _QUEUE_EVENTS:
                take.told.append(_told(event))
            if event.get("type") not in ("session.queued", "queued"):
                take.is_admitted.set()
            take.news.notify_all()
    async with take.news:
        take.is_over = True
        take.is_admitted.set()
        take.news.notify_all()


async def _events(connection: ClientConnection) -> AsyncIterator[dict[str, Any]]:
    with contextlib.suppress(ConnectionClosed):
        async for message in connection:
            yield orjson.loads(message)


async def _say_all(
    connection: ClientConnection, script: Script, take: Take, *, is_paced: bool, timeout_s: float
) -> None:
    if script.meta.dialect not in _ASKS_FIRST:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_QUEUE_TIMEOUT_S):
                await take.is_admitted.wait()
    begin, first_s, last = time.monotonic(), script.said[0].at_s, len(script.said) - 1
    for number, said in enumerate(script.said):
        if is_paced:
            await asyncio.sleep(max(0.0, begin + said.at_s - first_s - time.monotonic()))
        # A client that leaves lets the last answers come, however fast they come this time.
        is_due = is_paced and number < last
        if not is_due and not await take.hear(said.after_answers, timeout_s):
            take.failure = f"no further answer before client event {number}"
            return
        try:
            await connection.send(script.content(said), text=True)
        except ConnectionClosed:
            take.failure = f"the server closed before client event {number}"
            return
    if not await take.hear(len(script.told), timeout_s):
        take.failure = "answers are missing at the end"
    elif script.meta.close_reason not in ("gone", "lost", None):
        # Whatever follows in the time that a farewell may take would be one answer too many.
        await take.hear(len(script.told) + 1, timeout_s)


# --- comparing ---


def compare(recorded: list[Told], replayed: list[Told]) -> Iterator[tuple[str, str, bool]]:
    """Yield each event of both, in order, and whether they agree."""
    for was, came in itertools.zip_longest(recorded, replayed):
        yield str(was or _MISSING), str(came or _MISSING), was == came


def replay(directory: Path, url: str, *, is_paced: bool) -> int:
    """Play and compare, print a table; return 0 when all is as it was, else 1.

    Raises ReplayFailed when there is nothing to compare.
    """
    script = read_script(directory)
    take = asyncio.run(play(script, url, is_paced=is_paced))
    rows = list(compare(script.told, take.told))
    show(
        f"{script.meta.session_id}, dialect {script.meta.dialect}, replayed at {url}",
        ("", "recorded", "replayed", "event"),
        [
            ("ok" if is_same else "DIFFERS", was, came, str(number))
            for number, (was, came, is_same) in enumerate(rows)
        ],
    )
    different = sum(not is_same for *_, is_same in rows)
    notes = [take.failure, "the recording is incomplete" if script.meta.is_incomplete else ""]
    summary = "; ".join(filter(None, (f"{len(rows)} events, {different} differ", *notes)))
    sys.stdout.write(f"{summary}\n")
    return 1 if different or take.failure else 0
