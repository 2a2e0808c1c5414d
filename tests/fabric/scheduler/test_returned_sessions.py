"""Sessions that return through another caller keep their place before the tickets that wait."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduler.scheduler_harness import SchedulerHarness

from duplane.fabric.v1 import lease_pb2

SESSION: dict[str, Any] = {"session_id": "s", "tenant_id": "t"}


def returning(granted: lease_pb2.Granted) -> dict[str, Any]:
    """Return the fields of a request with which another caller continues a session."""
    proof = granted.session_proof
    return {"ticket_id": granted.ticket_id, "ticket_proof": proof, "was_granted": True}


@pytest.mark.usefixtures("every_store")
async def test_session_that_another_caller_continues_comes_before_waiting_tickets() -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker()
        granted = await (await harness.caller(caller_key=b"first", **SESSION)).granted()
        await worker.claim(granted)
        await (await harness.caller(caller_key=b"later", **SESSION)).stands(1)
        back = await harness.caller(caller_key=b"second", **SESSION, **returning(granted))
        await back.stands(1)
        await worker.finish(0)
        again = await back.granted()
        await worker.claim(again)
        third = await harness.caller(caller_key=b"third", **SESSION, **returning(again))
        await third.stands(1)


@pytest.mark.parametrize(
    "changed",
    [
        {"session_id": "another"},
        {"session_id": ""},
        {"tenant_id": "another"},
        {"ticket_proof": b""},
    ],
    ids=str,
)
async def test_proof_of_a_session_is_worth_nothing_for_another_one(changed: dict[str, Any]) -> None:
    async with SchedulerHarness.running() as harness:
        worker = await harness.worker()
        granted = await (await harness.caller(caller_key=b"first", **SESSION)).granted()
        await worker.claim(granted)
        tenant_id = changed.get("tenant_id", SESSION["tenant_id"])
        later = await harness.caller(caller_key=b"later", tenant_id=tenant_id)
        await later.stands(1)
        fields = SESSION | returning(granted) | changed
        stranger = await harness.caller(caller_key=b"second", **fields)
        await stranger.stands(2)
        await worker.finish(0)
        await later.granted()


async def test_session_without_a_name_has_no_proof() -> None:
    async with SchedulerHarness.running() as harness:
        await harness.worker()
        granted = await (await harness.caller(caller_key=b"first")).granted()
        assert granted.ticket_proof
        assert not granted.session_proof
