"""What one worker process is told at its start; every bound of it in one place."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Bounds of one session. Each says what happens at it."""

    claim_timeout_s: float = 10.0  # a call without a claim ends with OPEN_TIMEOUT
    open_timeout_s: float = 60.0  # a claimed slot without `open`: OPEN_TIMEOUT
    # No message at all: closed IDLE_TIMEOUT. Above what edges allow: pausing is not sending.
    idle_timeout_s: float = 900.0
    pause_timeout_s: float = 60.0  # a pause that names no timeout: closed PAUSE_TIMEOUT
    max_pause_s: float = 3600.0  # a pause that asks for more gets this
    max_unit_s: float = 2.0  # a longer unit: failed UNIT_TOO_LONG
    max_frame_count: int = 8  # of one unit; more: failed INVALID_FIELD
    max_frame_bytes: int = 2 * 1024 * 1024  # of each; more: failed INVALID_FIELD
    max_slice_count: int = 9  # of each, if the unit asks for more: failed INVALID_FIELD
    max_voice_s: float = 30.0  # a longer voice: INVALID_FIELD
    max_prompt_bytes: int = 32 * 1024  # a longer system prompt: INVALID_FIELD
    inbox_unit_count: int = 4  # units that wait for the device; the oldest is dropped
    outbox_message_count: int = 16  # deltas that wait for a slow client: SLOW_CLIENT
    max_chat_messages: int = 512  # more in one request: INVALID_FIELD
    max_chat_parts: int = 1024  # of all messages together; more: INVALID_FIELD
    max_chat_clips: int = 256  # sounds of all messages together; more: INVALID_FIELD
    max_chat_text_bytes: int = 512 * 1024  # of all messages together; more: INVALID_FIELD
    max_chat_media_bytes: int = 24 * 1024 * 1024  # of all messages together; more: INVALID_FIELD
    max_video_s: float = 600.0  # a longer video in a chat: INVALID_FIELD
    max_video_frame_pixels: int = 4096 * 2304  # of one picture of a video; more: INVALID_FIELD
    # Pictures and slices of all videos of one request; each is 66 tokens. More: INVALID_FIELD.
    max_video_pieces: int = 256
    video_timeout_s: float = 60.0  # until all videos of a request are decoded: INVALID_FIELD
    video_memory_bytes: int = 3 * 1024**3  # of the process that decodes one: INVALID_FIELD
    video_decoder_count: int = 4  # of the whole worker; more videos at once wait, in that time
    stall_timeout_s: float = 30.0  # a client that does not read one message: SLOW_CLIENT
    flush_timeout_s: float = 2.0  # for `closed` to go out; the slot does not wait for it


def _default_worker_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """One worker process. Raises ValueError naming a setting that cannot be."""

    checkpoint: Path
    schedulers: tuple[str, ...]  # host:port; the worker attaches to each
    listen: str = "127.0.0.1:0"
    advertise: str = ""  # host:port as edges reach us; empty means where we listen
    worker_id: str = field(default_factory=_default_worker_id)
    pool: str = ""
    slot_count: int = 4
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1  # of torch, on a CPU
    turn_row_limit: int = 2048  # of the talker; a longer turn forgets what it has spoken
    cuda_graphs: bool = True  # short steps captured and replayed, on a CUDA device
    context_token_limit: int = 8192
    stuck_after_s: float = 30.0  # one call into the model; longer: NOT_SERVING, draining
    drain_timeout_s: float = 600.0  # running sessions at shutdown; then closed SHUTDOWN
    memory_tolerance_bytes: int = 64 * 1024 * 1024  # over what was in use before any session
    limits: SessionLimits = field(default_factory=SessionLimits)

    def __post_init__(self) -> None:
        for group in (self, self.limits):
            for setting in fields(group):
                value = getattr(group, setting.name)
                if isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                if not value > 0:
                    raise ValueError(f"{setting.name} is {value}, must be above 0")
        if not self.schedulers:
            raise ValueError("schedulers is empty, must name at least one")
        host = _check_address("listen", self.listen)
        for scheduler in self.schedulers:
            _check_address("schedulers", scheduler)
        if self.advertise:
            _check_address("advertise", self.advertise)
        elif host in ("0.0.0.0", "[::]"):
            raise ValueError(f"advertise is empty, must say where edges reach {self.listen}")


def _check_address(setting: str, address: str) -> str:
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"{setting} is {address!r}, must be host:port")
    return host
