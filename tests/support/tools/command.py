"""Runs commands within the test process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from support.monitoring.log_state import restored_logging

from duplane.tools.main import run


def run_command(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run the `duplane` command; return its exit code and all its output to stdout and stderr."""
    return captured(run, arguments, **environment)


def captured(
    command: Callable[[Sequence[str]], int], arguments: Sequence[str], **environment: str
) -> tuple[int, str]:
    """Run a command; return its exit code and all its output to stdout and stderr."""
    output = io.StringIO()
    with (
        _environment({"COLUMNS": "200", **environment}),
        restored_logging(),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            code = command(arguments)
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
    return code, output.getvalue()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        # `--config` sets this variable for child processes. The patch sets and deletes the variable
        # here, so that it restores the variable at the end.
        patch.setenv("DUPLANE_CONFIG", "")
        patch.delenv("DUPLANE_CONFIG")
        yield
