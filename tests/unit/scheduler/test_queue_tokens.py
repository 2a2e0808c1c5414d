"""Queue tokens: what they show, what they open, and when they are void."""

from __future__ import annotations

import base64

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2
from duplane.scheduler.queue_tokens import TOKEN_S, QueueTokens
from duplane.scheduler.store.base import Grant, GrantEnd, GrantGone, GrantPut, Ticket

KEY = b"key of the store"
NOW_S = 1_700_000_000.0


def asked(**fields: object) -> lease_pb2.AcquireLeaseRequest:
    known = {"kind": lease_pb2.SESSION_KIND_AUDIO_DUPLEX, "pool": "p", "tenant_id": "t"}
    return lease_pb2.AcquireLeaseRequest(**{**known, **fields})


def ticket(order: int = 5) -> Ticket:
    return Ticket(order, "owner", asked(request_id="r"))


def tokens_at(now_s: float = NOW_S) -> QueueTokens:
    return QueueTokens(lambda: now_s)


@given(st.integers(1, 2**63))
def test_every_scheduler_with_the_key_opens_a_token(order: int) -> None:
    token = tokens_at().seal(KEY, ticket(order))
    assert tokens_at().open(KEY, asked(request_id="another"), token) == order
    assert tokens_at().open(b"another key", asked(), token) is None
    assert tokens_at().open(b"", asked(), token) is None


def test_there_is_no_token_without_the_key_of_the_store() -> None:
    assert tokens_at().seal(b"", ticket()) == ""


@given(st.integers(1, 2**40))
def test_token_does_not_show_the_order(order: int) -> None:
    token = base64.urlsafe_b64decode(tokens_at().seal(KEY, ticket(order)))
    assert order.to_bytes(8) not in token


def test_two_tokens_of_one_ticket_differ() -> None:
    tokens = tokens_at()
    assert tokens.seal(KEY, ticket()) != tokens.seal(KEY, ticket())


@given(st.text(max_size=20))
@example("é")
@example("gAAAAA==")
def test_text_that_is_no_token_opens_nothing(text: str) -> None:
    assert tokens_at().open(KEY, asked(), text) is None


@given(st.data())
def test_changed_token_opens_nothing(data: st.DataObject) -> None:
    token = bytearray(base64.urlsafe_b64decode(tokens_at().seal(KEY, ticket())))
    token[data.draw(st.integers(0, len(token) - 1))] ^= data.draw(st.integers(1, 255))
    changed = base64.urlsafe_b64encode(token).decode()
    assert tokens_at().open(KEY, asked(), changed) is None


def test_token_expires() -> None:
    token = tokens_at().seal(KEY, ticket())
    assert tokens_at(NOW_S + TOKEN_S).open(KEY, asked(), token) == 5
    assert tokens_at(NOW_S + TOKEN_S + 1).open(KEY, asked(), token) is None


@pytest.mark.parametrize(
    "other",
    [
        {"kind": lease_pb2.SESSION_KIND_OMNI_DUPLEX},
        {"pool": "other"},
        {"tenant_id": "other"},
        {"needs": {"zone": "z"}},
        {"model": "m"},
    ],
)
def test_token_of_another_kind_of_request_is_refused_by_its_name(other: dict[str, object]) -> None:
    token = tokens_at().seal(KEY, ticket())
    with pytest.raises(FabricError) as refused:
        tokens_at().open(KEY, asked(**other), token)
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_FIELD, "queue_token")


def test_model_by_name_and_the_same_model_as_a_need_are_one_demand() -> None:
    """The ticket was made when a worker had this model; the client returns after it is gone."""
    decided = Ticket(5, "owner", asked(needs={"model": "m", "zone": "z"}))
    token = tokens_at().seal(KEY, decided)
    assert tokens_at().open(KEY, asked(needs={"zone": "z"}, model="m"), token) == 5


def grant(*, is_claimed: bool) -> Grant:
    return Grant(lease_pb2.LeaseClaims(lease_id="l"), ticket(), is_claimed=is_claimed)


def test_token_is_void_from_the_claim_of_its_ticket_on() -> None:
    now_s = NOW_S
    tokens = QueueTokens(lambda: now_s)
    token = tokens.seal(KEY, ticket())
    tokens.on_change(GrantPut(1, grant(is_claimed=False)))
    tokens.on_change(GrantGone(2, grant(is_claimed=False), GrantEnd.EXPIRED))
    assert tokens.open(KEY, asked(), token) == 5
    tokens.on_change(GrantPut(3, grant(is_claimed=True)))
    assert tokens.open(KEY, asked(), token) is None
    tokens.on_change(GrantGone(4, grant(is_claimed=True), GrantEnd.RELEASED))
    now_s += TOKEN_S - 1
    assert tokens.open(KEY, asked(), token) is None
