"""The contract's reference page is up to date, and every part of the contract has a comment."""

from __future__ import annotations

import re

from support.paths import ROOT

from pages.contract import contract_page

PAGE = ROOT / "proto/CONTRACT.md"


def test_committed_page_is_fresh() -> None:
    assert PAGE.read_text() == contract_page(ROOT / "proto"), "run `make contract-docs`"


def test_page_explains_every_message_and_field() -> None:
    page = PAGE.read_text()
    names = {
        name
        for proto in (ROOT / "proto/duplane/fabric/v1").glob("*.proto")
        for name in re.findall(r"^(?:message|enum|service) (\w+)", proto.read_text(), re.M)
    }
    assert names <= set(re.findall(r"^#{2,3} (\w+)\n\n(?=\w)", page, re.M))
    assert not re.findall(r"^\|.*\|  \|$", page, re.M), "a field without a comment"
