"""Settings of one edge process: its address, its limits, and its offers to web clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge
from cyclopts import Parameter
from cyclopts.types import ExistingDirectory, ExistingFile

from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.transport.client_address import AddressForm, parse_networks
from duplane.edge.transport.origins import check_hosts, parse_origins
from duplane.fabric.addresses import parse_address
from duplane.fabric.settings import (
    LogFormat,
    LogLevel,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_bounds,
    parse_labels,
)
from duplane.fabric.tls.settings import FabricTlsSettings


@Parameter(name="*", group="Limits")
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on the data and the time that clients can take up in the edge. Times are in seconds.

    Raises ValueError that names the bound that is out of range.
    """

    # Sizes. A message that is too large closes the connection with 1009; an event that exceeds
    # another bound is refused with `invalid_payload`.
    message_bytes: NonNegativeInt = 8 * 1024 * 1024
    """Maximum number of bytes of one message. A longer message closes the connection with code
    1009."""
    openai_message_bytes: NonNegativeInt = 21 * 1024 * 1024
    """Maximum number of bytes of one message in dialects E and L: their clients may append 15 MiB
    of sound at once, in base64. A longer message closes the connection with code 1009; sound that
    exceeds --append-s is refused."""
    instructions_bytes: NonNegativeInt = 32 * 1024
    """Maximum number of bytes of a session's instructions."""
    voice_s: NonNegativeFloat = 30.0
    """Maximum number of seconds of a reference voice."""
    append_s: NonNegativeFloat = 30.0
    """Maximum number of seconds of audio in one message."""
    frame_count: NonNegativeInt = 16
    """Maximum number of pictures in one append, and in one unit. A unit with more pictures keeps
    the newest, and the client gets the number of dropped pictures."""
    picture_bytes: NonNegativeInt = 2 * 1024 * 1024
    """Maximum number of bytes of one picture."""
    picture_pixels: NonNegativeInt = 16 * 1024 * 1024
    """Maximum number of pixels of one picture, as stated in its header."""
    chat_message_bytes: NonNegativeInt = 32 * 1024 * 1024
    """Maximum number of bytes of one message of a chat. A longer message closes the connection with
    code 1009."""
    chat_message_count: NonNegativeInt = 512
    """Maximum number of messages in the history of a chat."""
    chat_part_count: NonNegativeInt = 1024
    """Maximum number of parts in all messages of a history together."""
    chat_text_bytes: NonNegativeInt = 512 * 1024
    """Maximum number of bytes of text in all messages of a history together. Workers have the same
    bound."""
    chat_audio_s: NonNegativeFloat = 300.0
    """Maximum number of seconds of audio in one part of a history."""
    chat_video_bytes: NonNegativeInt = 16 * 1024 * 1024
    """Maximum number of bytes of one video file in a history."""
    chat_media_bytes: NonNegativeInt = 24 * 1024 * 1024
    """Maximum number of bytes of pictures, videos and decoded audio in a history together, also at
    the input rate of the model. Workers have the same bound."""
    chat_token_count: NonNegativeInt = 8192
    """Maximum number of tokens that one turn of chat may ask for."""
    text_bytes: NonNegativeInt = 256
    """Maximum number of bytes of an id, of a close reason, and of the name of a voice."""
    json_depth: NonNegativeInt = 64
    """Maximum depth of nested lists and objects in one message."""
    json_value_count: NonNegativeInt = 100_000
    """Maximum number of values in one message, counted by its commas and brackets."""

    # Reference voices that operators upload. Above a bound an upload gets status 400, 413 or 507.
    ref_audio_bytes: NonNegativeInt = 16 * 1024 * 1024
    """Maximum number of bytes of one upload of a reference voice."""
    ref_audio_s: NonNegativeFloat = 30.0
    """Maximum number of seconds of an uploaded reference voice."""
    ref_audio_count: NonNegativeInt = 100
    """Maximum number of uploaded reference voices."""
    ref_audio_total_bytes: NonNegativeInt = 128 * 1024 * 1024
    """Maximum number of bytes of all uploaded reference voices together."""

    # Bounds on the units that the edge holds. Beyond a bound the oldest units are dropped, and the
    # client gets the number of dropped units. The bounds are for units of one second: a model with
    # shorter units may have more of them, which last equally long.
    early_unit_count: NonNegativeInt = 4
    """Maximum number of units kept until the conversation is ready. The newest are kept. If a unit
    of the model does not last a second, this is the number of seconds."""
    pending_unit_count: NonNegativeInt = 32
    """Maximum number of units kept while the worker does not accept any. The newest are kept. If a
    unit of the model does not last a second, this is the number of seconds."""
    units_per_s: PositiveFloat = 20.0
    """Maximum number of units per second that one session sends to its worker, with bursts of five
    times as many. Above this rate units wait, and the newest are kept. If a unit of the model does
    not last a second, this is the number of seconds of sound."""
    context_token_count: NonNegativeInt = 8192
    """Maximum number of tokens in a session's context, in dialects A and B."""
    pending_turn_count: NonNegativeInt = 4
    """Maximum number of turns of a chat that wait while one runs. A further turn is refused with
    `not_ready`."""

    read_share: PositiveFloat = 0.02
    """Share of one CPU core that the input of one client may use. If the input needs more, the edge
    reads the client's messages more slowly."""

    # Time limits of waits. The help of each says what happens when the time has passed.
    client_s: PositiveFloat = 10.0
    """Seconds that each of these may take: TLS handshake, head of a request, body of a request.
    Also seconds for which a client may read nothing, or almost nothing, while events wait. Then the
    connection is cut. A client that is silent for twice this time is pinged; if it is silent for as
    long again, the connection is cut, too."""
    scheduler_s: NonNegativeFloat = 15.0
    """Seconds to wait for a scheduler to answer; then `service_unavailable`."""
    queue_s: NonNegativeFloat = 1800.0
    """Seconds to wait in the queue; then `worker_busy`."""
    openai_queue_s: NonNegativeFloat = 20.0
    """Seconds to wait in the queue in dialects E and L, and of `POST /v1/chat/completions`; then
    `server_busy`. Their clients cannot be told their position, but they can try another server."""
    init_s: NonNegativeFloat = 60.0
    """Seconds to wait for a session's settings, then `timeout`; and for the body of a long request,
    then status 408. A client may take 15 times as long to read an HTTP answer; then the connection
    is cut."""
    open_s: NonNegativeFloat = 60.0
    """Seconds to wait for a worker to start a conversation; then `worker_connect_failed`."""
    pause_s: NonNegativeFloat = 3600.0
    """Longest pause that a client may ask for, in seconds."""
    overdue_s: PositiveFloat = 1.0
    """Seconds without an answer to a unit after which the edge prepares a slot of another worker.
    The session moves there unless the answer comes before that slot is ready. At the same moment
    the edge checks whether the first worker still answers at all; it also checks a worker that does
    not open a conversation in this time. If the check gets no answer within this many seconds, the
    worker is lost."""
    failover_s: NonNegativeFloat = 10.0
    """Seconds in which a session that has lost its worker must continue at another worker; then it
    fails. A worker that rebuilds the last past units of a session gets the same time; then the
    session stays at its present worker, if this one still answers."""
    rebuild_count: PositiveInt = 4
    """Maximum number of sessions that are rebuilt at other workers at the same time while their own
    workers still answer. Further ones wait, so that the other workers have time for their own
    sessions."""
    turn_s: NonNegativeFloat = 120.0
    """Seconds without any output of a worker during a turn of chat; then `backend_error`."""
    turn_attempt_count: NonNegativeInt = 3
    """Maximum number of slots that are tried for one turn of chat."""
    idle_s: NonNegativeFloat = 600.0
    """Seconds without audio in a running session; then `timeout`."""
    session_s: NonNegativeFloat | None = None
    """Longest duration of a session in seconds, from `queue_done`; then `timeout`. Default: set by
    its mode."""
    close_s: NonNegativeFloat = 2.0
    """Seconds that each of these may take at the end of a session: the worker's last message; a
    client that can close by itself, because its time or context is used up; and the closing
    handshake, after which the connection is cut."""

    # Bounds for clients that read more slowly than the model speaks.
    answer_bytes: NonNegativeInt = 32 * 1024 * 1024
    """Maximum number of bytes of a chat answer that is not streamed. A longer answer ends the turn
    with `inference_error`. Also the maximum number of bytes of a stream of /v1/chat/completions
    that the client has not read: if there are more, the connection is cut."""
    outbox_bytes: NonNegativeInt = 4 * 1024 * 1024
    """Maximum number of bytes of events that a client has not read. If there are more, the
    connection closes with 1008."""

    # The journals, with which sessions move to another worker (`--continuity worker`).
    journal_bytes: NonNegativeInt = 32 * 1024 * 1024
    """Maximum number of bytes of one session's journal. Above it the journal keeps fewer windows,
    then the session can no longer move."""
    journal_windows: Annotated[int, Ge(2)] = 8
    """For conversations with a context window: the number of contexts before the present one whose
    audio and pictures a journal keeps. A session that moves with fewer contexts than its model has
    layers continues almost, but not exactly, as it would have."""
    journal_total_bytes: NonNegativeInt = 4 * 1024**3
    """Maximum number of bytes of all journals together, and of the events that are kept for clients
    that may return. Above it the edge ends the session that is without a slot for the longest time;
    without such a session, a session whose journal would exceed the bound can no longer move, and
    clients that return get fewer events again."""

    # Bounds of the whole process.
    connection_count: NonNegativeInt = 4096
    """Maximum number of connections of this edge, of any kind. Further connections are cut."""
    client_connection_count: NonNegativeInt = 16
    """Maximum number of connections of one client address (IPv6: of one /64). Further connections
    are cut. Trusted proxies, clients of this machine and clients with a credential are exempt."""
    client_requests_per_s: PositiveFloat = 20.0
    """Maximum number of requests and opened WebSockets per second of one client address (IPv6: of
    one /64), with bursts of five times as many. Further ones get status 429. Clients of this
    machine and clients with a credential are exempt."""
    session_count: NonNegativeInt = 2000
    """Maximum number of sessions of this edge. Further sessions are refused with close code
    1013."""
    client_session_count: NonNegativeInt = 4
    """Maximum number of sessions of one client address (IPv6: of one /64). Further sessions are
    refused with code 1013. All clients behind a proxy that is not trusted count as one. Clients of
    this machine and clients with a credential are exempt."""
    hold_s: NonNegativeFloat = 5.0
    """Seconds for which a resumable session without a socket keeps its slot. Then the slot is given
    back; a client that returns later waits for a slot, ahead of those that came later."""
    resume_s: NonNegativeFloat = 60.0
    """Seconds after the loss of its socket in which the client of a resumable session can return;
    then the session ends. 0: no session is resumable."""
    go_away_s: NonNegativeFloat = 30.0
    """Seconds over which resumable sessions are asked to go to another edge at shutdown; at most
    half of --drain-s."""
    drain_s: NonNegativeFloat = 600.0
    """Seconds in which running sessions can end at shutdown; then they get `server_shutdown`."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def handshake_s(self) -> float:
        """Seconds for a TLS handshake, and for the head or the body of a request."""
        return self.client_s

    @property
    def send_s(self) -> float:
        """Seconds for which a client may read almost nothing while events wait."""
        return self.client_s

    @property
    def ping_s(self) -> float:
        """Seconds of silence after which a client is pinged, and after a ping cut off."""
        return 2 * self.client_s

    @property
    def http_s(self) -> float:
        """Seconds that a client may take to read an HTTP answer."""
        return 15 * self.init_s

    @property
    def end_s(self) -> float:
        """Seconds to wait for a worker's last message when a session is over."""
        return self.close_s

    @property
    def linger_s(self) -> float:
        """Seconds in which a client can close by itself when its time or context is used up."""
        return self.close_s


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """Settings of one edge process. Raises ValueError that names an unusable setting."""

    listen: str = "127.0.0.1:8006"
    """Address to serve at, as HOST:PORT; port 0 picks a free one."""
    schedulers: Annotated[Names, Parameter("--scheduler")] = ("127.0.0.1:8010",)
    """Addresses of the schedulers, as HOST:PORT, separated by commas."""
    pool: str = ""
    """Pool of workers from which sessions get slots. Default: the pool without a name."""
    needs: Annotated[Names, Parameter("--need")] = ()
    """Labels that the worker of every session must have, as KEY=VALUE, separated by commas. If a
    client's URL names a model (`?model=NAME`) that a worker has, it replaces the label `model`."""
    reuse_port: bool = False
    """Share the port with other edges on this machine; the kernel distributes connections."""
    tls_cert: ExistingFile | None = None
    """Certificate chain (PEM): serve wss:// and https:// only. The file is read again when it
    changes and on SIGHUP; open sessions continue."""
    tls_key: ExistingFile | None = None
    """Key of --tls-cert (PEM, no password)."""
    tls_self_signed: Annotated[bool, Parameter(negative=())] = False
    """Serve wss:// and https:// only, with a certificate that the edge makes itself, so that phones
    in the same network can talk to the model. Each phone first installs the CA that browsers get at
    /ca.pem. It can vouch only for this machine's names and for private networks."""
    tls_state: Path = Path("~/.local/state/duplane/tls")
    """Directory of the files of --tls-self-signed. The edge makes it, and a new certificate before
    the old one ends. Who has its keys can pass for this machine on these phones."""
    operator_listen: str = ""
    """Address at which operators are served, as HOST:PORT, for example 127.0.0.1:8007; port 0 picks
    a free one. The other port then answers 404 for what only operators may do, and its lists have
    no ids. Beyond this machine it has TLS if the edge has. Default: operators use the same port as
    clients."""
    behind_tls_proxy: bool = False
    """Serve an address that other machines can reach without TLS, because a proxy before this edge
    ends TLS. Name the proxy in --trusted-proxies."""
    trusted_proxies: Names = ()
    """Proxies whose X-Forwarded-For, X-Real-IP, X-Forwarded-Host and X-Forwarded-Proto are
    believed: addresses and networks, separated by commas."""
    allowed_origins: Names = ()
    """Origins of web pages of other hosts or ports that may use the edge, as https://HOST[:PORT],
    separated by commas; `*` means all. Default: only pages of the edge's own host and port. Clients
    that are no browsers need no origin."""
    allowed_hosts: Names = ()
    """Host names by which clients may address the edge, besides IP addresses, localhost, the name
    in --listen and the names in --tls-cert; separated by commas. `*.DOMAIN` means one more label,
    `*` means all names."""
    admin_token_file: ExistingFile | None = None
    """File with the token that operators send as `Authorization: Bearer`, to change settings or
    read recordings. Only its owner and group may be able to read it. Default: operators have keys
    (--operator-keys); if they have none, and clients need no credential, only requests for
    localhost from this machine are accepted. Set a token if a proxy runs on this machine, because
    requests of the proxy's clients can look like local requests."""
    admin_token: str = field(default="", repr=False)
    """The token itself, which other users of this machine can then read. Use --admin-token-file:
    the next release removes this flag."""
    default_voice: ExistingFile | None = None
    """Sound file that clients get at /api/default_ref_audio. Default: a synthetic voice."""
    presets: ExistingDirectory | None = None
    """Directory of MODE/*.json that clients get at /api/presets."""
    ref_audio: ExistingDirectory | None = None
    """Directory for reference voices that operators upload to /api/assets/ref_audio. Several edges
    may share it. Default: uploads are refused."""
    pages: Literal["on", "off"] = "on"
    """Whether browsers get a page at / to talk to the model, and operators one at /operator."""
    playback_delay_ms: NonNegativeInt = 200
    """Milliseconds that web clients are asked to buffer."""
    metrics_listen: str = ""
    """Address at which Prometheus reads the metrics of this process, at /metrics, as HOST:PORT;
    port 0 picks a free one. It has no TLS and no authentication, so an address that other machines
    can reach needs --metrics-public. Default: nowhere."""
    metrics_public: bool = False
    """Allow that other machines read the metrics."""
    health_listen: str = ""
    """Address at which probes ask for the health of this process, as HOST:PORT; port 0 picks a free
    one. /livez, /readyz and /startupz answer 200 or 503, /status answers with a JSON object. There
    is no TLS and no authentication, also beyond this machine, and the answers have no details.
    Default: nowhere."""
    continuity: Literal["off", "worker"] = "worker"
    """What a duplex session survives. `worker`: its worker may be lost, and the conversation
    continues at another one. The edge then keeps the session's audio in memory until the session
    ends. `off`: the session ends with its worker."""
    vad_model: ExistingFile | None = None
    """Silero's model of voice activity (ONNX, version 5 or later), which then finds the speech of
    clients whose protocol has turns. Needs the extra `vad`, and 5 ms of CPU per second of sound.
    Default: the detector of the edge, which needs 0.3 ms, or 1.3 ms in appends of 20 ms."""
    log_level: LogLevel = "INFO"
    """Least severe level to log. SIGUSR1 changes it to DEBUG while the process runs, SIGUSR2
    changes it back."""
    log_addresses: AddressForm = "full"
    """Addresses of clients in log lines: whole, or only their network (/24 of IPv4, /48 of
    IPv6)."""
    log_format: LogFormat = "text"
    """Format of log lines: text, or JSON with one object per line."""
    credentials: CredentialSettings = field(default_factory=CredentialSettings)
    fabric: FabricTlsSettings = field(default_factory=FabricTlsSettings)
    limits: Limits = field(default_factory=Limits)
    recording: RecordingSettings | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        parse_address(self.listen, "listen", min_port=0)
        for name in ("metrics_listen", "health_listen", "operator_listen"):
            if address := getattr(self, name):
                parse_address(address, name, min_port=0)
        parse_labels(self.needs, "needs")
        if not self.schedulers:
            raise ValueError("schedulers is empty, must name at least one")
        for scheduler in self.schedulers:
            parse_address(scheduler, "schedulers")
        if self.admin_token and self.admin_token_file:
            raise ValueError("admin_token and admin_token_file must not both be set")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        if self.tls_cert and self.tls_self_signed:
            raise ValueError("tls_cert and tls_self_signed must not both be set")
        lists: Sequence[tuple[str, Callable[[Sequence[str]], object], Sequence[str]]] = (
            ("trusted_proxies", parse_networks, self.trusted_proxies),
            ("allowed_origins", parse_origins, self.allowed_origins),
            ("allowed_hosts", check_hosts, self.allowed_hosts),
        )
        for name, parse, values in lists:
            try:
                parse(values)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
