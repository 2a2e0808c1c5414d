"""Settings of one edge process: its address, its limits and what it offers to web clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import ExistingDirectory, ExistingFile

from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.transport.client_address import parse_networks
from duplane.fabric.addresses import parse_address
from duplane.fabric.settings import (
    LogFormat,
    LogLevel,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    check_bounds,
    parse_labels,
)


@Parameter(name="*", group="Limits")
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what clients can make the edge hold, and for how long. Times in seconds.

    Raises ValueError naming the bound that is out of range.
    """

    # Sizes. A larger message closes the connection with 1009; the others are `invalid_payload`.
    message_bytes: NonNegativeInt = 8 * 1024 * 1024
    """Bytes of one message; a longer one closes the connection with 1009."""
    instructions_bytes: NonNegativeInt = 32 * 1024
    """Bytes of a session's instructions."""
    voice_s: NonNegativeFloat = 30.0
    """Seconds of a reference voice."""
    append_s: NonNegativeFloat = 30.0
    """Seconds of audio in one message."""
    frame_count: NonNegativeInt = 16
    """Pictures in one append, and in one unit. A unit with more keeps the newest; the client gets
    the number of dropped pictures."""
    picture_bytes: NonNegativeInt = 2 * 1024 * 1024
    """Bytes of one picture."""
    picture_pixels: NonNegativeInt = 16 * 1024 * 1024
    """Pixels of one picture, as its header states them."""
    chat_message_bytes: NonNegativeInt = 32 * 1024 * 1024
    """Bytes of one message of a chat; a longer one closes the connection with 1009."""
    chat_message_count: NonNegativeInt = 512
    """Messages in the history of a chat."""
    chat_part_count: NonNegativeInt = 1024
    """Parts of all messages of a history together."""
    chat_text_bytes: NonNegativeInt = 512 * 1024
    """Bytes of text of all messages of a history together. Workers have the same bound."""
    chat_audio_s: NonNegativeFloat = 300.0
    """Seconds of audio in one part of a history."""
    chat_video_bytes: NonNegativeInt = 16 * 1024 * 1024
    """Bytes of one video file in a history."""
    chat_media_bytes: NonNegativeInt = 24 * 1024 * 1024
    """Bytes of pictures, videos and decoded audio of a history together. Workers have the same
    bound."""
    chat_token_count: NonNegativeInt = 8192
    """Tokens that one turn of chat may ask for."""
    text_bytes: NonNegativeInt = 256
    """Bytes of an id, of a reason that is echoed, and of the name of a voice."""
    json_depth: NonNegativeInt = 64
    """Nesting of lists and objects in one message."""
    json_value_count: NonNegativeInt = 100_000
    """Values in one message, counted by its commas and brackets."""

    # Reference voices that operators upload. Above a bound: 400, 413 or 507.
    ref_audio_bytes: NonNegativeInt = 16 * 1024 * 1024
    """Bytes of one upload of a reference voice."""
    ref_audio_s: NonNegativeFloat = 30.0
    """Seconds of an uploaded reference voice."""
    ref_audio_count: NonNegativeInt = 100
    """Uploaded reference voices."""
    ref_audio_total_bytes: NonNegativeInt = 128 * 1024 * 1024
    """Bytes of all uploaded reference voices together."""

    # Units that the edge holds. The newest are kept; those dropped are counted and reported.
    early_unit_count: NonNegativeInt = 4
    """Units kept until the conversation is ready; the newest are kept."""
    pending_unit_count: NonNegativeInt = 32
    """Units kept while the worker does not accept any; the newest are kept."""
    units_per_s: PositiveFloat = 20.0
    """Units a second that one session sends to its worker, with bursts of five seconds' worth.
    Above this rate units wait, and the newest are kept."""
    context_token_count: NonNegativeInt = 8192
    """Tokens of a session's context, in dialects A and B."""
    pending_turn_count: NonNegativeInt = 4
    """Turns of a chat that wait while one runs; one more is refused with `not_ready`."""

    read_share: PositiveFloat = 0.02
    """Share of one CPU core that the input of one client may use; above it the edge reads the
    client more slowly."""

    # Waits. The comment or the help names the outcome when the time is over.
    handshake_s: NonNegativeFloat = 10.0
    """Seconds for the TLS handshake, then for the head of a request, then for its body."""
    scheduler_s: NonNegativeFloat = 15.0
    """Seconds to wait for a scheduler to answer; then `service_unavailable`."""
    queue_s: NonNegativeFloat = 1800.0
    """Seconds to wait in the queue; then `worker_busy`."""
    init_s: NonNegativeFloat = 60.0
    """Seconds to wait for a session's settings, and for the body of a long request; then
    `timeout`, or 408."""
    open_s: NonNegativeFloat = 60.0
    """Seconds to wait for a worker to start a conversation; then `worker_connect_failed`."""
    pause_s: NonNegativeFloat = 3600.0
    """Seconds of the longest pause that a client may ask for."""
    turn_s: NonNegativeFloat = 120.0
    """Seconds without any output of a worker during a turn of chat; then `backend_error`."""
    turn_attempt_count: NonNegativeInt = 3
    """Slots that are tried for one turn of chat."""
    idle_s: NonNegativeFloat = 600.0
    """Seconds without audio in a running session; then `timeout`."""
    session_s: NonNegativeFloat | None = None
    """Seconds of a whole session, from `queue_done`; then `timeout`. Default: set by its mode."""
    end_s: NonNegativeFloat = 2.0
    """Seconds to wait for a worker's last message when a session is over."""

    # Clients that read more slowly than the model speaks. Other sessions are not affected.
    answer_bytes: NonNegativeInt = 32 * 1024 * 1024
    """Bytes of a chat answer that is not streamed; a larger one ends the turn with
    `inference_error`."""
    outbox_bytes: NonNegativeInt = 4 * 1024 * 1024
    """Bytes of events that a client has not read; above it the connection closes with 1008."""
    send_s: NonNegativeFloat = 10.0
    """Seconds in which a client reads nothing, or almost nothing, of what waits for it; then the
    connection is cut."""
    linger_s: NonNegativeFloat = 2.0
    """Seconds for a client to close by itself when its time or context is used up."""
    close_s: NonNegativeFloat = 2.0
    """Seconds for the closing handshake; then the connection is cut."""
    ping_s: PositiveFloat = 20.0
    """Seconds of silence until a client is pinged, then to wait for the answer; then the
    connection is cut."""
    http_s: NonNegativeFloat = 900.0
    """Seconds for a client to read a long HTTP answer to its end; then the connection is cut."""

    # The whole process.
    connection_count: NonNegativeInt = 4096
    """Connections of this edge, of any kind; more are cut."""
    client_connection_count: NonNegativeInt = 2048
    """Connections of one client address (IPv6: of one /64); more are cut. Trusted proxies are
    exempt."""
    session_count: NonNegativeInt = 2000
    """Sessions of this edge; more are refused with 1013."""
    client_session_count: NonNegativeInt = 2000
    """Sessions of one client address (IPv6: of one /64); more are refused with 1013. All clients
    behind a proxy that is not trusted count as one."""
    drain_s: NonNegativeFloat = 600.0
    """Seconds for running sessions to end at shutdown; then `server_shutdown`."""

    def __post_init__(self) -> None:
        check_bounds(self)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """Settings of one edge process. Raises ValueError naming the setting that cannot be used."""

    listen: str = "127.0.0.1:8006"
    """Address to serve at, as HOST:PORT; port 0 picks a free one."""
    schedulers: Annotated[Names, Parameter("--scheduler")] = ("127.0.0.1:8010",)
    """Addresses of the schedulers, as HOST:PORT, separated by commas."""
    pool: str = ""
    """Queue in which sessions wait. Default: the unnamed one."""
    needs: Annotated[Names, Parameter("--need")] = ()
    """Labels that the worker of every session must have, as KEY=VALUE, separated by commas. A
    client adds or replaces `model` with the query parameter of that name."""
    reuse_port: bool = False
    """Share the port with other edges on this machine; the kernel distributes connections."""
    tls_cert: ExistingFile | None = None
    """Certificate chain (PEM): serve wss:// and https:// only. The file is read again when it
    changes and on SIGHUP; sessions go on."""
    tls_key: ExistingFile | None = None
    """Key of --tls-cert (PEM, no password)."""
    trusted_proxies: Names = ()
    """Proxies whose X-Forwarded-For and X-Real-IP are believed: addresses and networks, separated
    by commas."""
    admin_token: str = field(default="", repr=False)
    """Token that operators send as `Authorization: Bearer`, to change settings or read recordings.
    Default: only requests for localhost from this machine are accepted. Set it where a proxy runs
    on this machine, because requests of its clients can look the same."""
    default_voice: ExistingFile | None = None
    """Sound file that clients get at /api/default_ref_audio. Default: a synthetic voice."""
    presets: ExistingDirectory | None = None
    """Directory of MODE/*.json that clients get at /api/presets."""
    ref_audio: ExistingDirectory | None = None
    """Directory for reference voices that operators upload to /api/assets/ref_audio. Several edges
    may share it. Default: uploads are refused."""
    playback_delay_ms: NonNegativeInt = 200
    """Milliseconds that web clients are asked to buffer."""
    metrics_listen: str = ""
    """Address at which Prometheus reads the metrics of this process, at /metrics, as HOST:PORT;
    port 0 picks a free one. It has no TLS and no authentication. Default: nowhere."""
    log_level: LogLevel = "INFO"
    """Least severe level to log. SIGUSR1 changes it to DEBUG while the process runs, SIGUSR2
    changes it back."""
    log_format: LogFormat = "text"
    """Format of log lines: text, or JSON with one object a line."""
    limits: Limits = field(default_factory=Limits)
    recording: RecordingSettings | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        parse_address(self.listen, "listen", min_port=0)
        if self.metrics_listen:
            parse_address(self.metrics_listen, "metrics_listen", min_port=0)
        parse_labels(self.needs, "needs")
        if not self.schedulers:
            raise ValueError("schedulers is empty, must name at least one")
        for scheduler in self.schedulers:
            parse_address(scheduler, "schedulers")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        try:
            parse_networks(self.trusted_proxies)
        except ValueError as error:
            raise ValueError(f"trusted_proxies: {error}") from None
