"""Limits per client, and clients that turn out to have a credential."""

from __future__ import annotations

from duplane.edge.transport.client_limits import ClientLimiter, LimitReached, Permit


def permit(limiter: ClientLimiter, client: str | None = "a") -> Permit:
    found = limiter.acquire(client)
    assert isinstance(found, Permit)
    return found


def test_client_is_bounded_until_it_releases_one() -> None:
    limiter = ClientLimiter(10, 2)
    first, _ = permit(limiter), permit(limiter)
    assert limiter.acquire("a") is LimitReached.CLIENT
    permit(limiter, "b")
    first.release()
    permit(limiter)
    assert (limiter.count, limiter.refused_count) == (3, 1)


def test_exempt_connection_counts_in_total_only() -> None:
    limiter = ClientLimiter(3, 1)
    for _ in range(3):
        permit(limiter).exempt()
    assert limiter.acquire("b") is LimitReached.TOTAL
    assert limiter.acquire(None) is LimitReached.TOTAL


def test_address_with_a_credential_may_begin_many_connections_at_once() -> None:
    limiter = ClientLimiter(1000, 16)
    known = permit(limiter)
    known.exempt()
    known.exempt()  # a second request on the connection changes nothing
    begun = [permit(limiter) for _ in range(16 + 256)]
    assert limiter.acquire("a") is LimitReached.CLIENT
    known.release()
    for one in begun[16:]:
        one.release()
    assert limiter.acquire("a") is LimitReached.CLIENT


def test_nothing_is_remembered_of_clients_that_left() -> None:
    limiter = ClientLimiter(10, 5)
    permits = [permit(limiter), permit(limiter), permit(limiter, None)]
    for one in permits[::2]:
        one.exempt()
    for one in permits:
        one.release()
    assert (limiter.count, *limiter.client_counts, *limiter.exempt_counts) == (0,)
