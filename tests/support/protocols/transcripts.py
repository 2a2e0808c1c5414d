"""Reads transcripts of sessions. Their format:

    # comment
    limits session_s=0.5           (first line, optional: bounds that differ from the defaults)
    path /v1/realtime?mode=audio   (near the top, optional: the path to which the client connects)
    records                        (near the top, optional: the edge records its sessions)
    moves                          (near the top, optional: a session that loses its worker moves)
    client {"type": ...}           the client sends an event
    frame TEXT                     the client sends this text unchanged
    bytes BASE64                   the client sends these bytes, which are not one line of text
    binary                         the client sends a binary frame
    late {"type": ...}             the client sends an event after the end of the session
    leaves                         the client vanishes
    server {"type": ...}           the client receives exactly this
    scheduler queued {...}         fabric.v1.Queued, in protobuf's JSON form
    scheduler granted [MODEL]      a slot is granted and claimed; the model's name, if it is told
    scheduler refuses REASON
    edge open|unit|... {...}       the worker receives exactly this (except times and traces)
    worker opened|delta|failed|closed {...}
    edge chat {...}                the worker receives exactly this turn of chat, without its lease
    worker prefilled|piece|done {...}
    worker breaks REASON [FIELD [MESSAGE]]   the call ends with an error
    clock SECONDS                  the clock advances by this time
    drain                          the edge gets the request to stop immediately
    ends CODE                      the connection is closed with this code; always last

In JSON, these words stand for base64: "@pcm:N" for N samples, "@pcm:N:K" for second K of these
samples, "@pcms:N,M:K" for several such parts end to end, "@wav:N" for a WAV file of N samples,
"@nan:N" for N samples of which one is not a number, "@zeros:N" for N samples of silence,
"@jpeg:WxH" and "@png:WxH" for the header of such a picture. In L, "@int16:N" stands for N samples
in int16, "@int16:N:silence" for N samples of silence, "@int16:N+M" for N samples and then M of
silence, and "@int16:N,M:pcm" for what two such appends become as float32; likewise "@ulaw" and
"@alaw". "@resampled:N:K:CODE" is second K, at 16 kHz, of a sound that repeats N samples each second
("int16" if there is no code). "@committed:N:CODE" is what one append becomes in a turn of chat,
where int16 has 24 kHz.

In H, "@questions:FROM:TO" stands for the sound of the sample `questions.wav` between two times in
milliseconds, and "@questions:FROM:TO:LEVEL" for the same sound at another level; in E, "@asked"
stands for that sound as int16 at 24 kHz.

"@any" matches every value. "@id:NAME" matches any value, but the same one wherever NAME is used
again, also in what the client sends; "@rt:NAME", "@sess:NAME" and "@resp:NAME" also demand an id in
the protocols' form.

A live edge replays a transcript with a real client, real sockets and a real gRPC fabric. There are
four differences. `clock` advances a clock that otherwise stands still. A timeout of the worker is
not awaited: its `closed` message reports the timeout. A `late` event may fail because the
connection is closed. The close code after `leaves` is not checked.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import pybase64
import soundfile
from google.protobuf import json_format
from google.protobuf.message import Message
from numpy.typing import NDArray
from support.paths import ROOT, TESTS

from duplane.edge.payload.sound_format import Encoding, SoundFormat
from duplane.edge.settings import Limits
from duplane.fabric.audio import resample_pcm
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.resampler import Resampler
from duplane.fabric.v1 import session_pb2

M = TypeVar("M", bound=Message)
FOLDER = TESTS / "transcripts"
QUESTIONS = "tools/duplane/tools/talk/samples/questions.wav"


@dataclass(frozen=True)
class Step:
    """One line: its first word, its second word, and the text after them."""

    line: int
    who: str
    what: str
    rest: str

    @property
    def text(self) -> str:
        return " ".join(part for part in (self.who, self.what, self.rest) if part)


@dataclass(frozen=True)
class Transcript:
    name: str
    limits: Limits
    path: str
    is_recorded: bool
    can_move: bool
    steps: tuple[Step, ...]


def read_transcript(file: Path) -> Transcript:
    limits = Limits()
    path = "/v1/realtime?mode=audio"
    is_recorded = can_move = False
    steps: list[Step] = []
    for number, line in enumerate(file.read_text().split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        who, _, rest = line.partition(" ")
        if who == "limits":
            limits = replace(limits, **_bounds(rest))
            continue
        if who == "path":
            path = rest
            continue
        if who == "records":
            is_recorded = True
            continue
        if who == "moves":
            can_move = True
            continue
        what = ""
        if who in ("scheduler", "edge", "worker"):
            what, _, rest = rest.partition(" ")
        steps.append(Step(number, who, what, rest))
    return Transcript(file.stem, limits, path, is_recorded, can_move, tuple(steps))


def _bounds(text: str) -> dict[str, Any]:
    pairs = (pair.split("=") for pair in text.split())
    return {name: float(value) if "." in value else int(value) for name, value in pairs}


def all_transcripts() -> list[Transcript]:
    return [read_transcript(path) for path in sorted(FOLDER.glob("*.txt"))]


# --- words and messages in JSON ---


def pcm(sample_count: int) -> bytes:
    """Return a ramp, so that all parts of it are different."""
    return np.linspace(-0.5, 0.5, sample_count, dtype="<f4").tobytes()


def wav(sample_count: int) -> bytes:
    """Return the ramp of `pcm` as a WAV file of float32."""
    file = io.BytesIO()
    samples = np.frombuffer(pcm(sample_count), dtype="<f4")
    soundfile.write(file, samples, 16_000, format="WAV", subtype="FLOAT")
    return without_time(file.getvalue())


def without_time(file: bytes) -> bytes:
    """Return a sound file without the time at which it was written, so that it is always the same.

    libsndfile writes this time into the chunk PEAK: after the name, the size and the version.
    """
    at = file.find(b"PEAK") + 12
    return file if at < 12 else file[:at] + bytes(4) + file[at + 4 :]


def nan(sample_count: int) -> bytes:
    samples = np.frombuffer(pcm(sample_count), dtype="<f4").copy()
    samples[sample_count // 2] = np.nan
    return samples.tobytes()


def jpeg(width: int, height: int) -> bytes:
    """Return the start of a JPEG file, which contains its width and height."""
    size = height.to_bytes(2) + width.to_bytes(2)
    return b"\xff\xd8\xff\xe0\x00\x04JF\xff\xc0\x00\x0b\x08" + size + b"\x01\x01\x11\x00"


def png(width: int, height: int) -> bytes:
    """Return the start of a PNG file, which contains its width and height."""
    size = width.to_bytes(4) + height.to_bytes(4)
    return b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + size + b"\x08\x02\x00\x00\x00"


def gif(width: int, height: int) -> bytes:
    """Return the header of a GIF file."""
    return b"GIF89a" + width.to_bytes(2, "little") + height.to_bytes(2, "little") + bytes(3)


def bmp(width: int, height: int) -> bytes:
    """Return the header of a BMP file whose rows begin at the top."""
    size = width.to_bytes(4, "little") + (-height).to_bytes(4, "little", signed=True)
    return b"BM" + bytes(12) + (40).to_bytes(4, "little") + size + bytes(28)


def webp(width: int, height: int) -> bytes:
    """Return the header of a WEBP file of the extended form."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return (
        b"RIFF"
        + (22).to_bytes(4, "little")
        + b"WEBPVP8X"
        + (10).to_bytes(4, "little")
        + bytes(4)
        + size
    )


