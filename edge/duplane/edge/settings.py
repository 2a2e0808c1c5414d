"""Every bound of the edge, and where it listens."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from duplane.edge.peers import parse_networks
from duplane.edge.recording.settings import RecordingSettings


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may make the edge hold, and for how long. Times in seconds.

    Raises ValueError naming a bound that cannot be.
    """

    # Size of things. A message above it closes with 1009, the rest are `invalid_payload`.
    message_bytes: int = 8 * 1024 * 1024
    instructions_bytes: int = 32 * 1024
    voice_s: float = 30.0
    append_s: float = 30.0
    frame_count: int = 4  # in one append; of those gathered for one unit the newest win
    picture_bytes: int = 2 * 1024 * 1024
    picture_pixels: int = 16 * 1024 * 1024  # once decoded, as its header says
    chat_message_bytes: int = 32 * 1024 * 1024  # as message_bytes, where histories are sent
    chat_message_count: int = 512  # in one history
    chat_part_count: int = 1024  # in all of its messages
    chat_text_bytes: int = 512 * 1024  # of all messages; as workers have it
    chat_audio_s: float = 300.0  # in one part
    chat_video_bytes: int = 16 * 1024 * 1024
    chat_media_bytes: int = 24 * 1024 * 1024  # decoded, of all messages; as workers have it
    chat_token_count: int = 8192  # that one turn may ask for
    text_bytes: int = 256  # ids and reasons that are echoed, names of voices
    json_depth: int = 64  # lists and objects within one another
    json_value_count: int = 100_000  # in one message, by its commas and brackets

    # Of the reference voices that operators upload; above them: 400, 413 or 507.
    ref_audio_bytes: int = 16 * 1024 * 1024  # of one request
    ref_audio_s: float = 30.0  # as voice_s: what is kept can be used
    ref_audio_count: int = 100
    ref_audio_total_bytes: int = 128 * 1024 * 1024

    # Units kept here. The newest win; what is dropped is counted.
    early_unit_count: int = 4  # before the conversation is ready
    pending_unit_count: int = 32  # while the worker's host does not take them
    units_per_s: float = 20.0  # to the worker, lasting; five seconds' worth at once
    context_token_count: int = 8192
    pending_turn_count: int = 4  # of chat, while one runs; above it: not_ready

    # Of one core, for what one client sends, lasting; above it is read more slowly.
    read_share: float = 0.02

    # Waits.
    handshake_s: float = 10.0  # for TLS, then for a request's head: cut; for its body: 408
    scheduler_s: float = 15.0  # for a place or a claimed slot to begin with: service_unavailable
    queue_s: float = 1800.0  # for a slot: worker_busy
    queue_update_s: float = 3.0  # between two updates of an unchanged place
    init_s: float = 60.0  # from queue_done to valid settings: timeout; for a long body: 408
    open_s: float = 60.0  # from settings to `session.created`: worker_connect_failed
    pause_s: float = 3600.0  # the longest pause a client may ask for
    turn_s: float = 120.0  # in which a worker says nothing of a turn of chat: backend_error
    turn_attempt_count: int = 3  # grants whose worker is gone, before a turn is given up
    idle_s: float = 600.0  # without audio (no audio is how clients pause): timeout
    session_s: float | None = None  # from queue_done; None means the mode's own: timeout
    end_s: float = 2.0  # for the worker's last word once a session is over: cancelled

    # A client that reads slower than the model speaks is closed; others never feel it.
    answer_bytes: int = 32 * 1024 * 1024  # of a chat, not streamed; above it: inference_error
    outbox_bytes: int = 4 * 1024 * 1024  # above it: 1008; of pongs: read no further
    send_s: float = 10.0  # in which nothing, or next to nothing, is read: cut
    linger_s: float = 2.0  # for a client to close by itself when its time or context is over
    close_s: float = 2.0  # for the closing handshake: cut
    ping_s: float = 20.0  # of silence, then for a pong; for anything to be acknowledged: cut
    http_s: float = 900.0  # for a long HTTP answer to be read to its end: cut

    # Of the whole process. Connections are of any kind, from their first byte; above: cut.
    connection_count: int = 4096
    client_connection_count: int = 2048  # per client address, proxies that are trusted excepted
    session_count: int = 1000  # above it: service_unavailable
    client_session_count: int = 1000  # per client address (IPv6: /64): service_unavailable
    drain_s: float = 600.0  # for running sessions, once draining: server_shutdown

    def __post_init__(self) -> None:
        for bound in fields(self):
            value = getattr(self, bound.name)
            if value is not None and not value >= 0:  # nor NaN
                raise ValueError(f"{bound.name} is {value}, must not be below 0")
        for name in ("units_per_s", "read_share", "ping_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0")


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """One edge process. Raises ValueError naming a setting that cannot be."""

    listen: str = "127.0.0.1:8006"
    schedulers: tuple[str, ...] = ("127.0.0.1:8010",)
    pool: str = ""
    reuse_port: bool = False  # several edges on one port, shared by the kernel
    # PEM files; with them the port serves wss:// and https:// and nothing plain.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    # Proxies whose word on their clients' addresses is believed: addresses and networks.
    trusted_proxies: tuple[str, ...] = ()
    # What operators send as `Authorization: Bearer`; empty: only those on this machine may act.
    admin_token: str = field(default="", repr=False)
    default_voice: Path | None = None  # a sound file, for `/api/default_ref_audio`
    presets: Path | None = None  # a directory, see `assets.py`
    ref_audio: Path | None = None  # a directory, for voices that operators upload
    playback_delay_ms: int = 200  # what web clients are told to buffer
    limits: Limits = field(default_factory=Limits)
    recording: RecordingSettings | None = None

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        if not (host and port.isdecimal() and int(port) < 65536):
            raise ValueError(f"listen is {self.listen!r}, must be host:port")
        if not all(self.schedulers):
            raise ValueError("schedulers is empty, must name at least one")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        try:
            parse_networks(self.trusted_proxies)
        except ValueError as error:
            raise ValueError(f"trusted_proxies: {error}") from None
