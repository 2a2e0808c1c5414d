"""Holders, request ids of one holder, and proofs of tickets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duplane.scheduler.holders import (
    holder_of,
    is_free_of_scope,
    is_open_to,
    is_proven,
    is_proven_of_session,
    scoped,
    session_proof,
    ticket_proof,
)

KEY = b"key of the store"
holders = st.one_of(st.just(b""), st.binary(min_size=1, max_size=8).map(holder_of))
orders = st.integers(0, 2**64 - 1)


def test_caller_without_a_key_is_no_holder() -> None:
    assert holder_of(b"") == b""
    assert len(holder_of(b"k")) == 32


@given(holders, holders)
def test_only_the_holder_and_nobody_has_what_has_a_holder(one: bytes, other: bytes) -> None:
    assert is_open_to(one, other) == (one in (b"", other))


@given(st.tuples(orders, holders), st.tuples(orders, holders))
def test_proof_is_of_one_order_and_one_holder(
    one: tuple[int, bytes], other: tuple[int, bytes]
) -> None:
    proof = ticket_proof(KEY, *one)
    assert is_proven(KEY, *other, proof) == (one == other)
    assert not is_proven(b"another key", *one, proof)


@given(orders, holders)
def test_proof_of_a_place_does_not_prove_a_slot(order: int, holder: bytes) -> None:
    waiting, granted = (ticket_proof(KEY, order, holder, is_granted=one) for one in (False, True))
    assert is_proven(KEY, order, holder, granted, is_granted=True)
    assert not is_proven(KEY, order, holder, waiting, is_granted=True)
    assert not is_proven(KEY, order, holder, granted)


@given(orders, holders)
def test_nothing_is_proven_without_the_key_of_the_store(order: int, holder: bytes) -> None:
    assert ticket_proof(b"", order, holder) == b""
    assert not is_proven(b"", order, holder, b"")
    assert not is_proven(KEY, order, holder, b"")


sessions = st.tuples(orders, st.text("s,' ", min_size=1, max_size=4), st.text("t,' ", max_size=4))


@given(sessions, sessions)
def test_proof_of_a_session_is_of_one_order_one_session_and_one_tenant(
    one: tuple[int, str, str], other: tuple[int, str, str]
) -> None:
    proof = session_proof(KEY, *one)
    assert is_proven_of_session(KEY, *one, proof)
    assert is_proven_of_session(KEY, *other, proof) == (one == other)
    assert not is_proven_of_session(b"another key", *one, proof)
    assert not is_proven(KEY, one[0], b"", proof, is_granted=True)


@given(sessions)
def test_session_without_a_name_or_a_key_proves_nothing(session: tuple[int, str, str]) -> None:
    order, session_id, tenant_id = session
    for key, name in ((b"", session_id), (KEY, "")):
        assert session_proof(key, order, name, tenant_id) == b""
        assert not is_proven_of_session(key, order, name, tenant_id, b"")


request_ids = st.text("a/0", max_size=3)


def test_no_caller_may_send_an_id_that_names_a_request_of_a_holder() -> None:
    assert is_free_of_scope("r/1")
    assert not is_free_of_scope(scoped("r/1", holder_of(b"key")))


@given(st.tuples(request_ids, holders), st.tuples(request_ids, holders))
def test_request_ids_of_two_holders_never_meet(
    one: tuple[str, bytes], other: tuple[str, bytes]
) -> None:
    assert (scoped(*one) == scoped(*other)) == (one == other)
