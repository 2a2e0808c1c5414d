"""Starts the processes of a fabric on this machine, and drains them one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le
from cyclopts import Parameter
from cyclopts.types import ExistingFile

from duplane.edge.start_check import check_clients
from duplane.fabric import process
from duplane.fabric.addresses import Address, outgoing_addresses, parse_address
from duplane.fabric.monitoring.logs import LEVEL_SIGNALS
from duplane.fabric.settings import LogFormat, LogLevel, Names, PositiveInt, check_bounds
from duplane.tools import servers
from duplane.tools.command import CommandError, parse_settings
from duplane.tools.up.environment import environment_without_settings
from duplane.tools.up.page_addresses import operator_page, talk_page
from duplane.tools.up.supervisor import Role, RoleError
from duplane.tools.up.temporary import temporary_directory
from duplane.tools.up.tracing import traced
from duplane.worker.checkpoints import DEFAULT_CHECKPOINT
from duplane.worker.settings import AUTO, Checkpoint, DtypeOrAuto, SlotCount
from duplane.worker.start_check import check_start

_log = logging.getLogger(__name__)

RANDOM_SCALE = 0.02
"""Size of the model of `--checkpoint random`, as a share of the widths of MiniCPM-o 4.5."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Settings of `duplane up`. Raises ValueError naming the invalid setting.

    Where a setting here is None or empty, the settings of the processes themselves decide.
    """

    host: str | None = None
    """Host name or address that the edge serves at. Default: 127.0.0.1."""
    port: Annotated[int, Ge(0), Le(65535)] | None = None
    """Port of the edge; 0 picks a free one. Default: 8006."""
    worker_count: Annotated[PositiveInt, Parameter("--workers")] = 1
    """Number of worker processes."""
    slot_count: Annotated[SlotCount | None, Parameter("--slots")] = None
    """Concurrent conversations per worker; `auto` as for a worker. Default: 4."""
    checkpoint: Literal["random"] | Checkpoint | None = None
    """Checkpoint directory in the public format; or `scripted`, as for a worker; or `random`, for
    a small checkpoint of random weights that is built at start: its answers mean nothing, and its
    voice is noise. Default: the small model of the package, which answers a few questions in
    English."""
    devices: Annotated[Names, Parameter("--device")] = ()
    """Device of the model: cpu or cuda:N. Several devices, separated by commas, are assigned to the
    workers in turn. Default: cpu."""
    dtype: DtypeOrAuto | None = None
    """Type of the model's numbers, as for a worker. Default: auto."""
    tls_cert: ExistingFile | None = None
    """Certificate chain (PEM). With it the edge serves only wss:// and https://."""
    tls_key: ExistingFile | None = None
    """Key of --tls-cert (PEM, no password)."""
    tls_self_signed: Annotated[bool, Parameter(negative=())] = False
    """Serve wss:// and https:// only, with a certificate that the edge makes, as for an edge. For
    phones in the same network say also --host 0.0.0.0, and --api-keys or --auth none."""
    behind_tls_proxy: Annotated[bool, Parameter(negative=())] = False
    """Let other machines reach the edge without TLS, because a proxy before it ends TLS."""
    api_keys: ExistingFile | None = None
    """File of API keys, one of which each client must show."""
    auth: Literal["keys", "none"] | None = None
    """`none` lets everybody who reaches the edge open sessions. Default: as for an edge."""
    allowed_origins: Names = ()
    """Origins of web pages of other hosts or ports that may use the edge, separated by commas, as
    for an edge. Default: none."""
    metrics_port: Annotated[int, Ge(1), Le(65535)] | None = None
    """Port of the edge's metrics for Prometheus, on 127.0.0.1. The scheduler has the next port, and
    the workers have the ports after that. Default: no metrics."""
    trace: Annotated[bool, Parameter(negative=())] = False
    """Receive the spans of all processes, and show the time of each stage at the end, like `duplane
    trace`. Spans go to no other collector then."""
    trace_out: Path | None = None
    """Append the received spans to this file, for `duplane trace FILE`. Implies --trace."""
    log_level: LogLevel = "INFO"
    """Lowest level that the processes log. SIGUSR1 changes it to DEBUG while they run, SIGUSR2
    changes it back."""
    log_format: LogFormat = "text"
    """Format of log lines: text, or JSON with one object per line. With JSON, the lines that are
    else on stdout (addresses, the report of --trace) are log lines, too."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if max(metrics_ports(self), default=0) > 65535:
            raise ValueError(f"metrics_port is {self.metrics_port}: some ports exceed 65535")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        if self.tls_cert and self.tls_self_signed:
            raise ValueError("tls_cert and tls_self_signed must not both be set")


def metrics_ports(settings: UpSettings) -> Sequence[int]:
    """Return the ports of the metrics of edge, scheduler and workers; empty without metrics."""
    if settings.metrics_port is None:
        return ()
    return range(settings.metrics_port, settings.metrics_port + 2 + settings.worker_count)


@dataclass(frozen=True)
class Fabric:
    """A running fabric: its addresses, and its processes in the order in which they drain."""

    edge: str
    talk_page: str  # empty if the edge has none
    operator_page: str  # empty if the edge has none, or its address is not known
    scheduler: str
    metrics: Sequence[Address]  # where edge, scheduler and workers serve metrics
    slot_count: int | None  # None if the workers choose it by their memory
    note: str  # about the model; empty for a checkpoint of the user
    roles: Sequence[Role]


def serve_up(settings: UpSettings) -> int:
    """Run until stopped; return the exit code. Raises CommandError."""
    with command_errors():
        return process.run(lambda shutdown: _up(settings, shutdown))


@contextlib.contextmanager
def command_errors() -> Generator[None]:
    """Raise one CommandError in place of the group of errors that `running` raises."""
    try:
        yield
    except ExceptionGroup as group:
        failures, others = group.split(CommandError)
        if others or not failures:
            raise
        raise CommandError("; ".join(str(failure) for failure in _leaves(failures))) from None


def _leaves(group: ExceptionGroup[CommandError]) -> Iterator[CommandError]:
    for failure in group.exceptions:
        if isinstance(failure, ExceptionGroup):
            yield from _leaves(failure)
        else:
            yield failure


async def _up(settings: UpSettings, shutdown: process.Shutdown) -> None:
    """Run until the first signal, then drain. A signal during the start ends it immediately."""
    start = asyncio.current_task()
    assert start is not None, "a coroutine runs in a task"
    interrupt = asyncio.create_task(_cancel_at_signal(start, shutdown))
    is_traced = settings.trace or settings.trace_out is not None
    show = _show_json if settings.log_format == "json" else _show_text
    async with traced(is_traced, settings.trace_out, show), running(settings) as fabric:
        interrupt.cancel()
        note = f"; {fabric.note}" if fabric.note else ""
        slots = "slots by memory" if fabric.slot_count is None else f"{fabric.slot_count} slots"
        s = "s" if settings.tls_cert or settings.tls_self_signed else ""
        page = f" {fabric.talk_page}" if fabric.talk_page else ""
        show(
            f"duplane is ready:{page} ws{s}://{fabric.edge}/v1/realtime?mode=audio"
            f" http{s}://{fabric.edge}/status grpc://{fabric.scheduler}"
            f" ({slots}{note})\n"
        )
        if fabric.operator_page:
            show(f"for operators: {fabric.operator_page}\n")
        if settings.tls_self_signed:
            show(_advice_for_phones(parse_address(fabric.edge, "address")))
        if fabric.metrics:
            urls = " ".join(f"http://{address}/metrics" for address in fabric.metrics)
            show(f"metrics of edge, scheduler and workers: {urls}\n")
        url = f" --url ws{s}://{fabric.edge}" if settings != UpSettings() else ""
        show(f"in another shell, try: {_command()} talk{url}\n")
        _pass_on_level_signals(fabric.roles)
        await shutdown.wait()
        _log.info("draining: running sessions may end; Ctrl-C again stops at once")
        for role in fabric.roles:
            await role.drain()


def _advice_for_phones(listened: Address) -> str:
    """Return a line that says how phones reach an edge with a certificate of its own."""
    hosts = [listened.host]
    if listened.is_any:
        hosts = [str(address) for address in outgoing_addresses() if address.version == 4]
    address = Address(hosts[0] if hosts else listened.host, listened.port)
    return (
        f"phones of this network install https://{address}/ca.pem once, then open"
        f" https://{address}/\n"
    )


def _show_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _show_json(text: str) -> None:
    _log.info("%s", text.rstrip("\n"))


def _pass_on_level_signals(roles: Sequence[Role]) -> None:
    """Forward the signals that change the log level to all processes of the fabric."""

    def pass_on(number: signal.Signals, change: Callable[[int, None], object]) -> None:
        change(number, None)
        for role in roles:
            role.send_signal(number)

    for number in LEVEL_SIGNALS:
        change = signal.getsignal(number)
        if callable(change):
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(number, pass_on, number, change)


async def _cancel_at_signal(task: asyncio.Task[None], shutdown: process.Shutdown) -> None:
    await shutdown.wait()
    task.cancel()


def _command() -> str:
    """Return the `duplane` command in the form in which the user typed it."""
    name = sys.argv[0]
    return name if Path(name).name == "duplane" else "duplane"


def _check_port(address: Address) -> None:
    """Check that the port is free. Called before anything is built or loaded. Raises StartError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise process.StartError(f"cannot listen on {address}: {error.strerror}") from None


