"""Every alert has a page in the runbook, and every page has a drill."""

from __future__ import annotations

import re

import pytest
from drills import edge_drills, fabric_drills
from drills.drills import DRILLS
from drills.site import alert_pages, commands, pages
from support.paths import ROOT

_MODULES = (edge_drills, fabric_drills)  # importing them has registered their drills
PAGES = sorted(pages())


def alerts_of(page: str) -> set[str]:
    """Return the alerts that a page names below its title."""
    alerts = re.search(r"^(?:Alerts: |No alert)(.*?)\n\n", pages()[page], re.M | re.S)
    assert alerts, f"the page {page} does not name its alerts"
    return set(re.findall(r"`(Duplane\w+)`", alerts[1]))


def test_every_alert_links_the_page_that_names_it() -> None:
    linked = alert_pages()
    assert linked.keys() == {name for page in PAGES for name in alerts_of(page)}
    for name, url in linked.items():
        file, _, page = url.partition("#")
        assert (ROOT / "deploy" / file).resolve() == ROOT / "docs" / "runbook.md"
        assert name in alerts_of(page), name


def test_every_page_has_a_drill() -> None:
    assert sorted(DRILLS) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_page_says_what_users_see_where_to_look_what_to_do_and_when_it_is_over(page: str) -> None:
    assert "**Users**" in pages()[page]
    assert commands(page).keys() == {"Look", "Do", "Over"}


@pytest.mark.parametrize("page", PAGES)
def test_drill_lets_an_alert_of_its_page_fire(page: str) -> None:
    named = set(DRILLS[page].alerts)
    linked = {name for name, url in alert_pages().items() if url.endswith(f"#{page}")}
    if linked:
        assert named
        assert named <= linked
    else:
        assert named <= alert_pages().keys()
