"""Chooses the family of models that runs a checkpoint.

A family is a module with a function `open_device`; see `interface.OpenDevice`. It is imported only
when its checkpoint is opened, so a scripted model needs no torch. `--family` names the module of a
family that is not part of duplane.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import orjson

from duplane.worker.models.interface import Device, LoadError, OpenDevice
from duplane.worker.settings import WorkerSettings

# Maps `model_type` in the checkpoint's config.json to the module of the family.
FAMILIES = {"minicpmo": "duplane.worker.models.minicpm_o.family"}
_DEFAULT_TYPE = "minicpmo"
_SCRIPTED = "duplane.worker.models.scripted.family"


def open_device(settings: WorkerSettings) -> Device:
    """Return the device with the checkpoint that the settings name. Raises LoadError."""
    name = settings.family or _family_of(settings)
    try:
        family = importlib.import_module(name)
        opens: OpenDevice = family.open_device
    except ModuleNotFoundError as error:
        if name not in FAMILIES.values():
            raise LoadError(f"the family {name} cannot be used: {error}") from error
        raise LoadError(f"{error.name} is not installed; install duplane[worker]") from error
    except (ImportError, AttributeError) as error:
        raise LoadError(f"the family {name} cannot be used: {error}") from error
    return opens(settings)


def _family_of(settings: WorkerSettings) -> str:
    """Return the module of the family that runs the checkpoint."""
    if settings.checkpoint == "scripted":
        return _SCRIPTED
    path = Path(settings.checkpoint) / "config.json"
    try:
        config = orjson.loads(path.read_bytes())
        model_type = config.get("model_type") or _DEFAULT_TYPE
    except FileNotFoundError:
        raise LoadError(f"{path} does not exist") from None
    except (OSError, ValueError, AttributeError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise LoadError(
            f"{path.parent} is a model of type {model_type!r}; duplane runs {known}, and other "
            "types with --family"
        )
    return FAMILIES[model_type]
