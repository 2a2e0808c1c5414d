"""Addresses of the web pages of an edge, as browsers of its own machine should name them. Pure."""

from __future__ import annotations

from duplane.edge.settings import EdgeSettings
from duplane.fabric.addresses import Address, parse_address


def talk_page(settings: EdgeSettings, address: str) -> str:
    """Return the URL of the talk page of an edge at `address`; empty if it has none."""
    if settings.pages == "off":
        return ""
    return f"{_scheme(settings)}://{_local(parse_address(address, 'address'))}/"


def operator_page(settings: EdgeSettings, address: str) -> str:
    """Return the URL of the page for operators; empty if there is none, or its port is unknown.

    The port is unknown if --operator-listen lets the system choose it.
    """
    if settings.pages == "off":
        return ""
    if not settings.operator_listen:
        return f"{talk_page(settings, address)}operator"
    listened = parse_address(settings.operator_listen, "operator_listen", min_port=0)
    if not listened.port:
        return ""
    # As the edge does: this address has TLS only where other machines can reach it.
    scheme = "http" if listened.is_loopback else _scheme(settings)
    return f"{scheme}://{_local(listened)}/operator"


def _scheme(settings: EdgeSettings) -> str:
    return "https" if settings.tls_cert or settings.tls_self_signed else "http"


def _local(listened: Address) -> Address:
    """Return the address with the name of this machine.

    Without TLS, browsers give a page the microphone only at localhost.
    """
    is_local = listened.is_loopback or listened.is_any
    return Address("localhost", listened.port) if is_local else listened
