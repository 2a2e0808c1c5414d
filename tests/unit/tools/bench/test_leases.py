"""`duplane bench leases`: the content of its table."""

from __future__ import annotations

import pytest
from support.tools.command import run_command


@pytest.mark.slow
def test_grants_of_a_killed_scheduler_are_neither_lost_nor_doubled() -> None:
    flags = ["--grants", "250", "--callers", "12", "--workers", "2", "--slots", "2", "--kills"]
    code, output = run_command("bench", "leases", *flags)
    assert code == 0, output
    assert "1 schedulers killed" in output
    assert output.split()[-3:] == ["0", "0", "0"], output


def test_several_schedulers_need_a_store_that_they_share() -> None:
    code, output = run_command("bench", "leases", "--replicas", "2")
    assert code == 2
    assert "replicas: more than one scheduler needs a shared store" in output
