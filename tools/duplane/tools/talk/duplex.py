"""`duplane talk` in audio and video sessions: sends units at real-time pace, prints the replies."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pybase64
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from duplane.fabric.audio import (
    INPUT_RATE_HERTZ,
    OUTPUT_RATE_HERTZ,
    Samples,
    pcm_from_samples,
)
from duplane.tools.command import UsageError
from duplane.tools.talk.client import (
    TalkError,
    begin,
    check_out,
    connected,
    end,
    events_of,
    full_url,
    read_sound,
    write_sound,
)
from duplane.tools.talk.dialects import DIALECTS, TalkDialect, UnitReply
from duplane.tools.talk.settings import TalkSettings

_Unit = tuple[Samples, list[str]]  # the audio and the pictures of a unit

_UNIT_SAMPLES = INPUT_RATE_HERTZ  # one second
SAMPLE = Path(__file__).parent / "samples" / "questions.wav"
"""The recording that is sent by default. A text file beside it lists its questions."""
_REPLY_TIMEOUT_S = 10.0  # for the last replies, after everything is sent
_QUIET_S = 2.0  # the same, if no event answers a unit in which the model listens
QUEUE_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class UnitRow:
    """One unit and the reply to it, as they are printed."""

    unit: int
    latency_ms: float
    decision: str = ""
    text: str = ""
    audio_s: float = 0.0
    context: int = 0
    end_of_turn: bool = False
    listen_probability: float | None = None


@dataclass
class _Conversation:
    """The units sent and the replies to them."""

    as_json: bool
    is_each_answered: bool  # the server answers also units in which the model listens
    rows: list[UnitRow] = field(default_factory=list[UnitRow])
    audio: list[Samples] = field(default_factory=list[Samples])
    unanswered: dict[int, float] = field(default_factory=dict[int, float])
    errors: list[str] = field(default_factory=list[str])
    closed_reason: str | None = None
    all_answered: asyncio.Event = field(default_factory=asyncio.Event)
    _pending: UnitRow | None = None

    def sent(self, unit: int) -> None:
        self.unanswered[unit] = time.monotonic()
        self.all_answered.clear()

    def add(self, reply: UnitReply) -> None:
        """Add a reply to its unit; print the row of the unit once it is complete."""
        if self._pending and self._pending.unit != reply.unit:
            self.flush()
        samples = np.frombuffer(pybase64.b64decode(reply.audio, validate=True), "<f4")
        if samples.size:
            self.audio.append(samples)
        now = time.monotonic()
        before = self._pending or UnitRow(
            unit=reply.unit,
            latency_ms=round((now - self.unanswered.pop(reply.unit, now)) * 1000, 1),
        )
        self._pending = UnitRow(
            unit=reply.unit,
            decision="speak" if reply.is_speech else "listen",
            text=before.text + reply.text,
            audio_s=round(before.audio_s + samples.size / OUTPUT_RATE_HERTZ, 3),
            latency_ms=before.latency_ms,
            context=reply.context or before.context,
            end_of_turn=reply.end_of_turn,
            listen_probability=reply.listen_probability,
        )
        if not self.unanswered:
            self.all_answered.set()
        if reply.is_whole:
            self.flush()

    def flush(self) -> None:
        """Print the pending row, if there is one, even if its unit is not complete."""
        row, self._pending = self._pending, None
        if row is None:
            return
        self.rows.append(row)
        if self.as_json:
            sys.stdout.write(orjson.dumps(asdict(row)).decode() + "\n")
        else:
            end = "  end of turn" if row.end_of_turn else ""
            if row.listen_probability is not None:
                end = f"  listen probability {row.listen_probability:.2g}{end}"
            sys.stdout.write(
                f"{row.unit:4d}  {row.decision:6s}  {row.audio_s:6.2f} s  {row.latency_ms:7.1f} ms"
                f"  context {row.context:5d}  {row.text!r}{end}\n"
            )
        sys.stdout.flush()


def talk_to(settings: TalkSettings, *, out: Path | None, as_json: bool) -> None:
    """Run the conversation, print a row per unit and write the reply.

    Raises UsageError for invalid settings, and TalkError if the conversation fails.
    """
    if settings.frames and settings.mode != "video":
        raise UsageError("pictures (--frame) are for --mode video, or for a chat")
    if settings.videos:
        raise UsageError("video files (--video) are for a chat: --mode chat --dialect B, or D")
    if settings.texts:
        raise UsageError("texts (--text) are for a chat: --mode chat --dialect B, or D")
    check_out(out)
    speech = read_sound(settings.wav or SAMPLE)
    voice = base64_of(read_sound(settings.voice)) if settings.voice else None
    if settings.wav is None and not as_json:
        show_sample()
    dialect = DIALECTS[settings.dialect](settings.prompt, voice, settings.seed)
    conversation = _Conversation(as_json, dialect.answers_each_unit)
    asyncio.run(_converse(settings, dialect, speech, conversation))
    write_sound(out, conversation.audio)
    _summarize(conversation, out)


def show_sample() -> None:
    """Print what the recording says that is sent by default."""
    questions = SAMPLE.with_suffix(".txt").read_text(encoding="utf-8")
    sys.stderr.write(f"sending {SAMPLE.name}, in which a synthetic voice says:\n{questions}")


def _summarize(conversation: _Conversation, out: Path | None) -> None:
    rows = conversation.rows
    spoken = sum(row.decision == "speak" for row in rows)
    if not conversation.is_each_answered:
        conversation.unanswered.clear()
    seconds = sum(row.audio_s for row in rows)
    latencies = sorted(row.latency_ms for row in rows) or [0.0]
    sys.stderr.write(
        f"{len(rows)} units: {len(rows) - spoken} listened, {spoken} spoken,"
        f" {seconds:.1f} s of speech{f' in {out}' if out else ''};"
        f" latency p50 {latencies[len(latencies) // 2]:.0f} ms, max {latencies[-1]:.0f} ms;"
        f" closed: {conversation.closed_reason}\n"
    )
    if conversation.errors:
        raise TalkError("; ".join(conversation.errors))
    if conversation.unanswered:
        raise TalkError(f"{len(conversation.unanswered)} units were never answered")
    if conversation.closed_reason is None:
        raise TalkError("the server did not close the session in order")


def base64_of(samples: Samples) -> str:
    return pybase64.b64encode_as_string(pcm_from_samples(samples))


async def _converse(
    settings: TalkSettings, dialect: TalkDialect, speech: Samples, conversation: _Conversation
) -> None:
    url = full_url(settings.url, dialect.path(settings.mode))
    pictures = [pybase64.b64encode_as_string(file.read_bytes()) for file in settings.frames]
    try:
        async with connected(url, settings.ca, settings.key_file) as connection:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                await begin(connection, dialect, print_position)
            units = _units(speech, settings.tail_s)
            frames = [
                [pictures[at % len(pictures)]] if pictures else [] for at in range(len(units))
            ]
            await _stream(connection, dialect, list(zip(units, frames, strict=True)), conversation)
    except TimeoutError:
        raise TalkError("the server does not answer") from None
    except ConnectionClosed as error:
        raise TalkError(f"the connection ended early: {error}") from None


def print_position(event: dict[str, Any]) -> None:
    """Print the position in the queue, and the estimated wait or why there is no estimate."""
    wait = event.get("reason") or f"about {event.get('estimated_wait_s')} s"
    sys.stderr.write(f"queued: position {event.get('position')}, {wait}\n")


async def _stream(
    connection: ClientConnection,
    dialect: TalkDialect,
    units: list[_Unit],
    conversation: _Conversation,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        receiver = tasks.create_task(_receive(connection, dialect, conversation))
        await _send(connection, dialect, units, conversation)
        await asyncio.wait({receiver}, timeout=_REPLY_TIMEOUT_S)
        receiver.cancel()


async def _send(
    connection: ClientConnection,
    dialect: TalkDialect,
    units: list[_Unit],
    conversation: _Conversation,
) -> None:
    begin = time.monotonic()
    with contextlib.suppress(ConnectionClosed):  # the receiver reports the reason
        for number, (unit, frames) in enumerate(units):
            # Wait like a microphone, which delivers a second of sound when the second has passed.
            await asyncio.sleep(max(0.0, begin + number + 1 - time.monotonic()))
            conversation.sent(number)
            message = dialect.unit(number, base64_of(unit), frames)
            await connection.send(orjson.dumps(message), text=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPLY_TIMEOUT_S if dialect.answers_each_unit else _QUIET_S):
                await conversation.all_answered.wait()
        await end(connection, dialect)


async def _receive(
    connection: ClientConnection, dialect: TalkDialect, conversation: _Conversation
) -> None:
    try:
        async for event in events_of(connection):
            match event.get("type"):
                case "error":
                    conversation.errors.append(orjson.dumps(event.get("error")).decode())
                case kind if kind in dialect.ended:
                    conversation.closed_reason = str(event.get("reason") or kind)
                case _:
                    for reply in dialect.replies(event):
                        conversation.add(reply)
        if not dialect.ended and not conversation.errors:
            conversation.closed_reason = "the client ended the connection"
    except ConnectionClosed as closed:
        conversation.errors.append(f"the connection broke: {closed}")
    finally:
        conversation.flush()
        conversation.all_answered.set()


def _units(speech: Samples, tail_s: float) -> list[Samples]:
    """Append silence, and cut the sound into units of one second; the last unit is padded."""
    count = -(-(speech.size + int(tail_s * INPUT_RATE_HERTZ)) // _UNIT_SAMPLES)
    padded = np.zeros(count * _UNIT_SAMPLES, np.float32)
    padded[: speech.size] = speech
    return list(padded.reshape(count, _UNIT_SAMPLES))
