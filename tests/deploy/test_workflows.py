"""The workflows of GitHub: pinned actions, no known mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.check_programs import run_check
from support.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=[path.stem for path in WORKFLOWS])
def test_each_action_is_pinned_to_a_commit(workflow: Path) -> None:
    used = re.findall(r"^\s*(?:- )?uses: (.*)$", workflow.read_text(), re.MULTILINE)
    assert used
    assert [action for action in used if not PINNED.match(action)] == []


def test_the_same_action_has_the_same_commit_everywhere() -> None:
    text = "\n".join(workflow.read_text() for workflow in WORKFLOWS)
    commits = set(re.findall(r"uses: ([\w-]+/[\w-]+)[\w/-]*@(\S+)", text))
    assert len(commits) == len({action for action, _ in commits})


@pytest.mark.slow
def test_the_workflows_have_no_known_mistake() -> None:
    run_check("zizmor", "--offline", "--no-progress", *WORKFLOWS)
