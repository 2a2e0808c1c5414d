"""Names of the session kinds for clients, operators and settings."""

from __future__ import annotations

from collections.abc import Mapping

from duplane.fabric.v1 import lease_pb2

KIND_NAMES: Mapping[lease_pb2.SessionKind, str] = {
    lease_pb2.SESSION_KIND_CHAT: "chat",
    lease_pb2.SESSION_KIND_AUDIO_DUPLEX: "audio_duplex",
    lease_pb2.SESSION_KIND_OMNI_DUPLEX: "omni_duplex",
}
KINDS_BY_NAME: Mapping[str, lease_pb2.SessionKind] = {
    name: kind for kind, name in KIND_NAMES.items()
}


def kind_name(kind: lease_pb2.SessionKind) -> str:
    """Return the name of a kind, or `unknown` for a kind that only newer versions have."""
    return KIND_NAMES.get(kind, "unknown")
