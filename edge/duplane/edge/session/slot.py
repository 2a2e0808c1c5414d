"""A slot of a worker, as a session sees it. Pure: the runner has the stream to the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from duplane.fabric.v1 import lease_pb2, session_pb2


@dataclass(slots=True, eq=False)
class Slot:
    """A slot of a session, from the request for it until its call has ended."""

    granted: lease_pb2.Granted = field(default_factory=lease_pb2.Granted)  # empty until the claim
    owed_s: float | None = None  # monotonic: since when the worker owes an answer
    is_draining: bool = False  # the worker has announced that it ends its sessions
    accepts_audio_exponent: bool = False  # as the worker has said in `opened`
    accepts_audio_int16: bool = False  # the same
    accepts_speech_requests: bool = False  # the same
    accepts_keep: bool = False  # the same
    is_kept: bool = False  # the worker was asked to keep a copy of the session

    def opened(self, opened: session_pb2.Opened) -> None:
        """Note what the worker accepts."""
        self.accepts_audio_exponent = opened.accepts_audio_exponent
        self.accepts_audio_int16 = opened.accepts_audio_int16
        self.accepts_speech_requests = opened.accepts_speech_requests
        self.accepts_keep = opened.accepts_keep
