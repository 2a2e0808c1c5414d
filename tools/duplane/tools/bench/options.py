"""Flags of the verbs of `duplane bench`."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Le
from cyclopts import Parameter, Token
from cyclopts.types import ExistingDirectory, ExistingFile

from duplane.fabric.settings import (
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_bounds,
    parse_labels,
)
from duplane.scheduler.store.url import check_url
from duplane.tools.bench.load.plan import DIALECTS, Phases
from duplane.worker.settings import Checkpoint, DtypeOrAuto


def _counts(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    parts = [part.strip() for token in tokens for part in token.value.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError("must be numbers like 1,2,4")
    return tuple(int(part) for part in parts)


Counts = Annotated[tuple[int, ...], Parameter(converter=_counts, n_tokens=1, negative=())]
"""Numbers above 0, separated by commas."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FabricBench:
    """Flags of `duplane bench fabric`. Raises ValueError naming the setting."""

    sessions: Counts = (1, 10)
    """Numbers of concurrent sessions, separated by commas; each gives one row. A session sends one
    second of sound per second."""
    dialects: Annotated[Names, Parameter("--dialect")] = ()
    """Protocols, separated by commas; each gives rows of its own. A, B, C, E and L run over
    WebSocket; `grpc` needs no edge. (D and H are chats and have no units.) No event of E answers a
    unit in which the model listens, so E needs a model that speaks in each, like the scripted one.
    Default: B, or the protocol of the URL."""
    phases: Phases = "spread"
    """When sessions send: `spread` evenly over each second, or all at the same time (`step`)."""
    seconds: Annotated[float, Ge(1)] = 10.0
    """Measured seconds of each row."""
    warm_up_s: NonNegativeFloat = 3.0
    """Seconds before the measurement, in which the sessions already send."""
    session_s: Annotated[float, Ge(1)] = 240.0
    """Seconds after which a session ends and a new one replaces it."""
    open_timeout_s: PositiveFloat = 30.0
    """Time limit to open a session, including its wait for a slot. A session that takes longer
    counts as broken."""
    generators: PositiveInt = 1
    """Number of processes that generate the load; they share the sessions."""
    url: str = ""
    """Server to measure: ws://HOST:PORT or wss:// of an edge, or grpc://HOST:PORT of a scheduler.
    Default: the command starts its own fabric for each row."""
    ca: ExistingFile | None = None
    """Certificates (PEM) to trust with wss://, in place of the system's."""
    processes: Annotated[Names, Parameter("--process")] = ()
    """Processes of the server on this machine whose CPU time and memory are measured, as NAME=ID,
    separated by commas: edge=4711. Processes of the command's own fabric are always measured."""
    checkpoint: Literal["random"] | Checkpoint = "scripted"
    """Model of the command's own fabric, as for `duplane up`."""
    workers: PositiveInt = 1
    """Number of workers of the command's own fabric. They have slots for all sessions."""
    kill_every_s: NonNegativeFloat = 0.0
    """Kill a worker of the command's own fabric after every so many seconds, each in turn; it is
    started again. The other workers have slots for all sessions, so no session may be lost.
    Default: no worker is killed."""
    restart_every_s: NonNegativeFloat = 0.0
    """Restart a worker of the command's own fabric after every so many seconds, each in turn: it
    gets SIGTERM, drains, ends and is started again. Default: no worker is restarted."""
    resumable: Annotated[bool, Parameter(negative=())] = False
    """The sessions are resumable, but no connection is lost. Compare the CPU time of the edge and
    of the worker with a run without this flag. Only in A and B."""
    drop_sockets_every_s: NonNegativeFloat = 0.0
    """Make resumable calls in B, and drop the socket of each call once in so many seconds: every
    second one with RST, the others fall silent. Another table is printed then. Default: no socket
    is dropped."""
    kill_edge_every_s: NonNegativeFloat = 0.0
    """Make resumable calls in B over two edges, and kill one of them after every so many seconds;
    it is started again. Default: no edge is killed."""
    restart_edges_every_s: NonNegativeFloat = 0.0
    """Make resumable calls in B over two edges, and restart one of them after every so many
    seconds, each in turn: it gets SIGTERM, and new connections go to the other one. Default: no
    edge is restarted."""
    return_s: Annotated[str, Parameter(show_default=False)] = "0.25:4"
    """Seconds after which the clients of lost connections return, as LOW:HIGH."""
    edge_cpu: NonNegativeInt | None = None
    """Core for the edge of the command's own fabric; all other processes use other cores. Linux
    only."""
    telemetry: Annotated[bool, Parameter(negative=())] = False
    """The command's own fabric exports spans to a receiver that discards them."""
    tls: Annotated[bool, Parameter(negative=())] = False
    """The processes of the command's own fabric use mutual TLS, as with --fabric-tls. The clients
    of the edge do not."""
    operator_pages: Annotated[NonNegativeInt, Le(8)] = 0
    """Number of pages of operators that are open beside the sessions: each reads the stream of
    events of the command's own edge. Compare the CPU time of the edge with a run without them."""
    find_capacity: Annotated[bool, Parameter(negative=())] = False
    """Search the largest number of sessions whose row holds. The search begins with the first of
    --sessions and doubles the number until a row does not hold; then it halves the interval. A
    number whose row does not hold is tried twice."""
    max_sessions: PositiveInt = 1000
    """Largest number that the search tries."""
    limit_ms: PositiveFloat = 100.0
    """A row does not hold if the p99 of the added time is above these milliseconds."""
    max_lateness_ms: PositiveFloat = 20.0
    """A row is invalid if the generators are later than these milliseconds (p99): then they are the
    bottleneck."""
    json: Path | None = None
    """JSON file for all figures; docs/load.md describes it."""

    def __post_init__(self) -> None:
        check_bounds(self)
        scheme = urlsplit(self.url).scheme
        if self.url and scheme not in ("ws", "wss", "grpc"):
            raise ValueError(f"url is {self.url!r}, must begin with ws://, wss:// or grpc://")
        for dialect in self.dialects:
            if dialect not in DIALECTS:
                names = ", ".join(DIALECTS)
                raise ValueError(f"dialect is {dialect!r}, must be one of {names}")
            if self.url and (dialect == "grpc") != (scheme == "grpc"):
                raise ValueError(f"dialect is {dialect!r}, which url {self.url!r} does not serve")
        if self.processes and not self.url:
            raise ValueError("process: needs url; without it all processes are measured")
        if self.url and (self.edge_cpu is not None or self.telemetry or self.tls):
            raise ValueError("edge_cpu, telemetry and tls cannot be used with url")
        if self.tls and "grpc" in self.dialects:
            raise ValueError("tls cannot be used with the dialect grpc")
        if self.operator_pages and self.url:
            raise ValueError("operator_pages: needs a fabric of the command")
        self._check_stops()
        self._check_returns()
        if not all(pid.isdecimal() for pid in parse_labels(self.processes, "process").values()):
            raise ValueError("process: must be NAME=ID")

    @property
    def protocols(self) -> Sequence[str]:
        """The protocols to measure."""
        return self.dialects or ("grpc" if self.url.startswith("grpc:") else "B",)

    def _check_stops(self) -> None:
        for name, every_s in (
            ("kill_every_s", self.kill_every_s),
            ("restart_every_s", self.restart_every_s),
        ):
            if every_s and (self.url or self.workers < 2):
                raise ValueError(f"{name}: needs a fabric of the command with at least 2 workers")
        if self.kill_every_s and self.restart_every_s:
            raise ValueError("kill_every_s and restart_every_s cannot be used together")
        every_s, _ = self.stop_plan
        least = math.ceil(2 * every_s)  # for one stop; a row has a whole number of seconds
        if self.seconds < least:
            name = "restart_every_s" if self.restart_every_s else "kill_every_s"
            raise ValueError(
                f"seconds is {self.seconds:g}, must not be below {least}, twice {name}"
            )

    def _check_returns(self) -> None:
        low, high = self.return_range_s
        if self.resumable and not {"A", "B"}.issuperset(self.protocols):
            raise ValueError("resumable: needs dialect A or B")
        if not 0 <= low <= high < math.inf:
            raise ValueError(f"return_s is {self.return_s!r}, must be LOW:HIGH in seconds")
        if not self.makes_returns:
            return
        if self.url or self.dialects not in ((), ("B",)):
            raise ValueError(f"{self._returns_name}: needs a fabric of the command, and dialect B")
        if self.stop_plan[0] or self.find_capacity or self.tls or self.telemetry:
            others = "kill_every_s, restart_every_s, find_capacity, tls and telemetry"
            raise ValueError(f"{self._returns_name}: cannot be used with {others}")

    @property
    def _returns_name(self) -> str:
        if self.drop_sockets_every_s:
            return "drop_sockets_every_s"
        return "kill_edge_every_s" if self.kill_edge_every_s else "restart_edges_every_s"

    @property
    def makes_returns(self) -> bool:
        """Whether the calls are resumable, and lose their connections."""
        every_s = (self.drop_sockets_every_s, self.kill_edge_every_s, self.restart_edges_every_s)
        return any(every_s)

    @property
    def edge_count(self) -> int:
        """The number of edges of the command's own fabric."""
        return 2 if self.kill_edge_every_s or self.restart_edges_every_s else 1

    @property
    def return_range_s(self) -> tuple[float, float]:
        """The shortest and the longest time until a client returns. Raises ValueError."""
        low, separator, high = self.return_s.partition(":")
        try:
            return float(low), float(high if separator else low)
        except ValueError:
            raise ValueError(f"return_s is {self.return_s!r}, must be LOW:HIGH") from None

    @property
    def stop_plan(self) -> tuple[float, signal.Signals]:
        """The seconds between two stops of workers (0: none), and the signal of a stop."""
        if self.restart_every_s:
            return self.restart_every_s, signal.SIGTERM
        return self.kill_every_s, signal.SIGKILL

    @property
    def watched(self) -> Mapping[str, Sequence[int]]:
        """The processes of the server, by name."""
        return {name: [int(pid)] for name, pid in parse_labels(self.processes, "process").items()}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Weights:
    """Flags that choose the model of a measurement."""

    checkpoint: ExistingDirectory | None = None
    """Checkpoint directory. Default: random weights."""
    like: str = "minicpm-o-4.5"
    """Released model whose dimensions the random weights have."""
    scale: float = 0.1
    """Factor of all widths and numbers of layers of random weights; 1 is full size."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LaunchBench(Weights):
    """Flags of `duplane bench launches`."""

    slots: Counts = (1, 8, 64)
    """Numbers of conversations, separated by commas; each number is counted in neighbouring and in
    scattered slots."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RebuildBench(Weights):
    """Flags of `duplane bench rebuild`. Raises ValueError naming the setting."""

    units: Counts = (60, 300, 500)
    """Numbers of past units, separated by commas. Half of the units listen, half speak."""
    device: str = "cpu"
    """Device of the model: cpu or cuda:N."""
    dtype: DtypeOrAuto = "auto"
    """Type of the model's numbers, as for a worker."""
    threads: PositiveInt = 1
    """CPU threads of the model."""
    window: Literal["off", "basic", "context"] = "off"
    """Context window of the conversation. With a window, each rebuild feeds only what an edge keeps
    of the conversation, and is compared with a rebuild from all units."""
    window_rows: Annotated[int, Ge(200)] = 230
    """Most rows of the context of `--window basic`; it then drops a third of them."""
    window_units: PositiveInt = 12
    """Most units of the context of `--window context`."""
    windows: Annotated[int, Ge(2)] = 8
    """Contexts that are kept before the present one, as by the edge's --journal-windows."""
    cuts: NonNegativeInt = 0
    """Further numbers of past units with `--window`, drawn with a fixed seed."""
    picture: ExistingFile | None = None
    """Picture of each unit with `--window`. Default: none."""

    def __post_init__(self) -> None:
        check_bounds(self)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelBench(Weights):
    """Flags of `duplane bench model`. Raises ValueError naming the setting."""

    device: str = "cpu"
    """Device of the model: cpu or cuda:N."""
    dtype: DtypeOrAuto = "auto"
    """Type of the model's numbers, as for a worker."""
    slots: Counts = (1, 2, 4)
    """Numbers of conversations, separated by commas; one table is printed for each number."""
    contexts: Annotated[Counts, Parameter("--context")] = ()
    """Rows of each context before the first unit, separated by commas; one table is printed for
    each number. Default: only the rows of the prompt."""
    units: PositiveInt = 10
    """Units of each kind to measure."""
    frames: Annotated[NonNegativeInt, Le(8)] = 1
    """Pictures in each unit with pictures; 0 leaves these units out."""
    cuda_graphs: bool = True
    """Capture decoders, audio encoder and vocoder as CUDA graphs. Has an effect on cuda:N only."""
    threads: PositiveInt = 1
    """CPU threads of the model."""

    def __post_init__(self) -> None:
        check_bounds(self)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LaneBench(Weights):
    """Flags of `duplane bench lanes`. Raises ValueError naming the setting."""

    device: str = "cpu"
    """Device of the model: cpu or cuda:N."""
    dtype: DtypeOrAuto = "auto"
    """Type of the model's numbers, as for a worker."""
    slots: Counts = (8,)
    """Numbers of conversations, separated by commas; one table is printed for each number."""
    units: PositiveInt = 12
    """Units that each conversation speaks in each run."""
    runs: PositiveInt = 5
    """Runs with one lane and with two, in turn."""
    threads: PositiveInt = 1
    """CPU threads of each lane."""

    def __post_init__(self) -> None:
        check_bounds(self)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ScheduleBench:
    """Flags of `duplane bench schedule`. Raises ValueError naming the setting."""

    costs: str = "h200"
    """`h200` or `h100`: times of launches computed from rates of the device, with two lanes that
    slow each other by a quarter. Or a file `costs.json` that `tools/gpu/hour.py` has measured."""
    sessions: PositiveInt = 64
    """Number of conversations; each sends one unit per second."""
    speaking: Annotated[float, Ge(0), Le(1)] = 0.5
    """Share of the conversations in which the model speaks at a time."""
    mixed: Annotated[bool, Parameter(negative=())] = False
    """Add a unit with a picture of 10 pieces every 2 s, a picture of one piece in each unit of a
    quarter of the conversations, two chats, and an opening every 2 s."""
    lanes: Literal[1, 2] = 2
    """Launches that run side by side: one for input and text, one for speech."""
    seeds: PositiveInt = 5
    """Number of runs, each with other arrivals."""
    seconds: Annotated[float, Ge(4)] = 40.0
    """Simulated seconds of each run; the first 3 do not count."""
    vocoder: Literal["float32", "tf32"] = "float32"
    """Numbers of the vocoder. A file has the times of the vocoder that it was measured with."""
    host_ms: NonNegativeFloat | None = None
    """Milliseconds of the host for each launch. Default: 0.25, or the measured time of the file."""

    def __post_init__(self) -> None:
        check_bounds(self)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LeaseBench:
    """Flags of `duplane bench leases`. Raises ValueError naming the setting."""

    store: str = "memory:"
    """Where the schedulers keep leases, as in `duplane scheduler --store`."""
    replicas: PositiveInt = 1
    """Number of schedulers. More than one need a shared store."""
    kills: bool = False
    """Kill a scheduler after every 200 grants; the command then starts it again."""
    grants: Annotated[int, Ge(2)] = 2000
    """Number of requests through the queue."""
    callers: PositiveInt = 64
    """Number of concurrent requests."""
    workers: PositiveInt = 8
    """Number of workers. They run no model."""
    slots: PositiveInt = 4
    """Slots of each worker."""
    tls: Annotated[bool, Parameter(negative=())] = False
    """All connections use mutual TLS, as with --fabric-tls."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_url(self.store)
        if self.replicas > 1 and self.store == "memory:":
            raise ValueError("replicas: more than one scheduler needs a shared store")
