"""A case: the lines of a transcript with mutated content and order.

A case has no replies of the server; `event_rules` and `session_run` check the actual replies.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import orjson
from fuzz.messages import Message, mutate
from support.protocols.transcripts import Step, Transcript, all_transcripts

from duplane.edge.routing import ENDPOINTS, parse_target
from duplane.edge.settings import Limits
from duplane.fabric.errors import Reason

# Lower bounds than in the default `Limits`, so that a case stays small.
SMALL = Limits(
    append_s=3.0,
    voice_s=2.0,
    instructions_bytes=2048,
    text_bytes=64,
    picture_bytes=2048,
    chat_audio_s=3.0,
    chat_text_bytes=4096,
    chat_video_bytes=2048,
    chat_part_count=64,
    chat_message_count=48,
    early_unit_count=2,
    pending_unit_count=4,
    pending_turn_count=2,
)
DIALECTS = ("a", "b", "b_chat", "c", "d", "e", "h", "l")
_CHATS = ("b_chat", "d", "h")
_LONGEST = {"@pcm:480001": "@pcm:48001", "@nan:16000": "@nan:160"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a case. `message` is what the client sends; None in all other lines."""

    who: str
    what: str = ""
    rest: str = ""
    message: Message | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One case. `make_case` makes an equal case again from `name` and `dialect`."""

    name: str
    dialect: str
    path: str
    limits: Limits
    lines: tuple[Line, ...]
    can_move: bool = False  # a session that loses its worker waits for another, which never comes
    is_hoarding: bool = False  # once the session is open, nobody takes its requests to the worker

    @property
    def mutated_count(self) -> int:
        return sum(line.message is not None and line.message.is_mutated for line in self.lines)


@dataclass(frozen=True, slots=True)
class Corpus:
    """All transcripts, and all messages in them."""

    transcripts: dict[str, list[Case]]
    said: dict[str, list[Any]]  # client messages, by dialect
    told: dict[bool, list[Line]]  # lines of the worker; the key is True for chats

    def others(self, dialect: str, rng: Random) -> list[Any]:
        """Return the client messages of this dialect, or sometimes of a random dialect."""
        return self.said[dialect if rng.random() < 0.7 else rng.choice(DIALECTS)]


@functools.cache
def corpus() -> Corpus:
    transcripts: dict[str, list[Case]] = {dialect: [] for dialect in DIALECTS}
    said: dict[str, list[Any]] = {dialect: [] for dialect in DIALECTS}
    told: dict[bool, list[Line]] = {True: [], False: []}
    for transcript in all_transcripts():
        entry = parse_target(transcript.path, {})
        if (entry.route, entry.mode) not in ENDPOINTS:
            continue
        name = transcript.name
        dialect = "b_chat" if name.startswith("b_chat") else name[0]
        lines = [_line(step) for step in transcript.steps if step.who not in _ANSWERS]
        transcripts[dialect].append(
            Case(
                name,
                dialect,
                transcript.path,
                _limits(transcript),
                tuple(lines),
                transcript.can_move,
            )
        )
        for line in lines:
            if line.message and line.message.raw is None:
                said[dialect].append(line.message.value)
            if line.who == "worker" and line.what != "breaks":
                told[dialect in _CHATS].append(line)
    return Corpus(transcripts, said, told)


_ANSWERS = ("server", "edge", "ends")


def _line(step: Step) -> Line:
    if step.who in ("client", "late"):
        return Line("client", message=Message(_light(orjson.loads(step.rest or "{}"))))
    if step.who == "frame":
        return Line("client", message=Message(raw=step.rest.encode()))
    return Line(step.who, step.what, step.rest)


def _light(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _light(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_light(item) for item in value]
    if isinstance(value, str):
        return value[:5000] if len(value) > 5000 else _LONGEST.get(value, value)
    return value


def _limits(transcript: Transcript) -> Limits:
    usual = Limits()
    pairs = ((field.name, getattr(transcript.limits, field.name)) for field in fields(usual))
    told = {name: value for name, value in pairs if value != getattr(usual, name)}
    return replace(SMALL, **told)


def make_case(seed: str, dialect: str) -> Case:
    """Return the case for this seed; the same seed always gives the same case."""
    rng = Random(seed)
    all_of_it = corpus()
    base = rng.choice(all_of_it.transcripts[dialect])
    lines = list(base.lines)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        _mutate_order(rng, lines, dialect, all_of_it)
    lines = [new for line in lines for new in _mutate_line(rng, line, dialect, all_of_it)]
    if not any(line.message and line.message.is_mutated for line in lines):
        lines.insert(rng.randint(0, len(lines)), _one_more(rng, dialect, all_of_it))
    path = base.path if rng.random() < 0.9 else _path(rng, base.path)
    is_hoarding = rng.random() < 0.1
    return Case(seed, dialect, path, base.limits, tuple(lines), base.can_move, is_hoarding)


def _path(rng: Random, path: str) -> str:
    """Return a random path of the same dialect, perhaps in another mode."""
    if path.startswith("/ws/duplex/"):
        return rng.choice(["/ws/duplex/adx_1", "/ws/duplex/omni_1", "/ws/duplex/%00é"])
    if path.startswith("/v1/realtime") and "chat" not in path:
        return rng.choice(["/v1/realtime", "/v1/realtime?mode=video&mode=chat"])
    return path


# --- the order of the lines ---


def _mutate_order(rng: Random, lines: list[Line], dialect: str, all_of_it: Corpus) -> None:
    at = rng.randint(0, len(lines))
    match rng.randrange(10) if lines else 9:
        case 0:
            del lines[at : at + rng.randint(1, 2)]
        case 1:
            lines[at:at] = lines[at : at + rng.randint(1, 3)] * rng.choice(_TIMES)
        case 2:
            other = rng.randrange(len(lines))
            mine = min(at, len(lines) - 1)
            lines[mine], lines[other] = lines[other], lines[mine]
        case 3:
            moved = lines.pop(min(at, len(lines) - 1))
            lines.insert(rng.randint(0, len(lines)), moved)
        case 4:
            other = rng.choice(all_of_it.transcripts[rng.choice(DIALECTS)]).lines
            start = rng.randrange(len(other) or 1)
            lines[at:at] = [
                line for line in other[start : start + 3] if line.who in ("client", "clock")
            ]
        case 5:
            lines.insert(at, Line("clock", rest=str(rng.choice(_JUMPS))))
        case 6:
            lines.insert(at, _fabric_fault(rng))
        case 7:
            is_chat = dialect in _CHATS
            lines.insert(at, rng.choice(all_of_it.told[is_chat]))
        case 8:
            lines.insert(at, rng.choice(_ENDS))
        case _:
            value = rng.choice(all_of_it.others(dialect, rng))
            lines[at:at] = [Line("client", message=Message(value))] * rng.choice(_TIMES)


_TIMES = (1, 1, 1, 2, 2, 2, 8, 8, 200)
_JUMPS = (0.001, 0.5, 3, 14.9, 60, 301, 599, 700, 1800, 1e6)
_ENDS = (Line("leaves"), Line("binary"), Line("drain"))
_CLOSED = (
    *("UNSPECIFIED", "CLIENT", "CONTEXT_FULL", "PAUSE_TIMEOUT", "IDLE_TIMEOUT", "SHUTDOWN"),
    *("REVOKED", "ENGINE_FAILED"),
)


def _fabric_fault(rng: Random) -> Line:
    match rng.randrange(4):
        case 0:
            return Line("worker", "breaks", f"{rng.choice(list(Reason))} open.seed")
        case 1:
            reason = f"CLOSE_REASON_{rng.choice(_CLOSED)}"
            return Line("worker", "closed", orjson.dumps({"reason": reason}).decode())
        case 2:
            return Line("scheduler", "refuses", rng.choice(list(Reason)))
        case _:
            place = {"ticket_id": "q_1", "position": rng.randint(0, 3), "queue_length": 3}
            return Line("scheduler", "queued", orjson.dumps(place).decode())


def _mutate_line(rng: Random, line: Line, dialect: str, all_of_it: Corpus) -> list[Line]:
    """Return the lines that replace `line`: often mutations of it, mostly also the line itself."""
    if line.who == "worker" and rng.random() < 0.15:
        return [*_mutated_response(rng, line), *([line] if rng.random() < 0.5 else [])]
    if line.message is None or line.message.raw is not None:
        return [line]
    others = all_of_it.others(dialect, rng)
    value = line.message.value
    count = rng.choice((0, 1, 2, 4, 7))
    mutated = [Line("client", message=mutate(rng, value, others)) for _ in range(count)]
    return [*mutated, line] if rng.random() < 0.8 else mutated


def _one_more(rng: Random, dialect: str, all_of_it: Corpus) -> Line:
    others = all_of_it.others(dialect, rng)
    return Line("client", message=mutate(rng, rng.choice(others), others))


_RESPONSES: dict[str, dict[str, list[Any]]] = {
    "opened": {"prompt_token_count": [0, -1, 2**31 - 1], "ignored_fields": [["x" * 300] * 50]},
    "delta": {
        "speech": [{}, {"text": "\x00\u2028"}, {"text": "x", "audio": "@pcm:1"}],
        "listen": [{}],
        "end_of_turn": [True, False],
        "context_token_count": [0, -1, 2**31 - 1],
        "dropped_unit_count": [0, 1, 7, -1],
        "stage_times": [{"total": "315576000000s"}, {"total": "-1s", "decode": "0.5s"}],
        "token_counts": [{"output_text_token_count": -1}, {"input_video_token_count": 65}],
    },
    "failed": {
        "reason": ["", "PAUSED", "UNIT_TOO_LONG", "INVALID_FIELD", "NEW"],
        "message": ["", "x" * 5000],
        "field": ["", "audio", "video_frames[3]"],
    },
    "prefilled": {"prompt_token_count": [0, -1, 2**31 - 1]},
    "piece": {"text": ["", "\x00", "é" * 4000], "audio": ["@pcm:1", "", "@pcm:16000"]},
    "done": {"reason": [0, 1, 2, 3, 9], "token_counts": [{"output_text_token_count": -5}]},
    "closed": {"message": ["", "x" * 5000, "é" * 100], "reason": [*range(8), 99]},
}


def _mutated_response(rng: Random, line: Line) -> list[Line]:
    known = _RESPONSES.get(line.what)
    if known is None:
        return []
    told = orjson.loads(line.rest or "{}")
    name = rng.choice(list(known))
    if name in told and rng.random() < 0.3:
        del told[name]
    else:
        told[name] = rng.choice(known[name])
        for other in {"speech": ["listen"], "listen": ["speech"]}.get(name, ()):
            told.pop(other, None)
    again = Line("worker", line.what, orjson.dumps(told).decode())
    return [again] * rng.choice((1, 1, 2))