@functools.cache
def questions() -> NDArray[np.float32]:
    """Return the sample that `duplane talk` sends."""
    samples, _ = soundfile.read(ROOT / QUESTIONS, dtype="float32")
    return samples.astype(np.float32)


def spoken(begin_ms: str, end_ms: str, level: str = "1") -> bytes:
    """Return a part of the sample."""
    part = questions()[int(begin_ms) * 16 : int(end_ms) * 16]
    return (part * np.float32(level)).astype("<f4").tobytes()


def media_of(word: str) -> bytes | None:
    """Return the audio or picture for an @-word, or None for another word."""
    kind, _, rest = word[1:].partition(":")
    match kind:
        case "pcm" if ":" in rest:
            count, _, second = rest.partition(":")
            return pcm(int(count))[int(second) * 64_000 :][:64_000]
        case "pcm":
            return pcm(int(rest))
        case "pcms":
            return b"".join(media_of(f"@pcm:{part}") or b"" for part in rest.split(","))
        case "wav":
            return wav(int(rest))
        case "nan":
            return nan(int(rest))
        case _:
            return sound_of(kind, rest) or picture_of(kind, rest)


CODES = {
    "int16": SoundFormat(Encoding.INT16, 16_000),
    "ulaw": SoundFormat(Encoding.ULAW, 8_000),
    "alaw": SoundFormat(Encoding.ALAW, 8_000),
}


def sound_of(kind: str, rest: str) -> bytes | None:
    """Return silence, speech, or sound of L, or what it becomes; None for another word."""
    if kind == "zeros":
        return bytes(4 * int(rest))
    if kind == "questions":
        return spoken(*rest.split(":"))
    if kind == "asked":
        return CODES["int16"].encode(resample_pcm(spoken(*rest.split(":")), 16_000, 24_000))
    if kind == "resampled":
        return resampled(*rest.split(":"))
    if kind == "committed":
        return committed(*rest.split(":"))
    return encoded(kind, rest) if kind in CODES else None


def encoded(code: str, rest: str) -> bytes:
    """Return sound in a code of L, or what it becomes."""
    counts, _, form = rest.partition(":")
    if form == "pcm":
        parts = (CODES[code].encode(pcm(int(count))) for count in counts.split(","))
        return b"".join(map(CODES[code].decode, parts))
    if form == "silence":
        return CODES[code].encode(bytes(4 * int(counts)))
    count, _, silent = counts.partition("+")
    return CODES[code].encode(pcm(int(count)) + bytes(4 * int(silent or 0)))