@contextlib.asynccontextmanager
async def running(settings: UpSettings, certificates: Path | None = None) -> AsyncGenerator[Fabric]:
    """Run scheduler, workers and edge for the body of the `with`.

    With `certificates`, a directory as `duplane certs dev` makes it, they use mutual TLS.
    Raises StartError, UsageError, and RoleError in a group.
    """
    async with contextlib.AsyncExitStack() as stack:
        is_random = settings.checkpoint == "random"
        checkpoint: Path | str | None = settings.checkpoint
        if is_random:
            checkpoint = stack.enter_context(temporary_directory("duplane-checkpoint-"))
        for_edge = edge_flags(settings)
        devices = settings.devices or (None,)
        worker_flags = _worker_flags(settings, devices[0], checkpoint)
        edge_settings = parse_settings(servers.edge, for_edge, {})
        default = {"checkpoint": str(DEFAULT_CHECKPOINT)}
        worker_settings = parse_settings(servers.worker, worker_flags, default)
        parse_settings(servers.scheduler, (), {})
        listen = parse_address(edge_settings.listen, "listen", min_port=0)
        host = listen.host if settings.host is None else settings.host.strip("[]")
        address = Address(host, listen.port if settings.port is None else settings.port)
        metrics = [Address("127.0.0.1", port) for port in metrics_ports(settings)]
        await check_clients(replace(edge_settings, listen=str(address)))
        for listened in (address, *metrics):
            _check_port(listened)
        for device in settings.devices or (worker_settings.device,):
            check_start(replace(worker_settings, device=device), is_built=not is_random)
        if is_random:
            await _build_checkpoint(worker_settings.checkpoint)

        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        log = ("--log-level", settings.log_level, "--log-format", settings.log_format)
        of_edge, of_scheduler, *of_workers = metrics or [None] * (2 + settings.worker_count)

        def start(
            name: str, *flags: str, metrics: Address | None, address: str = "127.0.0.1:0"
        ) -> Role:
            tls = certificates / name if certificates else None
            flags = (*flags, *_flags({"--metrics-listen": metrics, "--fabric-tls": tls}))
            role = Role(name, (name, *flags, *log), address)
            stack.push_async_callback(role.stop)
            tasks.create_task(role.keep_running(), name=name)
            return role

        _log.info("starting the scheduler")
        scheduler = start("scheduler", metrics=of_scheduler)
        at = ("--scheduler", await scheduler.ready())
        _log.info("starting %d worker(s): loading the model", settings.worker_count)
        workers: list[Role] = []
        for index, of_worker in enumerate(of_workers):
            device = devices[index % len(devices)]
            flags = _worker_flags(settings, device, worker_settings.checkpoint)
            workers.append(start("worker", *at, *flags, metrics=of_worker))
        for worker in workers:
            await worker.ready()
        _log.info("starting the edge")
        edge = start("edge", *at, *for_edge, metrics=of_edge, address=str(address))
        served = await edge.ready()
        yield Fabric(
            edge=served,
            talk_page=talk_page(edge_settings, served),
            operator_page=operator_page(edge_settings, served),
            scheduler=scheduler.address,
            metrics=metrics,
            slot_count=_slot_count(settings.worker_count, worker_settings.slot_count),
            note=_note(worker_settings.checkpoint, is_random=is_random),
            roles=(edge, *workers, scheduler),
        )


