"""Log lines: both formats, the ids of a session, and the level that signals change."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Generator

import orjson
import pytest
from support.monitoring.log_state import restored_logging
from support.time_limits import WITHIN_S

from duplane.fabric.monitoring.logs import AUDIT, configure_logging, logged_ids, report_failure
from duplane.fabric.v1.trace_pb2 import TraceContext

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
TRACE = TraceContext(traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
IDS = {"session_id": "s1", "trace_id": "a" * 32, "span_id": "b" * 16}
OURS = logging.getLogger("duplane.test")


@pytest.fixture(autouse=True)
def logging_without_handlers() -> Generator[None]:
    with restored_logging():
        logging.getLogger().handlers.clear()
        yield


def test_text_line_has_date_time_zone_level_and_role(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("worker")
    OURS.warning("slot %d is broken", 3)
    OURS.debug("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"{TIME} WARNING worker slot 3 is broken", line)


def test_actions_of_operators_are_marked_and_shown_at_every_level(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("edge", "ERROR")
    OURS.warning("not shown")
    logging.getLogger(AUDIT).info("kind=operator")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"{TIME} INFO edge audit: kind=operator", line)


def test_json_line_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("worker", "INFO", "json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        OURS.exception("slot %d is\nbroken", 3)
    (line,) = capsys.readouterr().err.splitlines()
    entry = orjson.loads(line)
    assert re.fullmatch(TIME.replace(" ", "T"), entry.pop("time"))
    assert entry.pop("exception").startswith("Traceback (most recent call last)")
    assert entry == {
        "level": "ERROR",
        "role": "worker",
        "logger": "duplane.test",
        "message": "slot 3 is\nbroken",
    }


def test_traceback_of_another_process_is_a_part_of_its_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for log_format in ("json", "text"):
        configure_logging("worker", "INFO", log_format)
        record = logging.LogRecord("duplane.test", logging.ERROR, "", 0, "broken", None, None)
        record.exc_text = "Traceback: no"
        OURS.handle(record)
    first, *lines = capsys.readouterr().err.splitlines()
    assert orjson.loads(first)["exception"] == "Traceback: no"
    assert lines[1:] == ["Traceback: no"]


def test_message_cannot_imitate_another_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("edge")
    with logged_ids("s\n1", None):
        OURS.info("reason %s", "x\n2026-01-01 00:00:00.000+00:00 ERROR edge \x1b[31mfake\x85")
    (line,) = capsys.readouterr().err.splitlines()
    imitation = r"x\x0a2026-01-01 00:00:00.000+00:00 ERROR edge \x1b[31mfake\x85"
    assert line.endswith(rf"{imitation} session_id=s\x0a1")


@pytest.mark.parametrize("unusual", ["\ud800", "\x00", "\u2028"])
def test_json_line_is_valid_whatever_its_message(
    capsys: pytest.CaptureFixture[str], unusual: str
) -> None:
    configure_logging("edge", "INFO", "json")
    OURS.info("%s", unusual)
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    assert orjson.loads(line)["message"] == unusual.encode(errors="replace").decode()


async def test_lines_of_a_session_and_of_its_tasks_have_its_ids(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("edge", "INFO", "json")

    async def log(message: str) -> None:
        OURS.info(message)

    with logged_ids("s1", TRACE):
        task = asyncio.create_task(log("inside"))
    OURS.info("outside")
    await task
    lines = [orjson.loads(line) for line in capsys.readouterr().err.splitlines()]
    of_session = {line["message"]: line.keys() & IDS.keys() for line in lines}
    assert of_session == {"inside": IDS.keys(), "outside": set()}
    assert all(lines[1][name] == value for name, value in IDS.items())


def test_text_line_ends_with_the_ids(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("edge")
    with logged_ids("s1", TRACE):
        OURS.info("begins")
    with logged_ids("s2", None):
        OURS.info("begins")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(f" begins session_id=s1 trace_id={'a' * 32} span_id={'b' * 16}")
    assert second.endswith(" begins session_id=s2")


def test_debug_lines_are_only_ours(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("edge", "DEBUG")
    logging.getLogger("websockets.client").debug("the text of a message")
    OURS.debug("shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("DEBUG edge shown")


PROGRAM = """
import asyncio, logging, signal, sys
from duplane.fabric import process
from duplane.fabric.monitoring.logs import configure_logging

async def main(shutdown):
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        logging.getLogger("duplane.test").debug("shown")
        logging.getLogger("duplane.test").error("asked")

configure_logging("edge", "ERROR")
logging.getLogger("duplane.test").error("ready")
sys.exit(process.run(main))
"""


UNCAUGHT = """
import warnings
from duplane.fabric.monitoring.logs import configure_logging, report_failure
configure_logging("edge", "INFO", "json")
warnings.warn("careful")
report_failure("no room")
raise KeyError("lost")
"""


def test_process_with_json_logs_writes_nothing_else_to_stderr() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, check=False
    )
    lines = [orjson.loads(line) for line in ran.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["WARNING", "CRITICAL", "CRITICAL"]
    assert "careful" in lines[0]["message"]
    assert lines[1]["message"] == "no room"
    assert "KeyError: 'lost'" in lines[2]["exception"]
    assert (ran.returncode, ran.stdout) == (1, "")


def test_failure_of_a_process_with_text_logs_is_one_plain_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("edge")
    report_failure("no room")
    assert capsys.readouterr().err == "duplane: no room\n"


def test_signals_change_the_level_of_a_running_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr
        assert running.stdin

        def lines() -> list[str]:
            """Send one line to the process; return the lines that it logs."""
            assert running.stderr
            assert running.stdin
            running.stdin.write("?\n")
            running.stdin.flush()
            found: list[str] = []
            while not found or found[-1] != "asked":
                found.append(running.stderr.readline().split()[-1])
            return found

        assert "ready" in running.stderr.readline()
        assert lines() == ["asked"]
        running.send_signal(signal.SIGUSR1)
        while lines() != ["shown", "asked"]:
            pass  # repeat until the signal has arrived
        running.send_signal(signal.SIGUSR2)
        while lines() != ["asked"]:
            pass
        running.stdin.close()
        assert running.wait(timeout=WITHIN_S) == 0