def resampled(count: str, second: str, code: str = "int16") -> bytes:
    """Return one second of a stream of ramps, as a model gets it."""
    stream = Resampler(int(count), 16_000, is_prompt=True)
    ramp = CODES[code].decode(CODES[code].encode(pcm(int(count))))
    return [stream.add(ramp) for _ in range(int(second) + 1)][-1]


def committed(count: str, code: str = "int16") -> bytes:
    """Return an append of a ramp as a turn of chat has it."""
    stream = Resampler(24_000 if code == "int16" else CODES[code].rate_hertz, 16_000)
    return stream.add(CODES[code].decode(CODES[code].encode(pcm(int(count))))) + stream.end()


def picture_of(kind: str, size: str) -> bytes | None:
    make = {"jpeg": jpeg, "png": png, "gif": gif, "bmp": bmp, "webp": webp}.get(kind)
    return make(*map(int, size.split("x"))) if make else None


def expand(value: Any) -> Any:
    """Replace @-words that stand for audio or pictures."""
    if isinstance(value, dict):
        return {key: expand(item) for key, item in value.items()}
    if isinstance(value, list):
        return [expand(item) for item in value]
    if isinstance(value, str) and value.startswith("@"):
        media = media_of(value)
        return value if media is None else pybase64.b64encode(media).decode()
    return value


def json_of(text: str) -> Any:
    return expand(orjson.loads(text or "{}"))


def message_of(text: str, message: M) -> M:
    return json_format.ParseDict(json_of(text), message)


def error_of(step: Step) -> FabricError:
    reason, _, rest = step.rest.partition(" ")
    field, _, message = rest.partition(" ")
    return FabricError(Reason(reason), message or "scripted", field=field)


def response_of(step: Step) -> session_pb2.ConverseResponse:
    return _filled(session_pb2.ConverseResponse(), step.what, step.rest)


def chat_response_of(step: Step) -> session_pb2.ChatResponse:
    name = "delta" if step.what == "piece" else step.what
    return _filled(session_pb2.ChatResponse(), name, step.rest)


def _filled(response: M, name: str, text: str) -> M:
    part = getattr(response, name)
    part.SetInParent()
    message_of(text, part)
    return response


FORMS = {
    "rt": re.compile(r"rt_\d{13}"),
    "sess": re.compile(r"sess_[0-9a-f]{12}"),
    "resp": re.compile(r"resp_[0-9a-f]{12}"),
}


class Matcher:
    """Compares messages with the transcript, and stores the value of each NAME of an `@id:NAME`."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {}

    def filled(self, value: Any) -> Any:
        """Return what a client sends, with the values of the ids that it has got before."""
        if isinstance(value, dict):
            return {key: self.filled(item) for key, item in value.items()}
        if isinstance(value, str) and value.startswith("@id:"):
            return self._names.get(value.removeprefix("@id:"), value)
        return value

    def match(self, step: Step, came: Any) -> None:
        expected = json_of(step.rest)
        assert self._equal(expected, came), f"line {step.line}: expected {expected}, got {came}"

    def match_request(self, step: Step, came: session_pb2.ConverseRequest) -> None:
        assert came.WhichOneof("message") == step.what, f"line {step.line}: got {str(came)[:300]}"
        part = getattr(came, step.what)
        for volatile in ("receive_time", "trace"):
            if volatile in part.DESCRIPTOR.fields_by_name:
                part.ClearField(volatile)
        expected = message_of(step.rest, type(part)())
        if isinstance(part, session_pb2.Open) and not expected.HasField("seed"):
            part.ClearField("seed")  # a random one, if the edge keeps a journal
        assert part == expected, f"line {step.line}: got {str(part)[:300]}"

    def match_turn(self, step: Step, came: session_pb2.ChatRequest) -> None:
        for volatile in ("lease", "trace"):
            came.ClearField(volatile)
        expected = message_of(step.rest, session_pb2.ChatRequest())
        assert came == expected, f"line {step.line}: got {str(came)[:600]}"

    def _equal(self, expected: Any, came: Any) -> bool:
        if isinstance(expected, str) and expected.startswith("@"):
            word, _, name = expected[1:].partition(":")
            if word in FORMS and not FORMS[word].fullmatch(came):
                return False
            return word == "any" or self._names.setdefault(name, came) == came
        if isinstance(expected, dict) and isinstance(came, dict):
            return expected.keys() == came.keys() and all(
                self._equal(value, came[key]) for key, value in expected.items()
            )
        if isinstance(expected, list) and isinstance(came, list):
            return len(expected) == len(came) and all(map(self._equal, expected, came))
        return expected == came


def server_events(transcript: Transcript) -> Iterator[dict[str, Any]]:
    for step in transcript.steps:
        if step.who == "server":
            yield orjson.loads(step.rest)
