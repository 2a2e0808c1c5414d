"""The credentials of a client of etcd."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """TLS and the user name of a client. Without `tls`, connections are not encrypted."""

    tls: grpc.ChannelCredentials | None = None
    user: str = ""
    password: str = field(default="", repr=False)
