"""The results of stages: a JSON file for each group, which is written again after each change."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from duplane.fabric.files import write_atomically

PREFIX = "hour-"


class State(StrEnum):
    """How far a stage has come. BEGUN in a file means that the process ended during the stage."""

    BEGUN = "begun"
    DONE = "done"
    FAILED = "failed"
    NO_TIME = "no time"


class Results:
    """The records of all stages in one folder, by group and stage.

    A record has `state`, `planned_s`, `seconds`, `memory_gb`, `result` (what the stage returned, or
    the part of it that is known), and after a failure `error`.
    """

    def __init__(self, folder: Path) -> None:
        """Read the files of earlier runs. Creates the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._groups: dict[str, dict[str, dict[str, Any]]] = {
            path.stem.removeprefix(PREFIX): orjson.loads(path.read_bytes())
            for path in sorted(folder.glob(f"{PREFIX}*.json"))
        }

    def state(self, group: str, stage: str) -> State | None:
        """Return how far a stage has come; None if it never began."""
        record = self._groups.get(group, {}).get(stage)
        return None if record is None else State(record["state"])

    def note(self, group: str, stage: str, **fields: Any) -> None:
        """Change fields of a record, and write the group's file."""
        stages = self._groups.setdefault(group, {})
        stages[stage] = stages.get(stage, {}) | fields
        content = orjson.dumps(stages, option=orjson.OPT_INDENT_2)
        write_atomically(self._folder / f"{PREFIX}{group}.json", content)

    def forget(self, group: str, stage: str) -> None:
        """Delete the record of a stage that begins again."""
        self._groups.get(group, {}).pop(stage, None)

    def every(self, stage: str) -> list[dict[str, Any]]:
        """Return what the stages of this name have measured, in all groups."""
        records = [stages[stage] for stages in self._groups.values() if stage in stages]
        return [record["result"] for record in records if record.get("result")]
