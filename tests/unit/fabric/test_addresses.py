"""Addresses: which are valid, how errors name them, and which belong to this machine."""

from __future__ import annotations

import asyncio
import socket

import pytest

from duplane.fabric.addresses import Address, is_loopback, parse_address, resolve


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8010", Address("127.0.0.1", 8010)),
        ("scheduler.example:1", Address("scheduler.example", 1)),
        ("[::1]:65535", Address("::1", 65535)),
        ("[fe80::1%eth0]:80", Address("fe80::1%eth0", 80)),
    ],
)
def test_address_is_parsed_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "foo",
        "foo:",
        ":80",
        "foo:0",
        "foo:65536",
        "foo:-1",
        "::1:80",
        "a b:80",
        "foo:8\n",
        "http://foo:80",
        "foo:٣",
    ],
)
def test_text_that_is_not_an_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"^scheduler is .*, must be host:port$"):
        parse_address(text, "scheduler")


def test_port_0_is_accepted_only_on_request() -> None:
    assert parse_address("127.0.0.1:0", min_port=0).port == 0


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LocalHost", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_loopback_hosts_are_detected(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("0.0.0.0:1", True), ("[::]:1", True), ("127.0.0.1:1", False)]
)
def test_addresses_of_every_interface_are_detected(text: str, expected: bool) -> None:
    assert parse_address(text).is_any == expected


async def test_a_name_stands_for_each_of_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    records = {"schedulers": ("10.0.0.1", "10.0.0.2", "fd00::3")}

    async def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host not in records:
            raise socket.gaierror
        return [(0, 0, 0, "", (ip, port)) for ip in records[host]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    found = await resolve(["10.0.0.2:1", "schedulers:1", "unknown:2", "[::1]:3"])
    assert found == ["10.0.0.2:1", "10.0.0.1:1", "[fd00::3]:1", "unknown:2", "[::1]:3"]
