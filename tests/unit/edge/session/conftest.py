"""Fixtures for tests of sessions."""

from __future__ import annotations

import pytest
from support.edge.moved_play import Play


@pytest.fixture
def play() -> Play:
    """Return a client of dialect C whose conversation has three units."""
    new = Play()
    new.begin()
    for _ in range(3):
        new.chunk()
        new.settle()
    return new
