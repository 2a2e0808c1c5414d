"""Finds faults, shortens the case of a fault, and writes it as a transcript."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import orjson
import pybase64
from fuzz import values
from fuzz.cases import Case, Line
from fuzz.continuation import check_continuation
from fuzz.messages import Message
from fuzz.session_run import SessionRun
from google.protobuf import json_format
from google.protobuf.message import Message as Protobuf
from support.protocols.transcripts import pcm

from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

_TRIES = 600
_VOLATILE = ("session_id", "response_id", "server_send_ts")
_LONG_AUDIO = 200  # text longer than this counts as audio and is abbreviated


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed case, its error, and the transcript of its shortened form."""

    case: Case
    what: str
    transcript: str

    def __str__(self) -> str:
        return f"{self.what}\nseed {self.case.name}\n\n{self.transcript}"


def try_case(case: Case) -> tuple[SessionRun, str]:
    """Run a case; return the run and the error, which is empty on success."""
    run = SessionRun(case)
    try:
        run.run()
        check_continuation(run)
    except Exception as error:  # noqa: BLE001 - every exception is a fault
        return run, f"{type(error).__name__}: {error}"
    return run, ""


def find_fault(case: Case) -> Fault | None:
    """Run a case.

    If it fails, return the fault with the shortest case that fails in the same way.
    """
    what = try_case(case)[1]
    return explain(case, what) if what else None


def explain(case: Case, what: str) -> Fault:
    shortest = _shortened(case, _kind(what))
    run, last = try_case(shortest)
    return Fault(case, what, transcript_of(run, last))


def _kind(what: str) -> str:
    """Return the part of an error that stays the same when its case is shortened."""
    return re.sub(r"[^A-Za-z ]+", "#", what)[:60]


def _shortened(case: Case, kind: str) -> Case:
    tries = _TRIES
    found = True
    while found and tries > 0:
        found = False
        for shorter in _shorter(case):
            tries -= 1
            if tries < 0:
                break
            if (what := try_case(shorter)[1]) and _kind(what) == kind:
                case = shorter
                found = True
                break
    return case


def _shorter(case: Case) -> Iterator[Case]:
    """Yield cases with fewer lines, then with shorter lines."""
    count = len(case.lines)
    size = (count + 1) // 2
    while size:
        for start in range(0, count, size):
            yield replace(case, lines=case.lines[:start] + case.lines[start + size :])
        size //= 2
    if case.is_hoarding:
        yield replace(case, is_hoarding=False)
    for at, line in enumerate(case.lines):
        if line.message is None or line.message.raw is not None:
            continue
        for value in _shorter_values(line.message.value):
            message = Message(value, is_mutated=line.message.is_mutated)
            new = replace(line, message=message)
            yield replace(case, lines=(*case.lines[:at], new, *case.lines[at + 1 :]))


def _shorter_values(value: Any) -> Iterator[Any]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if _is_list(value) else ()
    for key in keys:
        less = values.clone(value)
        del less[key]
        yield less
        for inner in _shorter_values(value[key]):
            less = values.clone(value)
            less[key] = inner
            yield less


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


# --- the transcript ---


def transcript_of(run: SessionRun, what: str = "") -> str:
    """Return the log of the run as a transcript (see `support.protocols.transcripts`)."""
    lines = [f"# {line}" for line in f"make fuzz, seed {run.case.name}: {what}".splitlines()]
    if run.case.is_hoarding:
        lines.append("# the worker's host took nothing")
    lines += [f"path {run.case.path}", f"limits {_bounds(run.case.limits)}"]
    if run.case.can_move:
        lines.append("moves")
    told = run.log if what else run.log[: run.over_at]
    lines += [_written(kind, entry) for kind, entry in told]
    if run.session.closed:
        lines.append(f"ends {run.session.close_code}")
    return "\n".join(lines) + "\n"


def lines_of(case: Case) -> str:
    """Return the lines of a case as text, without the edge's answers."""
    lines = [f"path {case.path}", f"limits {_bounds(case.limits)}"]
    for line in case.lines:
        is_said = line.message is not None
        lines.append(_written("client", line.message) if is_said else _written("line", line))
    return "\n".join(lines) + "\n"


def _bounds(limits: Limits) -> str:
    usual = Limits()
    pairs = ((field.name, getattr(limits, field.name)) for field in fields(usual))
    return " ".join(f"{name}={told}" for name, told in pairs if told != getattr(usual, name))


def _written(kind: str, entry: Any) -> str:
    match kind:
        case "client":
            return written_message(entry)
        case "server":
            return f"server {orjson.dumps(_stable(entry)).decode()}"
        case "request":
            name = entry.WhichOneof("message")
            return f"edge {name} {_json(getattr(entry, name))}"
        case "turn":
            return f"edge chat {_json(entry)}"
        case "clock":
            return f"clock {entry}"
        case _:
            assert isinstance(entry, Line)
            return " ".join(filter(None, (entry.who, entry.what, entry.rest)))


def written_message(message: Message) -> str:
    """Return the transcript line of a client message: as JSON, else as text, else as bytes."""
    frame = message.render()
    if message.raw is None:
        words = orjson.dumps(message.value)
        with contextlib.suppress(orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):
            if values.render(orjson.loads(words)) == frame:
                return f"client {words.decode()}"
    try:
        text = frame.decode()
    except UnicodeDecodeError:
        text = "\n"
    if text.splitlines() in ([], [text]):
        return f"frame {text}" if text else "frame"
    return f"bytes {pybase64.b64encode(frame).decode()}"


def _stable(value: Any) -> Any:
    """Replace audio, and fields that are different in each run, by `@any`."""
    if isinstance(value, dict):
        return {key: "@any" if key in _VOLATILE else _stable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_stable(item) for item in value]
    if isinstance(value, str) and (len(value) > _LONG_AUDIO or value.startswith("@")):
        return "@any"
    return value


def _json(part: Protobuf) -> str:
    part = _timeless(part)
    told = json_format.MessageToDict(part, preserving_proto_field_name=True)
    return orjson.dumps(_in_words(told)).decode()


def _timeless(part: Protobuf) -> Protobuf:
    if isinstance(part, session_pb2.Unit):
        copy = session_pb2.Unit()
        copy.CopyFrom(part)
        copy.ClearField("receive_time")
        return copy
    return part


def _in_words(value: Any) -> Any:
    """Replace audio from `pcm` by its `@pcm:` word."""
    if isinstance(value, dict):
        return {key: _in_words(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_words(item) for item in value]
    if isinstance(value, str) and len(value) > _LONG_AUDIO:
        sample_count = len(value) * 3 // 16
        for count in range(sample_count - 1, sample_count + 1):
            if pybase64.b64encode(pcm(count)).decode() == value:
                return f"@pcm:{count}"
    return value
