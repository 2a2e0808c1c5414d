"""A plan of a load generator with four sessions."""

from __future__ import annotations

from duplane.tools.bench.load.plan import Plan

PLAN = Plan(
    url="ws://h:1",
    dialect="B",
    open_timeout_s=1.0,
    ca=None,
    is_resumable=False,
    sessions=range(4),
    session_count=4,
    phases="spread",
    warm_up_units=2,
    units=10,
    session_units=8,
)
