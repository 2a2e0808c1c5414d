"""The options of channels exist in gRPC, which ignores unknown names without an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from duplane.fabric import channel

OPTIONS = {
    name
    for name, _ in (
        *channel.CLIENT_OPTIONS,
        *channel.SERVER_OPTIONS,
    )
}


@pytest.fixture(scope="module")
def core() -> bytes:
    assert cygrpc.__file__
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_option_is_one_that_grpc_knows(core: bytes, option: str) -> None:
    assert option.encode() + b"\0" in core


def test_server_allows_the_pings_of_clients() -> None:
    server, client = dict(channel.SERVER_OPTIONS), dict(channel.CLIENT_OPTIONS)
    allowed_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert allowed_ms < client["grpc.keepalive_time_ms"]
