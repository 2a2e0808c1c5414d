"""Chooses the environment of the processes that `up` starts.

Secrets can be in the environment of `up`, for example the token of operators. Each process gets
only the variables of its own settings, so that a secret of the edge is in no other process. What
systemd tells `up` is for no other process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from duplane.fabric import process
from duplane.fabric.monitoring import service_manager
from duplane.tools.command import CONFIG_VARIABLE, VARIABLE_PREFIX, app

_NOT_INHERITED = (VARIABLE_PREFIX, *service_manager.VARIABLES)


def environment_of(verb: str, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a supervised process that runs `verb`.

    Of the variables of duplane it has those of the settings of `verb`, and the path of the config
    file. It also has all variables that are neither duplane's nor systemd's for `up`, such as PATH
    or those of CUDA.
    """
    own = {CONFIG_VARIABLE, *_variables_of(verb)}
    kept = {
        name: value
        for name, value in inherited.items()
        if name in own or not name.startswith(_NOT_INHERITED)
    }
    return {**kept, process.SUPERVISED: "1"}


def environment_without_settings(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a process that has all its settings as arguments."""
    return {name: value for name, value in inherited.items() if not name.startswith(_NOT_INHERITED)}


def _variables_of(verb: str) -> set[str]:
    arguments = app[verb].assemble_argument_collection()
    names = (name for argument in arguments for name in argument.names)
    return {VARIABLE_PREFIX + name.lstrip("-").replace("-", "_").upper() for name in names}
