"""Finds each element of the five specifications in the transcripts.

`specifications/` has one file per dialect: events with their fields, values, error codes, reasons,
close codes, order, limits, defaults and examples. A field counts as found only in an event whose
result depends on the field. A field without any effect is listed with the reason. In an example,
"<...>" stands for a payload, or for an id that the server draws.
`python -m support.protocols.specifications` prints where each element is found.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import orjson
from support.protocols.effects import has_effect
from support.protocols.transcript_replay import Move, PureReplay
from support.protocols.transcripts import FORMS, Step, Transcript, all_transcripts

from duplane.edge.settings import Limits
from pages.events import FOLDER, Side, events, read

# Placeholders for values that the server chooses.
_DRAWN = {"@any", "@id", *(f"@{form}" for form in FORMS)}
NAMES = ("A", "B", "C", "D", "E", "H", "L")


def duplex_settings() -> dict[str, Any]:
    """Return the settings of duplex sessions, which A, B and C share."""
    return tomllib.loads((FOLDER / "duplex_config.toml").read_text())


@dataclass(frozen=True)
class Line:
    """One event of a transcript, and its result in the replay."""

    transcript: Transcript
    move: Move
    event: Any

    @property
    def where(self) -> str:
        return f"{self.transcript.name}.txt:{self.move.step.line}"

    @property
    def kind(self) -> str:
        return self.move.kind or str(self.event["type"])

    def depends_on(self, path: str) -> bool:
        """Return whether the session, or the comparison with the transcript, needs this field."""
        values = [value for at, value in parts(self.event) if at == path]
        if self.move.step.who == "server":
            return any(value != "@any" for value in values)
        return bool(values) and has_effect(self.transcript, self.move.step, path)


@dataclass
class Corpus:
    """All transcripts of one dialect, replayed."""

    replays: list[PureReplay] = field(default_factory=list)
    taken: list[Line] = field(default_factory=list)  # accepted client events
    said: list[Line] = field(default_factory=list)  # server events


@cache
def corpus(name: str) -> Corpus:
    result = Corpus()
    for transcript in all_transcripts():
        if not transcript.name.startswith(f"{name.lower()}_"):
            continue
        replay = PureReplay(transcript)
        replay.run()
        result.replays.append(replay)
        for move in replay.moves:
            line = Line(transcript, move, _written(move.step))
            if move.step.who == "server":
                result.said.append(line)
            elif move.step.who == "client" and move.kind is not None and not is_refused(move):
                result.taken.append(line)
    return result


def is_refused(move: Move) -> bool:
    return any(told["type"] == "error" for told in move.told)


def _written(step: Step) -> Any:
    try:
        return orjson.loads(step.rest)
    except orjson.JSONDecodeError:
        return None


# --- the parts of an event ---


def parts(event: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every part of an event with its path; `[]` stands for any index of a list."""
    if path:
        yield path, event
    if isinstance(event, dict):
        for key, value in event.items():
            yield from parts(value, f"{path}.{key}" if path else key)
    elif isinstance(event, list):
        for item in event:
            yield from parts(item, f"{path}[]")


def fits(example: Any, written: Any, *, is_whole: bool) -> bool:
    """Return whether `written` fits the example.

    If `is_whole` is False, `written` may have fields that the example lacks.
    """
    if isinstance(written, str) and written.partition(":")[0] in _DRAWN:
        return True
    if isinstance(example, str) and example.startswith("<"):
        return isinstance(written, str) and written.startswith("@")
    if isinstance(example, dict) and isinstance(written, dict):
        if is_whole and example.keys() != written.keys():
            return False
        return example.keys() <= written.keys() and all(
            fits(value, written[key], is_whole=is_whole) for key, value in example.items()
        )
    if isinstance(example, list) and isinstance(written, list):
        return len(example) == len(written) and all(
            fits(one, other, is_whole=is_whole) for one, other in zip(example, written, strict=True)
        )
    return _is_same(example, written)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal: 20 equals 20.0, but true does not equal 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def paths_of(name: str, side: Side, kind: str) -> set[str]:
    """Return the fields of one event; for B, those of both forms."""
    forms = ("B", "B chat") if name == "B" else (name,)
    return {
        path
        for form in forms
        for path in (events(form, side)[kind].fields if kind in events(form, side) else ())
    }


# --- the elements of a specification, and where they are found ---

Found = dict[str, str | None]  # name of an element to file and line, or None


def find(name: str) -> Found:
    """Return where the transcripts show each element of a dialect's specification."""
    specification, all_lines = read(name), corpus(name)
    found: Found = {}
    sides: tuple[tuple[Side, list[Line]], ...] = (
        ("client", all_lines.taken),
        ("server", all_lines.said),
    )
    for side, lines in sides:
        for kind in {**events(name, side), **(events("B chat", side) if name == "B" else {})}:
            of_kind = [line for line in lines if line.kind == kind]
            found[f"{side}.{kind}"] = _first(of_kind)
            without = specification.get("without_effect", {}).get(kind, {})
            for path in sorted(paths_of(name, side, kind)):
                found[f"{side}.{kind}.{path}"] = _place(of_kind, path, without)
            values = specification["values"][side].get(kind, {})
            for path, wanted in values.items():
                for value in wanted:
                    found[f"{side}.{kind}.{path} = {value!r}"] = _first(
                        line
                        for line in of_kind
                        if any(at == path and _is_same(value, it) for at, it in parts(line.event))
                    )
    found |= _find_settings(specification, all_lines)
    found |= _find_ends(specification, all_lines)
    found |= _find_examples(specification, all_lines)
    found |= _find_limits(specification, all_lines)
    return found


