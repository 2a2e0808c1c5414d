"""What the sessions of a load generator ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.tools.load_plan import PLAN

from duplane.client import DuplexError
from duplane.tools.bench.load import sessions
from duplane.tools.bench.load.sessions import LibrarySession, SessionError


@pytest.mark.parametrize("is_resumable", [False, True])
async def test_sessions_are_resumable_if_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch, *, is_resumable: bool
) -> None:
    asked: list[bool] = []

    def new_session(url: str, **settings: Any) -> None:
        asked.append(settings["resumable"])
        raise DuplexError(f"{url} is not opened")

    monkeypatch.setattr(sessions, "DuplexSession", new_session)
    with pytest.raises(SessionError):
        async with LibrarySession.opened(replace(PLAN, is_resumable=is_resumable)):
            pass
    assert asked == [is_resumable]
