"""The `duplane` command line: registers verbs, reads their settings and reports their errors.

A value comes from its flag, else from its environment variable, else from the config file, else
from its default. Verbs register with `@app.command`; each parameter is a flag.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, cast

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict, Env
from cyclopts.types import ExistingFile

from duplane.fabric.monitoring.logs import report_failure
from duplane.fabric.settings import check_arguments
from duplane.tools.config_file import read_config

EXIT_FAILED = 1
EXIT_USAGE = 2
_EXTRA_OF = {  # imported package -> the extra of duplane that installs it
    **dict.fromkeys(("torch", "transformers", "tokenizers", "safetensors"), "worker"),
    **dict.fromkeys(("jinja2", "PIL", "onnxruntime", "av"), "worker"),
    "psutil": "bench",
}
VARIABLE_PREFIX = "DUPLANE_"  # of the environment variables of all settings
CONFIG_VARIABLE = "DUPLANE_CONFIG"
_ENVIRONMENT = Env(VARIABLE_PREFIX, command=False)
Settings = TypeVar("Settings")


def shown_default(default: object) -> str | None:
    """Return a default as the help and the settings page show it; None for no default."""
    match default:
        case None | "" | ():
            return None
        case tuple():
            return ",".join(str(item) for item in cast("tuple[object, ...]", default))
        case _:
            return str(default)


app = App(
    name="duplane",
    version=f"duplane {importlib.metadata.version('duplane')}",
    default_parameter=Parameter(show_default=shown_default),
    help="Serve full-duplex speech models to many people at once.",
    help_epilogue="Every flag can be set as an environment variable too: --port as DUPLANE_PORT."
    " Flags of up, edge, scheduler and worker can also be set in a TOML file, in a table named"
    " after the verb.",
    help_format="markdown",
    config=(_ENVIRONMENT,),
)


class CommandError(Exception):
    """A verb failed; the message is for the user."""

    exit_code = EXIT_FAILED


class UsageError(CommandError):
    """A flag, an environment variable, the config file, or a file that they name is unusable."""

    exit_code = EXIT_USAGE


@app.meta.default
def launch(
    *arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[
        ExistingFile | None,
        Parameter(help="TOML file with settings in tables [up], [edge], [scheduler], [worker]."),
    ] = None,
) -> int:
    """Run the verb that `arguments` name."""
    app.config = (_ENVIRONMENT,)
    if config is not None:
        use_config(config)
    return _run(app, arguments)


def use_config(config: Path) -> None:
    """Take settings from this file, which flags and environment variables override.

    Raises UsageError.
    """
    try:
        tables = read_config(config)
    except ValueError as error:
        raise UsageError(str(error)) from None
    app.config = (_ENVIRONMENT, Dict(tables, source=str(config)))
    # The processes that `up` starts inherit it.
    os.environ[CONFIG_VARIABLE] = str(config.absolute())


def parse_settings(
    verb: Callable[[Settings], int], arguments: Sequence[str], defaults: Mapping[str, str]
) -> Settings:
    """Return the settings with which `verb` would run; `defaults` override the fields' defaults.

    Raises UsageError.
    """
    configured = app.config
    app.config = (*configured, Dict({verb.__name__: defaults}, source="defaults"))
    try:
        _, bound = _parse(app, (verb.__name__, *arguments))
    finally:
        app.config = configured
    bound.apply_defaults()
    return bound.arguments["settings"]


def run(arguments: Sequence[str]) -> int:
    """Run the command line of duplane; return the exit code."""
    return run_app(app.meta, arguments)


def run_app(owner: App, arguments: Sequence[str]) -> int:
    """Run a command of `owner`; return the exit code. A failure is one line on stderr."""
    try:
        return _run(owner, arguments)
    except CommandError as error:
        report_failure(str(error))
        return error.exit_code
    except ModuleNotFoundError as missing:
        extra = _EXTRA_OF.get((missing.name or "").partition(".")[0])
        if extra is None:
            raise
        report_failure(f"{missing.name} is not installed; install duplane[{extra}]")
        return EXIT_FAILED


def main() -> NoReturn:
    """Run the command line of this process."""
    sys.exit(run(sys.argv[1:]))


def _run(owner: App, arguments: Sequence[str]) -> int:
    verb, bound = _parse(owner, arguments)
    return verb(*bound.args, **bound.kwargs) or 0


def _parse(owner: App, arguments: Sequence[str]) -> Any:
    try:
        verb, bound = owner.parse_args(arguments, exit_on_error=False, print_error=False)[:2]
        check_arguments(verb, bound.arguments)
    except (CycloptsError, ValueError) as error:
        raise UsageError(str(error)) from None
    return verb, bound