def _first(lines: Iterable[Line]) -> str | None:
    return next((line.where for line in lines), None)


def _find_settings(specification: dict[str, Any], lines: Corpus) -> Found:
    if "duplex_config" not in specification:
        return {}
    at = specification["duplex_config"]["at"]
    settings = duplex_settings()
    without = {f"{at}.{key}": why for key, why in settings["without_effect"].items()}
    paths = [f"{at}.{key}" for key in (*settings["settings"], *settings["without_effect"])]
    return {f"client.{path}": _place(lines.taken, path, without) for path in paths}


def _place(lines: Iterable[Line], path: str, without_effect: Mapping[str, str]) -> str | None:
    """Return where in the transcripts a line depends on the field `path`.

    For a field in `without_effect`, returns the reason given there. Returns None if no line has the
    field, or if no line depends on it.
    """
    having = [line for line in lines if path in dict(parts(line.event))]
    if having and path in without_effect:
        return f"without effect: {without_effect[path]}"
    return _first(line for line in having if line.depends_on(path))


def without_effect(name: str) -> dict[str, str]:
    """Return the fields of a dialect that have no effect by its specification, with the reasons."""
    specification = read(name)
    listed = {
        path: why
        for fields in specification.get("without_effect", {}).values()
        for path, why in fields.items()
    }
    if "duplex_config" in specification:
        at, settings = specification["duplex_config"]["at"], duplex_settings()
        listed |= {f"{at}.{key}": why for key, why in settings["without_effect"].items()}
    return listed


def _find_ends(specification: dict[str, Any], lines: Corpus) -> Found:
    found: Found = {}
    for code, closes in specification.get("errors", {}).items():
        found[f"error {code}, closes with {closes}"] = _first(
            line
            for line in lines.said
            if line.event["type"] == "error"
            and line.event["error"]["code"] == code
            and _closes_with(line) == closes
        )
    for reason, code in specification.get("closed", {}).items():
        found[f"session.closed {reason}, closes with {code}"] = _first(
            line
            for line in lines.said
            if line.event["type"] == "session.closed"
            and line.event["reason"] == reason
            and _closes_with(line) == code
        )
    for code in specification["codes"]:
        found[f"close code {code}"] = next(
            (
                f"{replay.transcript.name}.txt:{replay.moves[-1].step.line}"
                for replay in lines.replays
                if replay.moves[-1].step.rest == code
            ),
            None,
        )
    return found


def _closes_with(line: Line) -> int:
    """Return the close code that directly follows this event, or 0 if the session continues."""
    steps = line.transcript.steps
    last_said = [step for step in steps if step.who == "server"][-1]
    is_last = last_said is line.move.step
    is_followed = any(
        step.who in ("client", "clock", "drain", "leaves", "frame", "binary", "worker")
        for step in steps
        if step.line > line.move.step.line
    )
    return int(steps[-1].rest) if is_last and not is_followed else 0


def _find_examples(specification: dict[str, Any], lines: Corpus) -> Found:
    found: Found = {}
    for number, example in enumerate(specification.get("examples", ()), 1):
        is_client = example["from"] == "client"
        wanted, within = orjson.loads(example["json"]), example.get("within", "")
        found[f"example {number}: {str(wanted)[:60]}"] = _first(
            line
            for line in (lines.taken if is_client else lines.said)
            if any(
                fits(wanted, part, is_whole=is_client)
                for path, part in [("", line.event), *parts(line.event)]
                if path == within
            )
        )
    return found


def _find_limits(specification: dict[str, Any], lines: Corpus) -> Found:
    found: Found = {}
    for limit in specification.get("limits", ()):
        value = limit.get("seconds", limit.get("value"))
        found[f"limit: {limit['what']}, {value}"] = _first(
            line
            for line in lines.said
            if line.transcript.limits == Limits()
            and fits(orjson.loads(limit["told"]), line.event, is_whole=False)
            and limit.get("path", "") in line.transcript.path
            and ("seconds" not in limit or _seconds_since(limit["after"], line) == value)
        )
    return found


def _seconds_since(beginning: str, line: Line) -> float | None:
    """Return the seconds from the last line that starts with `beginning` to `line`."""
    elapsed: float | None = None
    for step in line.transcript.steps:
        if step.line >= line.move.step.line:
            break
        if step.who == "clock" and elapsed is not None:
            elapsed += float(step.rest)
        elif step.text.startswith(beginning):
            elapsed = 0.0
    return elapsed


def order(name: str, replay: PureReplay) -> tuple[str, bool]:
    """Return the short names of a session's server events, and whether their order is legal."""
    specification = read(name)["order"]
    short = specification.get("short", {})
    told = [event["type"] for move in replay.moves for event in move.told]
    text = "".join(f"{short.get(kind, kind)} " for kind in told if kind != "error")
    return text, re.fullmatch(specification["events"], text) is not None


if __name__ == "__main__":
    for dialect_name in NAMES:
        for what, where in find(dialect_name).items():
            print(f"{dialect_name}  {what:80} {where}")
