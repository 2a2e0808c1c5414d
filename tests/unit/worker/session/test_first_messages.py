"""The check of a lease before a first message is read, and the bound on messages without one."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from duplane.fabric.durations import to_duration
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.lease_metadata import with_lease
from duplane.fabric.lease_signing import LeaseSigner
from duplane.fabric.v1 import lease_pb2
from duplane.worker.admission import Admission
from duplane.worker.session import first_messages
from duplane.worker.session.first_messages import FirstMessages, require_same

SIGNER = LeaseSigner()


def lease(number: int = 1, signer: LeaseSigner = SIGNER) -> lease_pb2.Lease:
    return signer.sign(
        lease_pb2.LeaseClaims(
            lease_id=f"lease {number}",
            worker_id="w",
            worker_epoch=1,
            fencing_number=number,
            kind=lease_pb2.SESSION_KIND_CHAT,
            claim_timeout=to_duration(5),
        )
    )


def first() -> FirstMessages:
    admission = Admission("w", 1, [lease_pb2.SESSION_KIND_CHAT])
    admission.register(1, [SIGNER.verification_key], time.monotonic())
    return FirstMessages(admission)


def call(*leases: lease_pb2.Lease) -> Any:
    class Context:
        def invocation_metadata(self) -> Any:
            return [pair for one in leases for pair in with_lease(one)]

        def auth_context(self) -> Any:
            return {}  # no TLS

    return Context()


async def refusal(reader: FirstMessages, context: Any) -> FabricError:
    with pytest.raises(FabricError) as refused:
        async with reader.reading(context, is_chat=True):
            pass
    return refused.value


async def test_forged_lease_is_refused_before_the_message_is_read() -> None:
    forged = await refusal(first(), call(lease(signer=LeaseSigner())))
    assert forged.reason is Reason.LEASE_FORGED


async def test_one_lease_lets_one_message_be_read_at_a_time() -> None:
    reader, valid = first(), lease()
    async with reader.reading(call(valid), is_chat=True) as checked:
        assert checked == valid
        assert (await refusal(reader, call(valid))).reason is Reason.LEASE_STALE
        async with reader.reading(call(lease(2)), is_chat=True):
            pass
    async with reader.reading(call(valid), is_chat=True):
        pass


@pytest.mark.parametrize("leases", [(lease(1), lease(2)), (lease_pb2.Lease(),)])
async def test_metadata_without_one_lease_is_refused(leases: tuple[lease_pb2.Lease, ...]) -> None:
    assert await refusal(first(), call(*leases))


async def test_few_messages_without_a_lease_are_read_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_messages, "_WAIT_S", 0.01)
    reader = first()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(first_messages.MAX_UNCHECKED_COUNT):
            await stack.enter_async_context(reader.reading(call(), is_chat=True))
        refused = await refusal(reader, call())
        assert refused.reason is Reason.UNAVAILABLE
        async with reader.reading(call(lease()), is_chat=True):
            pass  # a lease needs no such place
    async with reader.reading(call(), is_chat=True) as checked:
        assert checked is None


def test_message_must_have_the_lease_that_was_checked() -> None:
    require_same(None, lease(), "lease")
    require_same(lease(), lease(), "lease")
    with pytest.raises(FabricError) as refused:
        require_same(lease(), lease(2), "lease")
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_FIELD, "lease")
