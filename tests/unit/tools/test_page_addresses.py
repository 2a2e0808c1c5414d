"""The addresses of the pages that `duplane up` prints."""

from __future__ import annotations

from typing import Any

import pytest

from duplane.edge.settings import EdgeSettings
from duplane.tools.up.page_addresses import operator_page, talk_page


@pytest.mark.parametrize(
    ("settings", "address", "talk", "operator"),
    [
        ({}, "127.0.0.1:8006", "http://localhost:8006/", "http://localhost:8006/operator"),
        ({}, "0.0.0.0:80", "http://localhost:80/", "http://localhost:80/operator"),
        ({}, "192.0.2.1:80", "http://192.0.2.1:80/", "http://192.0.2.1:80/operator"),
        ({}, "[::1]:80", "http://localhost:80/", "http://localhost:80/operator"),
        (
            {"tls_self_signed": True},
            "0.0.0.0:80",
            "https://localhost:80/",
            "https://localhost:80/operator",
        ),
        ({"pages": "off"}, "127.0.0.1:80", "", ""),
        ({"pages": "off", "operator_listen": "127.0.0.1:81"}, "127.0.0.1:80", "", ""),
        (
            {"operator_listen": "127.0.0.1:81", "tls_self_signed": True},
            "0.0.0.0:80",
            "https://localhost:80/",
            "http://localhost:81/operator",  # this address has no TLS
        ),
        (
            {"operator_listen": "192.0.2.1:81", "tls_self_signed": True},
            "0.0.0.0:80",
            "https://localhost:80/",
            "https://192.0.2.1:81/operator",
        ),
        ({"operator_listen": "127.0.0.1:0"}, "127.0.0.1:80", "http://localhost:80/", ""),
    ],
)
def test_pages_are_named_as_browsers_of_this_machine_reach_them(
    settings: dict[str, Any], address: str, talk: str, operator: str
) -> None:
    edge = EdgeSettings(**settings)
    assert talk_page(edge, address) == talk
    assert operator_page(edge, address) == operator
