"""The examples of docs/clients.md are parts of the programs in tests/clients, which tests run."""

from __future__ import annotations

import re

from support.client_packages import SCRIPTS
from support.paths import ROOT

PAGE = ROOT / "docs/clients.md"
FILE = re.compile(r"\]\(\.\./tests/clients/([\w.]+)\):\n")
BLOCK = re.compile(r"^```(?:python|js)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def code(text: str) -> str:
    """Return code without white space: a program may break and indent lines in other places."""
    return re.sub(r"\s", "", text)


def test_each_example_is_a_part_of_its_program() -> None:
    _, *parts = FILE.split(PAGE.read_text())
    examples = 0
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        program = code((SCRIPTS / name).read_text())
        for block in BLOCK.findall(text):
            assert code(block) in program, f"{name}:\n{block}"
            examples += 1
    assert examples == len(BLOCK.findall(PAGE.read_text()))


def test_the_page_names_each_version() -> None:
    page = PAGE.read_text()
    for text in ((SCRIPTS / "requirements.txt").read_text(), (SCRIPTS / "by_hand.sh").read_text()):
        for name, version in re.findall(
            r"(openai|openai-agents|livekit-plugins-openai|pipecat-ai)(?:\[\S*\])?==([\d.]+)", text
        ):
            assert re.search(rf"`{name}`\]\S* .*\| {re.escape(version)} \|", page), name
