"""Where a request may have its token, and what is left of a URL without it."""

from __future__ import annotations

import pytest

from duplane.edge.credentials.carriers import (
    MAX_TOKEN_CHARACTERS,
    Carrier,
    bearer_token,
    presented_token,
    without_token,
)

PATH = "/v1/realtime?mode=audio"


@pytest.mark.parametrize(
    ("name", "value", "carrier"),
    [
        ("Authorization", "Bearer T.1", Carrier.HEADER),
        ("authorization", "bearer   T.1 ", Carrier.HEADER),
        ("Sec-WebSocket-Protocol", "duplane.realtime, duplane.bearer.T.1", Carrier.SUBPROTOCOL),
        ("Sec-WebSocket-Protocol", "map-api-key.T.1,map.realtime", Carrier.SUBPROTOCOL),
        ("Sec-WebSocket-Protocol", "openai-insecure-api-key.T.1", Carrier.SUBPROTOCOL),
        ("Cookie", "a=b; __Host-duplane=T.1; c=d", Carrier.COOKIE),
        ("Cookie", '__Host-duplane="T.1"', Carrier.COOKIE),
    ],
)
def test_token_is_found_in_each_place(name: str, value: str, carrier: Carrier) -> None:
    found = presented_token([("Host", "e"), (name, value)], PATH)
    assert found
    assert (found.token, found.carrier) == ("T.1", carrier)
    assert "T.1" not in repr(found)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "Basic dTpw")],
        [("Authorization", "Bearer")],
        [("Sec-WebSocket-Protocol", "duplane.realtime, realtime")],
        [("Cookie", "duplane=T; __Host-other=T; __host-duplane=T")],
        [("X-Api-Key", "T")],
    ],
)
def test_other_headers_have_no_token(headers: list[tuple[str, str]]) -> None:
    assert presented_token(headers, PATH) is None


def test_only_an_ephemeral_token_may_be_in_the_url() -> None:
    found = presented_token([], f"{PATH}&token=ek_a.b")
    assert found
    assert (found.token, found.carrier) == ("ek_a.b", Carrier.QUERY)
    for secret in ("dpk_0123456789ab_00", "eyJ.a.b", ""):
        with pytest.raises(ValueError, match="only an ephemeral token") as refused:
            presented_token([], f"{PATH}&token={secret}")
        assert not secret or secret not in str(refused.value)


@pytest.mark.parametrize(
    "second",
    [
        ("Authorization", "Bearer other"),
        ("Sec-WebSocket-Protocol", "map-api-key.other"),
        ("Cookie", "__Host-duplane=other"),
    ],
)
def test_two_different_tokens_are_refused_and_the_same_one_twice_is_accepted(
    second: tuple[str, str],
) -> None:
    first = ("Sec-WebSocket-Protocol", "duplane.bearer.T")
    with pytest.raises(ValueError, match="two different credentials"):
        presented_token([first, second], PATH)
    with pytest.raises(ValueError, match="two different credentials"):
        presented_token([second], f"{PATH}&token=ek_a.b")
    found = presented_token([first, (second[0], second[1].replace("other", "T"))], PATH)
    assert found
    assert found.token == "T"


def test_two_different_headers_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two different credentials"):
        presented_token([("Authorization", "Bearer a"), ("Authorization", "Bearer b")], PATH)
    assert bearer_token([("Authorization", "Bearer a"), ("Authorization", "Bearer b")]) is None
    assert bearer_token([("Authorization", "Bearer a")]) == "a"


def test_token_that_is_too_long_is_refused_without_quoting_it() -> None:
    text = "x" * (MAX_TOKEN_CHARACTERS + 1)
    with pytest.raises(ValueError, match="longer than") as refused:
        presented_token([("Authorization", f"Bearer {text}")], PATH)
    assert "xxx" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        ("/v1/realtime", "/v1/realtime"),
        ("/v1/realtime?", "/v1/realtime?"),
        ("/v1/realtime?token=ek_a", "/v1/realtime"),
        ("/v1/realtime?mode=audio&token=ek_a&x=%20", "/v1/realtime?mode=audio&x=%20"),
        ("/v1/realtime?token=ek_a&mode=a&token=ek_b", "/v1/realtime?mode=a"),
        ("/v1/realtime?%74oken=ek_a&mode=a", "/v1/realtime?mode=a"),
        ("/v1/realtime?tokens=1", "/v1/realtime?tokens=1"),
    ],
)
def test_url_without_its_token(path: str, rest: str) -> None:
    assert without_token(path) == rest
