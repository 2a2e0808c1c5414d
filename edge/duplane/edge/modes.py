"""The modes that a client can choose by its URL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from duplane.fabric.v1 import lease_pb2

DEFAULT_MODE = "video"
# Video is the mode of a client that names none, so this text says how to choose another one.
_UNSERVED_VIDEO = (
    "no worker serves video sessions: the model cannot see. Ask for audio (?mode=audio, or a"
    " session id that begins with adx_), or start a worker with a model that can see"
)


@dataclass(frozen=True, slots=True)
class Mode:
    """One mode: the kind of its sessions, and their time limit from `queue_done`."""

    kind: lease_pb2.SessionKind
    request_type: str  # the kind's name in the public protocol
    session_s: float
    takes_frames: bool = False  # if false, frames are ignored
    unserved: str = "no worker serves this mode"  # what the client reads if that is so


MODES: Mapping[str, Mode] = {
    "video": Mode(
        lease_pb2.SESSION_KIND_OMNI_DUPLEX,
        "omni_duplex",
        session_s=300.0,
        takes_frames=True,
        unserved=_UNSERVED_VIDEO,
    ),
    "audio": Mode(lease_pb2.SESSION_KIND_AUDIO_DUPLEX, "audio_duplex", session_s=600.0),
}

# OpenAI's sessions of these protocols last as long. The context has a window, so it does not fill
# up.
LIVE_MODE = replace(MODES["audio"], session_s=7200.0)
REALTIME_MODE = replace(MODES["audio"], session_s=3600.0)

# The same session as long as it has turns of chat. For the switches of the apps, it counts as full
# duplex, which it may become.
REALTIME_CHAT_MODE = replace(REALTIME_MODE, kind=lease_pb2.SESSION_KIND_CHAT)

CHAT_MODE = Mode(lease_pb2.SESSION_KIND_CHAT, "chat", session_s=math.inf)

# A half duplex session is a chat whose turns begin when the client has spoken.
HALF_DUPLEX_MODE = replace(CHAT_MODE, request_type="half_duplex_audio")

# /ws/duplex has the same modes, chosen by the session's id, without a time limit.
DUPLEX_MODES: Mapping[str, Mode] = {
    name: replace(mode, session_s=math.inf) for name, mode in MODES.items()
}
