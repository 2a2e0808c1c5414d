"""The examples of docs/clients.md are parts of the programs in tests/clients, which tests run."""

from __future__ import annotations

import re

from support.client_packages import SCRIPTS
from support.paths import ROOT

PAGE = ROOT / "docs/clients.md"
FILE = re.compile(r"\]\(\.\./tests/clients/([\w.]+)\):\n")
BLOCK = re.compile(r"^```(?:python|js)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Programs that check events, or that other pages describe.
OTHERS = {"check_events.py", "completions.py"}


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


def test_the_page_names_each_program_and_version() -> None:
    page = PAGE.read_text()
    programs = {file.name for file in SCRIPTS.iterdir() if file.suffix in (".py", ".mjs")}
    assert {name for name in programs - OTHERS if f"tests/clients/{name}" not in page} == set()
    for text in ((SCRIPTS / "requirements.txt").read_text(), (SCRIPTS / "by_hand.sh").read_text()):
        for name, version in re.findall(
            r"(openai|openai-agents|livekit-plugins-openai|pipecat-ai)(?:\[\S*\])?==([\d.]+)", text
        ):
            assert re.search(rf"`{name}`\]\S* .*\| {re.escape(version)} \|", page), name
