"""The rules for browsers, without sockets."""

from __future__ import annotations

import pytest

from duplane.edge.transport.origins import (
    BrowserRules,
    Target,
    check_hosts,
    parse_origin,
    parse_origins,
    parse_target,
)

NONE = BrowserRules((), (), lambda: ())


@pytest.mark.parametrize(
    ("authority", "scheme", "origin", "is_own"),
    [
        ("voice.example", "", "https://voice.example", True),
        ("voice.example", "", "http://voice.example", True),
        ("voice.example:443", "", "https://voice.example", True),
        ("voice.example:80", "", "https://voice.example", False),
        ("Voice.Example", "https", "https://VOICE.example", True),
        ("voice.example", "https", "http://voice.example", False),
        ("voice.example:8006", "", "http://voice.example:8006", True),
        ("voice.example:8006", "", "http://voice.example:8007", False),
        ("voice.example:8006", "", "http://voice.example", False),
        ("[::1]:8006", "", "http://[::1]:8006", True),
        ("voice.example", "", "https://voice.example.evil.example", False),
        ("voice.example", "", "https://evil.example", False),
        ("", "", "https://evil.example", False),
    ],
)
def test_own_origin_has_the_host_port_and_known_scheme_of_the_server(
    authority: str, scheme: str, origin: str, is_own: bool
) -> None:
    parsed = parse_origin(origin)
    assert parsed
    assert Target(authority, scheme).is_origin(parsed) is is_own


@pytest.mark.parametrize(
    "text",
    [
        *("null", "", "file://", "https://", "https://a b", "https://a/b", "https://user@a"),
        *("https://a,https://b", "ftp://a", "https://a:b", "a.example", "https://[::1", "//a"),
    ],
)
def test_what_is_no_origin_of_a_page_is_foreign(text: str) -> None:
    assert parse_origin(text) is None
    headers = {"host": "localhost", "origin": text}
    assert "--allowed-origins" in NONE.refusal(headers, Target("localhost"))


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8006", "[::1]", "10.0.0.5", "localhost", "LOCALHOST:1"]
)
def test_addresses_and_localhost_are_always_own_names(host: str) -> None:
    assert NONE.refusal({"host": host}, Target(host)) == ""


@pytest.mark.parametrize("host", ["", "evil.example", "127.1", "localhost.", "a@127.0.0.1", "a, b"])
def test_other_names_are_refused(host: str) -> None:
    assert "--allowed-hosts" in NONE.refusal({"host": host}, Target(host))


def test_program_without_a_host_is_no_browser() -> None:
    assert NONE.refusal({}, Target("")) == ""


def test_headers_of_an_unknown_proxy_change_nothing() -> None:
    headers = {"host": "a", "x-forwarded-host": "b", "x-forwarded-proto": "https"}
    assert parse_target(headers, is_tls=False, is_proxied=False) == Target("a")
    assert parse_target(headers, is_tls=True, is_proxied=False) == Target("a", "https")
    assert parse_target(headers, is_tls=False, is_proxied=True) == Target("b", "https")


def test_last_value_of_a_forwarded_header_counts() -> None:
    headers = {"host": "a", "x-forwarded-host": "evil, b", "x-forwarded-proto": "http, https"}
    assert parse_target(headers, is_tls=False, is_proxied=True) == Target("b", "https")


@pytest.mark.parametrize("names", [("x",), ("null",), ("https://a/",), ("https://*.a",)])
def test_origins_of_a_setting_are_checked(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse_origins(names)


@pytest.mark.parametrize("names", [("a:1",), ("https://a",), ("*.*.a",), ("a*",), ("",)])
def test_hosts_of_a_setting_are_checked(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="is not"):
        check_hosts(names)
