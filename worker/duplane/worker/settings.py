"""Settings of one worker process, and the limits of each of its sessions."""

from __future__ import annotations

import math
import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from cyclopts import Parameter
from cyclopts.types import ExistingDirectory

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

Dtype = Literal["float32", "bfloat16", "float16"]
DtypeOrAuto = Literal["auto", Dtype]
AUTO = "auto"
GPU_LATENCY_LIMIT_S = 0.45
SlotCount = PositiveInt | Literal["auto"]
Share = Annotated[float, Gt(0), Le(1)]
GPU_CONTEXT_SHARE = 0.6
Checkpoint = Literal["scripted"] | ExistingDirectory


@Parameter(name="*", group="Limits of a session")
@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Bounds of one session. Raises ValueError that names the bound that is out of range."""

    claim_timeout_s: PositiveFloat = 10.0
    """Seconds within which a call must claim its slot; otherwise it ends with OPEN_TIMEOUT."""
    open_timeout_s: PositiveFloat = 60.0
    """Seconds from the claim within which `open` must arrive; otherwise the call ends with
    OPEN_TIMEOUT."""
    # This is longer than the idle time of the edge, so that the edge ends idle sessions first.
    idle_timeout_s: PositiveFloat = 900.0
    """Seconds without any message; then the session is closed with IDLE_TIMEOUT."""
    pause_timeout_s: PositiveFloat = 60.0
    """Seconds of a pause without a stated duration; then the session is closed with
    PAUSE_TIMEOUT."""
    max_pause_s: PositiveFloat = 3600.0
    """Longest pause in seconds; a longer pause is shortened to this."""
    max_unit_s: PositiveFloat = 2.0
    """Maximum duration of one unit, as a multiple of the model's unit. For a model with units of
    one second this is a number of seconds. A longer unit fails with UNIT_TOO_LONG."""
    frame_count: PositiveInt = 16
    """Maximum number of pictures of one unit; a unit with more fails with INVALID_FIELD."""
    max_frame_bytes: PositiveInt = 2 * 1024 * 1024
    """Maximum number of bytes of one picture; a unit with a larger picture fails with
    INVALID_FIELD."""
    max_slice_count: PositiveInt = 9
    """Maximum number of slices of one picture; a request for more fails with INVALID_FIELD."""
    max_voice_s: PositiveFloat = 30.0
    """Maximum number of seconds of a reference voice; a longer voice fails with INVALID_FIELD. The
    prompt has all of the voice; the model speaks with the voice of its first 10 s."""
    max_prompt_bytes: PositiveInt = 32 * 1024
    """Maximum number of bytes of a system prompt; a longer prompt fails with INVALID_FIELD."""
    inbox_unit_count: PositiveInt = 4
    """Maximum number of units of a session that wait for the device; of more units, the oldest is
    dropped and counted. If the model's units are shorter than a second, this is the number of
    seconds of such units."""
    outbox_message_count: PositiveInt = 16
    """Maximum number of deltas that wait for a slow client; one more ends the call with
    SLOW_CLIENT. If the model's units are shorter than a second, this is the number of seconds of
    such units."""
    max_chat_messages: PositiveInt = 512
    """Maximum number of messages of one chat request; more fail with INVALID_FIELD."""
    max_chat_parts: PositiveInt = 1024
    """Maximum number of parts in all messages of a chat request; more fail with INVALID_FIELD."""
    max_chat_clips: PositiveInt = 256
    """Maximum number of sounds in all messages of a chat request; more fail with INVALID_FIELD."""
    max_chat_text_bytes: PositiveInt = 512 * 1024
    """Maximum number of bytes of text in all messages of a chat request; more fail with
    INVALID_FIELD."""
    max_chat_media_bytes: PositiveInt = 24 * 1024 * 1024
    """Maximum number of bytes of media in all messages of a chat request; more fail with
    INVALID_FIELD."""
    max_video_s: PositiveFloat = 600.0
    """Maximum number of seconds of a video in a chat; a longer video fails with INVALID_FIELD."""
    max_video_frame_pixels: PositiveInt = 4096 * 2304
    """Maximum number of pixels of one picture of a video; more fail with INVALID_FIELD."""
    max_video_pieces: PositiveInt = 256
    """Maximum number of pictures and slices in all videos of one request; more fail with
    INVALID_FIELD. Each has 66 tokens."""
    video_timeout_s: PositiveFloat = 60.0
    """Seconds in which all videos of one request must be decoded; otherwise the request fails with
    INVALID_FIELD."""
    video_memory_bytes: PositiveInt = 3 * 1024**3
    """Maximum number of bytes of memory of the process that decodes one video; a video that needs
    more fails with INVALID_FIELD."""
    video_decoder_count: PositiveInt = 4
    """Maximum number of videos that the whole worker decodes at the same time. Further videos wait,
    and --video-timeout-s includes the wait."""
    stall_timeout_s: PositiveFloat = 30.0
    """Seconds within which a client must read one message; otherwise the call ends with
    SLOW_CLIENT."""
    flush_timeout_s: PositiveFloat = 2.0
    """Seconds that sending the message `closed` may take. The slot is cleaned meanwhile."""

    def __post_init__(self) -> None:
        check_bounds(self)


def _default_worker_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


@Parameter(name="*", group="Scripted model")
@dataclass(frozen=True, kw_only=True)
class ScriptSettings:
    """Settings of `--checkpoint scripted`. Raises ValueError that names an unusable setting."""

    scripted_unit_s: NonNegativeFloat = 0.0
    """Seconds that each batch of units takes, and each word of a chat."""
    scripted_settle_s: NonNegativeFloat = 0.0
    """Seconds that it takes to settle a batch of units."""
    scripted_rebuild_s: NonNegativeFloat = 0.0
    """Seconds that it takes to rebuild up to four past units."""
    scripted_seed: NonNegativeInt = 0
    """Seed that chooses the words."""

    def __post_init__(self) -> None:
        check_bounds(self)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of one worker process. Raises ValueError that names an unusable setting."""

    checkpoint: Checkpoint
    """Checkpoint directory in the public format; or `scripted` for a model without weights, to
    test and measure the other processes. The scripted model answers a loud unit with a tone, and
    listens in a silent unit."""
    family: str = ""
    """Python module of the model's family, for a type of checkpoint that is not part of duplane.
    `duplane.worker.models.interface` describes such a module. Default: the family that the
    checkpoint's `model_type` names."""
    schedulers: Annotated[Names, Parameter("--scheduler")] = ("127.0.0.1:8010",)
    """Addresses of the schedulers, as HOST:PORT, separated by commas. The worker attaches to one of
    them; if this scheduler does not answer, the worker attaches to the next."""
    listen: str = "127.0.0.1:0"
    """Address to serve at, as HOST:PORT; port 0 picks a free one."""
    advertise: str = ""
    """Address at which edges reach this worker, as HOST:PORT. Default: the address it serves at."""
    worker_id: Annotated[str, Parameter(show_default=False)] = field(
        default_factory=_default_worker_id
    )
    """Name of this worker. Default: host name, process and a random number."""
    pool: str = ""
    """Pool whose sessions the worker serves. Default: the unnamed pool."""
    labels: Annotated[Names, Parameter("--label")] = ()
    """Labels that sessions can need, as KEY=VALUE, separated by commas, for example zone=a. Unless
    `model` and `device` are given, they are set from the checkpoint and the device."""
    slot_count: Annotated[SlotCount, Parameter("--slots")] = 4
    """Maximum number of conversations at the same time. `auto` is as many as fit into the free
    memory of the GPU. A worker whose slots do not fit does not start, and names the number that
    does."""
    device: str = "cpu"
    """Device of the model: cpu or cuda:N."""
    engine_process: Literal["auto", "on", "off"] = AUTO
    """Run the model in a process of its own, so that no work for clients delays the thread that
    launches its kernels. `auto` does so on a GPU. If this process ends, the worker ends, too."""
    dtype: DtypeOrAuto = "auto"
    """Type of the model's numbers. `auto` is bfloat16 if the model has 20 million parameters or
    more, and if the device is a CPU with AVX512-BF16 or AMX or a GPU from compute capability 8.0
    on; else it is float32."""
    threads: NonNegativeInt = 0
    """CPU threads of the model. 0 means that the worker chooses and logs the number, from its cores
    and the size of the model."""
    lanes: Literal["auto", 1, 2] = AUTO
    """Number of launches that run on the device at the same time. With 2, the model speaks in some
    conversations while it hears and thinks in others. `auto` is 2 on a GPU and 1 on a CPU. Also
    with 2, the worker first compares both at the same time with one after the other, bit for bit:
    if they differ, it runs one, and a line of the log says so; if they do not end, it does not
    start. Two have not run on a GPU yet."""
    turn_row_limit: Annotated[int, Ge(128), Parameter("--turn-rows")] = 2048
    """Maximum number of rows (embeddings) that the talker keeps of one turn; a second of speech has
    about 35 rows. In a longer turn the talker drops its older rows."""
    cuda_graphs: bool = True
    """Capture decoders, audio encoder and vocoder as CUDA graphs. Without effect on a CPU."""
    tf32_vocoder: bool = False
    """Let the CUDA graphs of the vocoder compute in TF32: answers come earlier, and samples
    are less exact. Not measured on a GPU; `duplane bench schedule --vocoder tf32` simulates it."""
    context_token_limit: Annotated[int, Ge(64), Parameter("--context")] = 8192
    """Maximum number of tokens that one conversation can hold."""
    context_share: Share | Literal["auto"] = AUTO
    """Share of --context for which each slot has memory at any time. A longer conversation borrows
    memory while some is free. Without free memory, a conversation with a context window drops old
    units earlier, and others end as if their context was full. So with a share below 1, the answers
    in a long conversation can depend on the other ones. `auto` is 0.6 on a GPU and 1 on a CPU."""
    latency_limit_s: NonNegativeFloat | Literal["auto"] = AUTO
    """Seconds within which 99 % of the speaking units are to be answered. If the latest latencies
    let expect more with one more session, the worker withholds its free slots, and new sessions
    wait in the queue; sessions that it has are not affected. `auto` is 0.45 on a GPU and no limit
    on a CPU; 0 is no limit."""
    stuck_after_s: PositiveFloat = 30.0
    """Seconds of one call into the model after which the worker's health is NOT_SERVING."""
    hung_after_s: PositiveFloat = 120.0
    """Seconds of one call into the model after which the worker ends its sessions and itself."""
    recheck_interval_s: PositiveFloat = 10.0
    """Seconds after which a slot whose cleanup failed is cleaned and checked again."""
    copy_bytes: NonNegativeInt = 32 * 1024 * 1024
    """Maximum number of bytes of the copy of one session, which the worker keeps if the client may
    resume the session at another edge. A session with a larger copy can be resumed only at its own
    edge. 0 keeps no copies."""
    copy_total_bytes: NonNegativeInt = 4 * 1024**3
    """Maximum number of bytes of all copies. Above it, the worker deletes the copy of the session
    whose edge is lost for the longest time, and without such a session the copy that grows. 0 keeps
    no copies."""
    drain_timeout_s: PositiveFloat = 600.0
    """Seconds in which running sessions can end at shutdown; then they are closed with SHUTDOWN."""
    memory_tolerance_bytes: PositiveInt = 64 * 1024 * 1024
    """Number of bytes by which the device memory in use after a cleanup may exceed the memory in
    use before the first session. A slot whose cleanup leaves more in use is not granted until a
    later cleanup succeeds."""
    video_unconfined: bool = False
    """Decode videos of chats even if the system cannot confine their decoders, because it has no
    seccomp, or is not Linux on x86_64 or aarch64. Without this flag such a worker refuses videos:
    a file that takes over its decoder could read the files of the worker's user."""
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
    log_level: LogLevel = "INFO"
    """Least severe level to log. SIGUSR1 changes it to DEBUG while the process runs, SIGUSR2
    changes it back."""
    log_format: LogFormat = "text"
    """Format of log lines: text, or JSON with one object per line."""
    fabric: FabricTlsSettings = field(default_factory=FabricTlsSettings)
    script: ScriptSettings = field(default_factory=ScriptSettings)
    limits: SessionLimits = field(default_factory=SessionLimits)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.slot_count == AUTO and (
            self.device == "cpu" or self.family or self.checkpoint == "scripted"
        ):
            raise ValueError("slot_count is auto, must be a number without a GPU (flag --slots)")
        if not self.schedulers:
            raise ValueError("schedulers is empty, must name at least one")
        listen = parse_address(self.listen, "listen", min_port=0)
        if self.metrics_listen:
            parse_address(self.metrics_listen, "metrics_listen", min_port=0)
        if self.health_listen:
            parse_address(self.health_listen, "health_listen", min_port=0)
        for scheduler in self.schedulers:
            parse_address(scheduler, "schedulers")
        parse_labels(self.labels, "labels")
        if self.advertise:
            parse_address(self.advertise, "advertise")
        elif listen.is_any:
            raise ValueError(f"advertise is empty, must say where edges reach {self.listen}")

    @property
    def has_engine_process(self) -> bool:
        """Whether the model runs in a process of its own."""
        return self.engine_process == "on" or (self.engine_process == AUTO and self.device != "cpu")

    @property
    def given_latency_limit_s(self) -> float:
        """The limit of the latency of speech; infinity if there is none."""
        if self.latency_limit_s == AUTO:
            return math.inf if self.device == "cpu" else GPU_LATENCY_LIMIT_S
        return self.latency_limit_s or math.inf

    @property
    def given_context_share(self) -> float:
        """The share of a context for which each slot has memory at any time."""
        if self.context_share == AUTO:
            return 1.0 if self.device == "cpu" else GPU_CONTEXT_SHARE
        return self.context_share

    @property
    def given_slot_count(self) -> int:
        """The number of slots. Raises ValueError if it is `auto`."""
        if self.slot_count == AUTO:
            raise ValueError("slot_count is auto, must be a number")
        return self.slot_count
