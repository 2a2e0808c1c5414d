"""The time limit of waits in tests."""

from __future__ import annotations

WITHIN_S = 30.0
"""Limit of a wait for something that comes immediately on an idle machine.

It only ends a test that hangs, so it leaves a loaded machine enough time. It is shorter than the
intervals after which a process would notice a missing message by itself: the edge closes a silent
client after 40 s, and a harness sets longer intervals where the default is shorter.
"""
