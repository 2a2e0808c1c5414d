"""Makes a checkpoint that cannot see from the default model."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson

from duplane.worker.checkpoints import DEFAULT_CHECKPOINT


def blind_checkpoint(folder: Path) -> Path:
    """Copy the default model without its vision tower to a new folder `blind`; return the copy."""
    copy = folder / "blind"
    shutil.copytree(DEFAULT_CHECKPOINT, copy)
    config = orjson.loads((copy / "config.json").read_bytes())
    (copy / "config.json").write_bytes(orjson.dumps(config | {"init_vision": False}))
    return copy