def _slot_count(worker_count: int, slot_count: SlotCount) -> int | None:
    return None if slot_count == AUTO else worker_count * slot_count


def _note(checkpoint: Path | str, *, is_random: bool) -> str:
    """Return a note about the model for the user; empty for a checkpoint of the user."""
    if is_random:
        return "small random model: its answers mean nothing, and its voice is noise"
    if checkpoint == DEFAULT_CHECKPOINT:
        return "small model of a few questions"
    return ""


async def _build_checkpoint(directory: Path | str) -> None:
    """Build the small random checkpoint, in a process that can be stopped at any time."""
    _log.info("building a small random checkpoint")
    command = (sys.executable, "-P", "-m", "duplane.tools", "checkpoint", "random")
    running = await asyncio.create_subprocess_exec(
        *(*command, str(directory), "--scale", str(RANDOM_SCALE), "--seed", "0"),
        stdout=asyncio.subprocess.DEVNULL,
        env=environment_without_settings(),
        start_new_session=True,
    )
    try:
        if code := await running.wait():
            raise RoleError(f"the checkpoint could not be built (exit code {code})")
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()


def edge_flags(settings: UpSettings) -> tuple[str, ...]:
    """Return the flags of the edge."""
    values: dict[str, object] = {
        "--tls-cert": settings.tls_cert,
        "--tls-key": settings.tls_key,
        "--api-keys": settings.api_keys,
        "--auth": settings.auth,
        "--allowed-origins": ",".join(settings.allowed_origins) or None,
    }
    switches = {
        "--behind-tls-proxy": settings.behind_tls_proxy,
        "--tls-self-signed": settings.tls_self_signed,
    }
    return (*_flags(values), *(flag for flag, is_on in switches.items() if is_on))


def _worker_flags(
    settings: UpSettings, device: str | None, checkpoint: Path | str | None
) -> tuple[str, ...]:
    return _flags(
        {
            "--checkpoint": checkpoint,
            "--slots": settings.slot_count,
            "--device": device,
            "--dtype": settings.dtype,
        }
    )


def _flags(values: dict[str, object]) -> tuple[str, ...]:
    given = ((flag, str(value)) for flag, value in values.items() if value is not None)
    return tuple(part for pair in given for part in pair)
