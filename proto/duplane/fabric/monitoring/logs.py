"""Logging of all processes: the format of a line, the ids in it, and signals that set the level.

A line never contains audio, text of a conversation, or a secret.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from datetime import datetime
from types import FrameType, TracebackType

import orjson

from duplane.fabric.settings import LogFormat
from duplane.fabric.v1.trace_pb2 import TraceContext

_log = logging.getLogger(__name__)

LEVEL_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # set DEBUG, and set the level of the settings

_OURS = "duplane"  # parent of this project's loggers; the others never log below INFO
AUDIT = "duplane.audit"  # logs what operators do, at every level of the settings
_NO_IDS: Mapping[str, str] = {}
_ids = ContextVar("ids of log lines", default=_NO_IDS)
_CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def configure_logging(role: str, level: str = "INFO", log_format: LogFormat = "text") -> None:
    """Log to stderr, from `level` on, and let `LEVEL_SIGNALS` change the level.

    Call this in the main thread, because only this thread can set signal handlers.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(role) if log_format == "json" else _TextFormatter(role))
    logging.basicConfig(handlers=[handler], force=True)
    if log_format == "json":  # nothing else may write to stderr
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
    _set_level(level)

    def on_signal(number: int, _: FrameType | None) -> None:
        _set_level("DEBUG" if number == LEVEL_SIGNALS[0] else level)

    for number in LEVEL_SIGNALS:
        signal.signal(number, on_signal)


def report_failure(message: str) -> None:
    """Write to stderr why the process ends: as a log line if the log is JSON, else as text."""
    if any(isinstance(each.formatter, _JsonFormatter) for each in logging.getLogger().handlers):
        _log.critical("%s", message)
    else:
        sys.stderr.write(f"duplane: {message}\n")


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _log.critical("uncaught error", exc_info=(kind, error, traceback))


def _set_level(level: str) -> None:
    logging.getLogger(_OURS).setLevel(level)
    logging.getLogger(AUDIT).setLevel(logging.INFO)
    least = logging.getLevelNamesMapping()[level]
    logging.getLogger().setLevel(max(least, logging.INFO))


@contextlib.contextmanager
def logged_ids(session_id: str, trace: TraceContext | None) -> Generator[None]:
    """Add the ids of a session to every line that is logged in the body of the `with`.

    Tasks that begin in the body keep the ids.
    """
    ids = {"session_id": session_id} if session_id else {}
    if trace is not None and trace.traceparent.count("-") == 3:
        _, ids["trace_id"], ids["span_id"], _ = trace.traceparent.split("-")
    token = _ids.set(ids)
    try:
        yield
    finally:
        _ids.reset(token)


def _time(record: logging.LogRecord, separator: str) -> str:
    """Return date and time with milliseconds and zone."""
    moment = datetime.fromtimestamp(record.created).astimezone()
    return moment.isoformat(separator, timespec="milliseconds")


class _TextFormatter(logging.Formatter):
    """Formats time, level, role, message and ids as one line; a traceback adds further lines.

    `audit:` before the message marks the action of an operator. Control characters are escaped, so
    that a message cannot imitate a second line.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as in logging
        ids = "".join(f" {name}={value}" for name, value in _ids.get().items())
        mark = "audit: " if record.name == AUDIT else ""
        text = f"{mark}{record.message}{ids}".translate(_CONTROL_CHARACTERS)
        return f"{_time(record, ' ')} {record.levelname} {self._role} {text}"


class _JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object on one line; a traceback is its field `exception`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record, "T"),
            "level": record.levelname,
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage().encode(errors="replace").decode(),
            **_ids.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:  # from another process, which cannot send the exception itself
            line["exception"] = record.exc_text
        return orjson.dumps(line).decode()
