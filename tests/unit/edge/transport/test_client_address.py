"""Client addresses: forwarding headers of trusted proxies, and which clients are local."""

from __future__ import annotations

import pytest

from duplane.edge.transport.client_address import (
    ClientAddress,
    identify,
    join_headers,
    parse_networks,
)

TRUSTED = parse_networks(("127.0.0.1", "10.0.0.0/8", "fd00::/8"))
FORWARDED = "x-forwarded-for"


@pytest.mark.parametrize(
    ("connected", "headers", "address"),
    [
        ("203.0.113.9", {}, "203.0.113.9"),
        ("::ffff:203.0.113.9", {}, "203.0.113.9"),
        ("fe80::1%eth0", {}, "fe80::1"),
        ("203.0.113.9", {FORWARDED: "1.2.3.4", "x-real-ip": "1.2.3.4"}, "203.0.113.9"),
        ("10.1.1.1", {}, "10.1.1.1"),
        ("10.1.1.1", {FORWARDED: "198.51.100.1"}, "198.51.100.1"),
        ("::ffff:10.1.1.1", {FORWARDED: "198.51.100.1"}, "198.51.100.1"),
        ("fd00::1", {FORWARDED: "2001:db8::7"}, "2001:db8::7"),
        # Proxies of Azure add the port.
        ("10.1.1.1", {FORWARDED: "198.51.100.1:4711"}, "198.51.100.1"),
        ("10.1.1.1", {FORWARDED: "[2001:db8::7]:4711, 10.2.2.2:80"}, "2001:db8::7"),
        ("10.1.1.1", {FORWARDED: "198.51.100.1, nonsense:80"}, "10.1.1.1"),
        ("10.1.1.1", {FORWARDED: "1.2.3.4, 198.51.100.1, 10.2.2.2"}, "198.51.100.1"),
        ("10.1.1.1", {FORWARDED: "1.2.3.4, nonsense, 10.2.2.2"}, "10.2.2.2"),
        ("10.1.1.1", {FORWARDED: "10.3.3.3,10.2.2.2"}, "10.3.3.3"),
        ("10.1.1.1", {"x-real-ip": "198.51.100.1"}, "198.51.100.1"),
        ("10.1.1.1", {FORWARDED: "198.51.100.1", "x-real-ip": "1.2.3.4"}, "198.51.100.1"),
        ("", {FORWARDED: "198.51.100.1"}, ""),
    ],
)
def test_only_trusted_proxies_are_believed(
    connected: str, headers: dict[str, str], address: str
) -> None:
    assert identify(connected, headers, TRUSTED).address == address


@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("host", ["localhost", "LocalHost:8006", "127.0.0.1:8006", "[::1]:8006"])
def test_loopback_is_local_where_it_asks_for_this_machine(loopback: str, host: str) -> None:
    assert identify(loopback, {"host": host}, ()).is_local
    for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:8006"):
        assert identify(loopback, {"host": host, "origin": origin}, ()).is_local


@pytest.mark.parametrize(
    "name",
    [
        *(FORWARDED, "x-forwarded-host", "x-forwarded-proto", "x-forwarded", "x-real-ip"),
        *("forwarded", "via", "cf-connecting-ip", "cf-ray", "true-client-ip", "x-client-ip"),
        *("x-original-forwarded-for", "x-envoy-external-address", "x-amzn-trace-id"),
    ],
)
def test_who_forwards_for_others_is_not_local(name: str) -> None:
    assert not identify("127.0.0.1", {"host": "localhost", name: "127.0.0.1"}, ()).is_local


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": ""},
        {"host": "evil.example"},
        {"host": "localhost.evil.example:8006"},
        {"host": "192.0.2.1:8006"},
        {"host": "localhost, evil.example"},
        {"host": "localhost:8006@evil.example"},
        {"host": "[::1"},
        {"host": "localhost", "origin": "https://evil.example"},
        {"host": "localhost", "origin": "null"},
        {"host": "localhost", "origin": ""},
    ],
)
def test_a_page_from_elsewhere_in_a_browser_here_is_not_local(headers: dict[str, str]) -> None:
    assert not identify("127.0.0.1", headers, ()).is_local


def test_nobody_behind_a_proxy_is_local() -> None:
    here = {"host": "localhost"}
    assert not identify("127.0.0.1", here, TRUSTED).is_local
    assert not identify("127.0.0.1", {**here, FORWARDED: "127.0.0.1"}, TRUSTED).is_local
    assert not identify("10.0.0.1", {**here, FORWARDED: "127.0.0.1"}, TRUSTED).is_local
    assert not identify("10.0.0.1", here, ()).is_local


@pytest.mark.parametrize("name", ["proxy.example", "10.0.0.0/33", "10.0.0.1/8"])
def test_what_is_no_network_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name.partition("/")[0]):
        parse_networks((name,))


@pytest.mark.parametrize(
    ("address", "site"),
    [
        ("198.51.100.1", "198.51.100.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("", ""),
    ],
)
def test_a_client_of_ipv6_is_its_network(address: str, site: str) -> None:
    assert ClientAddress(address, is_local=False).network == site


def test_headers_that_come_twice_are_one_list() -> None:
    fields = [("X-Forwarded-For", "1.2.3.4"), ("Host", "e"), ("x-forwarded-for", "5.6.7.8")]
    headers = join_headers(fields)
    assert headers == {FORWARDED: "1.2.3.4, 5.6.7.8", "host": "e"}
    assert identify("10.1.1.1", headers, TRUSTED).address == "5.6.7.8"


@pytest.mark.parametrize(
    ("address", "short"),
    [
        ("192.0.2.77", "192.0.2.0/24"),
        ("::ffff:192.0.2.77", "192.0.2.0/24"),
        ("2001:db8:1:2:3::4", "2001:db8:1::/48"),
        ("unknown", "unknown"),
    ],
)
def test_log_lines_show_an_address_whole_or_its_network(address: str, short: str) -> None:
    client = ClientAddress(address, is_local=False)
    assert client.logged("full") == address
    assert client.logged("short") == short
