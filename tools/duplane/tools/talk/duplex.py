"""`duplane talk` in audio and video sessions: sends units at real-time pace, prints the replies."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import orjson
import pybase64
from websockets.exceptions import ConnectionClosed

from duplane.client import QueuePlace, Return
from duplane.fabric.audio import INPUT_RATE_HERTZ, OUTPUT_RATE_HERTZ, Samples
from duplane.tools.command import UsageError
from duplane.tools.talk.client import TalkError, check_out, read_sound, write_sound
from duplane.tools.talk.dialects import UnitReply
from duplane.tools.talk.sessions import QUEUE_TIMEOUT_S, TalkSession, Wish, begun
from duplane.tools.talk.settings import TalkSettings

_UNIT_SAMPLES = INPUT_RATE_HERTZ  # one second
SAMPLE = Path(__file__).parent / "samples" / "questions.wav"
SEEN_SAMPLE = SAMPLE.with_name("pictures.wav")
SAMPLE_PICTURE = SAMPLE.with_name("pictures.jpg")
"""The recording that is sent by default. A text file beside it lists its questions."""
_REPLY_TIMEOUT_S = 10.0  # for the last replies, after everything is sent
_QUIET_S = 2.0  # the same, if no event answers a unit in which the model listens


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
    is_each_answered: bool = True  # the server answers also units in which the model listens
    rows: list[UnitRow] = field(default_factory=list[UnitRow])
    audio: list[Samples] = field(default_factory=list[Samples])
    unanswered: dict[int, float] = field(default_factory=dict[int, float])
    errors: list[str] = field(default_factory=list[str])
    closed_reason: str | None = None
    is_over: bool = False
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
    is_video = settings.mode == "video"
    sample = SEEN_SAMPLE if is_video else SAMPLE
    speech = read_sound(settings.wav or sample)
    voice = read_sound(settings.voice) if settings.voice else None
    if settings.wav is None and not as_json:
        show_sample(sample)
    conversation = _Conversation(as_json)
    wish = Wish(
        url=settings.url,
        dialect=settings.dialect,
        mode="video" if is_video else "audio",
        prompt=settings.prompt,
        voice=voice,
        seed=settings.seed,
        is_resumable=settings.resume,
        on_return=print_return,
        ca=settings.ca,
        key_file=settings.key_file,
        on_queued=print_position,
        on_error=conversation.errors.append,
    )
    files = settings.frames or ((SAMPLE_PICTURE,) if is_video and settings.wav is None else ())
    pictures = [file.read_bytes() for file in files]
    asyncio.run(_converse(wish, _units(speech, settings.tail_s), pictures, conversation))
    write_sound(out, conversation.audio)
    _summarize(conversation, out)


def show_sample(sample: Path = SAMPLE) -> None:
    """Print what a recording says that is sent by default."""
    questions = sample.with_suffix(".txt").read_text(encoding="utf-8")
    sys.stderr.write(f"sending {sample.name}, in which a synthetic voice says:\n{questions}")


def print_return(back: Return) -> None:
    """Print that the conversation continues on a new connection."""
    if back.was_asked:
        sys.stderr.write("the server shuts down: the conversation goes on at another one\n")
        return
    lost = f"; {back.lost_samples / INPUT_RATE_HERTZ:.1f} s of the input are lost"
    sys.stderr.write(
        f"the connection was lost: the conversation goes on after {back.away_s:.1f} s"
        f"{lost if back.lost_samples else ''}\n"
    )


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


async def _converse(
    wish: Wish, units: Sequence[Samples], pictures: Sequence[bytes], conversation: _Conversation
) -> None:
    try:
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                session = await stack.enter_async_context(begun(wish))
            conversation.is_each_answered = session.answers_each_unit
            async with asyncio.TaskGroup() as tasks:
                receiver = tasks.create_task(_receive(session, conversation))
                await _send(session, units, pictures, conversation)
                await asyncio.wait({receiver}, timeout=_REPLY_TIMEOUT_S)
                receiver.cancel()
    except TimeoutError:
        raise TalkError("the server does not answer") from None
    except ConnectionClosed as error:
        raise TalkError(f"the connection ended early: {error}") from None


def print_position(place: QueuePlace) -> None:
    """Print the position in the queue, and the estimated wait or why there is no estimate."""
    known = "" if place.estimated_wait_s is None else f"about {place.estimated_wait_s:g} s"
    wait = place.reason or known or "for an unknown time"
    sys.stderr.write(f"queued: position {place.position}, {wait}\n")


async def _send(
    session: TalkSession,
    units: Sequence[Samples],
    pictures: Sequence[bytes],
    conversation: _Conversation,
) -> None:
    begin = time.monotonic()
    for number, unit in enumerate(units):
        # Wait like a microphone, which delivers a second of sound when the second has passed.
        await asyncio.sleep(max(0.0, begin + number + 1 - time.monotonic()))
        if conversation.is_over:
            return
        conversation.sent(number)
        shown = [pictures[number % len(pictures)]] if pictures else []
        await session.send(number, unit, shown)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REPLY_TIMEOUT_S if session.answers_each_unit else _QUIET_S):
            await conversation.all_answered.wait()
    await session.close()


async def _receive(session: TalkSession, conversation: _Conversation) -> None:
    try:
        async for reply in session.replies():
            conversation.add(reply)
        conversation.closed_reason = session.end
    except TalkError as error:
        conversation.errors.append(str(error))
    finally:
        conversation.flush()
        conversation.is_over = True
        conversation.all_answered.set()


def _units(speech: Samples, tail_s: float) -> list[Samples]:
    """Append silence, and cut the sound into units of one second; the last unit is padded."""
    count = -(-(speech.size + int(tail_s * INPUT_RATE_HERTZ)) // _UNIT_SAMPLES)
    padded = np.zeros(count * _UNIT_SAMPLES, np.float32)
    padded[: speech.size] = speech
    return list(padded.reshape(count, _UNIT_SAMPLES))
