"""The `duplane` command: its verbs, flags and help. What they do is in the files they name.

Flags win over `DUPLANE_*` environment variables, which win over defaults. Imports that are slow
or need an extra stay inside the verbs.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from duplane.fabric import process
from duplane.tools.bench_verbs import bench
from duplane.tools.checkpoint_verbs import checkpoint
from duplane.tools.edge_flags import edge_settings, recording_bounds, with_edge_flags
from duplane.tools.flags import (
    CudaGraphs,
    Device,
    Dtype,
    DtypeOption,
    Level,
    Listen,
    LogLevel,
    Schedulers,
    Slots,
    fail,
)

app = typer.Typer(
    name="duplane",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve full-duplex speech models to many people at once.",
    epilog="Every flag can be set as an environment variable too: --port as DUPLANE_PORT.",
)
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(bench, name="bench")

DEFAULT_PORT = 8006
# What only the extra `worker` installs.
_EXTRA = ("torch", "transformers", "tokenizers", "safetensors", "yaml", "PIL", "onnxruntime")
Settings = TypeVar("Settings")


class Pace(StrEnum):
    """How fast a recording is replayed."""

    RECORDED = "recorded"
    ANSWERED = "answered"


def settled(make: Callable[[], Settings]) -> Settings:
    """Make settings; a value that cannot be ends the command with the reason."""
    try:
        return make()
    except ValueError as error:
        fail(str(error))


def _version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"duplane {importlib.metadata.version('duplane')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[  # acts through its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Serve full-duplex speech models to many people at once."""


@app.command()
def up(
    host: Annotated[
        str, typer.Option(envvar="DUPLANE_HOST", help="Address the edge listens on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="DUPLANE_PORT", min=0, max=65535, help="Port of the edge.")
    ] = DEFAULT_PORT,
    workers: Annotated[
        int, typer.Option(envvar="DUPLANE_WORKERS", min=1, help="Worker processes.")
    ] = 1,
    slots: Slots = 4,
    checkpoint_directory: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            envvar="DUPLANE_CHECKPOINT",
            exists=True,
            file_okay=False,
            help="A checkpoint in the public format. Default: a tiny random one, built on the"
            " spot, whose answers mean nothing.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            envvar="DUPLANE_DEVICE",
            metavar="cpu|cuda:N[,cuda:N]",
            help="Where the model runs; workers take turns over a list.",
        ),
    ] = "cpu",
    dtype: DtypeOption = Dtype.FLOAT32,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="DUPLANE_TLS_CERT", exists=True, help="Serve wss:// with this chain (PEM)."
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(envvar="DUPLANE_TLS_KEY", exists=True, help="The key of --tls-cert (PEM)."),
    ] = None,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Start scheduler, workers and edge on this machine, as separate supervised processes.

    Prints one ready line with the URLs. The first Ctrl-C lets running sessions end, the second
    stops at once. A process that dies is started again. What `duplane edge --help` names beyond
    this is set here by its environment variable.
    """
    from duplane.tools.up import UpSettings, serve_up

    process.configure_logging("up", log_level.value)
    if (tls_cert is None) != (tls_key is None):
        fail("--tls-cert and --tls-key must be set together")
    settings = UpSettings(
        host=host,
        port=port,
        worker_count=workers,
        slot_count=slots,
        checkpoint=checkpoint_directory,
        devices=tuple(device.split(",")),
        dtype=dtype.value,
        tls_cert=tls_cert,
        tls_key=tls_key,
        log_level=log_level.value,
    )
    raise typer.Exit(serve_up(settings))


@app.command()
@with_edge_flags
def edge(
    listen: Listen = f"127.0.0.1:{DEFAULT_PORT}",
    scheduler: Schedulers = "127.0.0.1:8010",
    record: Annotated[
        Path | None,
        typer.Option(
            envvar="DUPLANE_RECORD",
            file_okay=False,
            metavar="DIR",
            help="Record sessions here. Default: nothing is recorded.",
        ),
    ] = None,
    record_consent: Annotated[
        str,
        typer.Option(
            envvar="DUPLANE_RECORD_CONSENT",
            metavar="always|unless_refused|on_request",
            help="What ?recording=on or off in a client's URL counts for.",
        ),
    ] = "always",
    record_days: Annotated[
        float | None,
        typer.Option(envvar="DUPLANE_RECORD_DAYS", min=0, help="Delete older recordings."),
    ] = None,
    record_gigabytes: Annotated[
        float | None,
        typer.Option(
            envvar="DUPLANE_RECORD_GIGABYTES",
            min=0,
            help="Delete the oldest recordings above this, in all.",
        ),
    ] = None,
    log_level: LogLevel = Level.INFO,
    **values: Any,
) -> None:
    """Run one edge: public WebSockets in, the fabric's streams out.

    What it speaks, event by event: `duplane protocols`.
    """
    from duplane.edge.recording.settings import recording_settings
    from duplane.edge.server import serve

    process.configure_logging("edge", log_level.value)
    schedulers = tuple(scheduler.split(","))
    recording = settled(
        lambda: recording_settings(
            record, record_consent, record_days, record_gigabytes, **recording_bounds(values)
        )
    )
    settings = settled(
        lambda: edge_settings(values, listen=listen, schedulers=schedulers, recording=recording)
    )
    raise typer.Exit(process.run(lambda shutdown: serve(settings, shutdown)))


@app.command()
def protocols() -> None:
    """Print what the edge speaks, as Markdown: events, phases, answers, codes and bounds."""
    from duplane.tools.protocol_page import protocol_page

    typer.echo(protocol_page(), nl=False)


@app.command()
def scheduler(
    listen: Listen = "127.0.0.1:8010",
    store: Annotated[
        str, typer.Option(envvar="DUPLANE_STORE", metavar="memory:", help="Where leases are kept.")
    ] = "memory:",
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run one scheduler: it decides who gets which slot."""
    from duplane.scheduler.service import serve
    from duplane.scheduler.settings import SchedulerSettings

    process.configure_logging("scheduler", log_level.value)
    settings = settled(lambda: SchedulerSettings(listen=listen, store=store))
    raise typer.Exit(process.run(lambda shutdown: serve(settings, shutdown)))


@app.command()
def worker(
    checkpoint_directory: Annotated[
        Path,
        typer.Option(
            "--checkpoint",
            envvar="DUPLANE_CHECKPOINT",
            exists=True,
            file_okay=False,
            help="A checkpoint in the public format.",
        ),
    ],
    listen: Listen = "127.0.0.1:0",
    scheduler: Schedulers = "127.0.0.1:8010",
    slots: Slots = 4,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.FLOAT32,
    advertise: Annotated[
        str,
        typer.Option(
            envvar="DUPLANE_ADVERTISE",
            metavar="HOST:PORT",
            help="How edges reach this worker. Default: where it listens.",
        ),
    ] = "",
    pool: Annotated[
        str, typer.Option(envvar="DUPLANE_POOL", help="The queue to serve. Default: the unnamed.")
    ] = "",
    context: Annotated[
        int,
        typer.Option(envvar="DUPLANE_CONTEXT", min=64, help="Tokens one conversation can hold."),
    ] = 8192,
    threads: Annotated[
        int, typer.Option(envvar="DUPLANE_THREADS", min=1, help="CPU threads of the model.")
    ] = 1,
    turn_rows: Annotated[
        int,
        typer.Option(
            envvar="DUPLANE_TURN_ROWS",
            min=128,
            help="Rows of the talker that a turn may fill, some 35 a second; then it starts anew.",
        ),
    ] = 2048,
    cuda_graphs: CudaGraphs = True,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run one worker: one device, one model, many conversations."""
    from duplane.worker.service import serve
    from duplane.worker.settings import WorkerSettings

    process.configure_logging("worker", log_level.value)
    settings = settled(
        lambda: WorkerSettings(
            listen=listen,
            advertise=advertise,
            schedulers=tuple(scheduler.split(",")),
            pool=pool,
            slot_count=slots,
            device=device,
            dtype=dtype.value,
            threads=threads,
            turn_row_limit=turn_rows,
            cuda_graphs=cuda_graphs,
            context_token_limit=context,
            checkpoint=checkpoint_directory,
        )
    )
    raise typer.Exit(process.run(lambda shutdown: serve(settings, shutdown)))


@app.command()
def talk(
    wav: Annotated[
        Path | None,
        typer.Argument(exists=True, dir_okay=False, help="Any sound file soundfile reads."),
    ] = None,
    url: Annotated[
        str, typer.Option(envvar="DUPLANE_URL", help="The server, with or without a path.")
    ] = f"ws://127.0.0.1:{DEFAULT_PORT}",
    dialect: Annotated[
        str,
        typer.Option(envvar="DUPLANE_DIALECT", metavar="A|B|C|D", help="The protocol to speak."),
    ] = "A",
    mode: Annotated[
        str,
        typer.Option(metavar="audio|video|chat", help="What to send; D is always a chat."),
    ] = "audio",
    frame: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, help="A picture: one each second, or with the first text."
        ),
    ] = None,
    video: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, help="A video file, with the first text of a chat."
        ),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="What to say in a chat; again for another turn.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the reply here, as a 24 kHz WAV.")] = None,
    prompt: Annotated[
        str, typer.Option(help="What the model is told it is.")
    ] = "You are a helpful assistant.",
    voice: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A sound file with the voice to use."),
    ] = None,
    tail: Annotated[
        float, typer.Option(min=0, help="Seconds of silence to go on sending after the file.")
    ] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
) -> None:
    """Speak a sound file to a server at real-time pace, or chat with it, and show its answers.

    Prints a row per unit: decision, text, length of audio, latency. Exit code 0 means that the
    whole conversation worked: every unit was answered and the session closed in order.
    """
    from duplane.tools.talk import TalkFailed, TalkSettings, talk_to
    from duplane.tools.talk_chat import chat_with

    settings = TalkSettings(
        wav=wav,
        url=url,
        dialect=dialect.upper(),
        mode="chat" if dialect.upper() == "D" else mode,
        frames=tuple(frame or ()),
        videos=tuple(video or ()),
        texts=tuple(text or ()),
        prompt=prompt,
        voice=voice,
        tail_s=tail,
    )
    try:
        if settings.mode not in ("audio", "video", "chat"):
            fail(f"mode {mode!r} is not one of audio, video, chat")
        (chat_with if settings.mode == "chat" else talk_to)(settings, out=out, as_json=json)
    except ValueError as error:
        fail(str(error))
    except TalkFailed as error:
        typer.echo(f"duplane: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def replay(
    directory: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="One recording of a session.")
    ],
    url: Annotated[
        str, typer.Option(envvar="DUPLANE_URL", help="The server, with or without a path.")
    ] = f"ws://127.0.0.1:{DEFAULT_PORT}",
    pace: Annotated[
        Pace, typer.Option(help="As it was timed, or each event once those before are answered.")
    ] = Pace.ANSWERED,
) -> None:
    """Play the user's side of a recorded session again and compare what comes back.

    Prints a row per server event: type, text and length of audio, then and now. Exit code 0 means
    that all agree, which seeded or greedy sessions should.
    """
    from duplane.tools.replay_recording import ReplayFailed
    from duplane.tools.replay_recording import replay as replay_recording

    try:
        raise typer.Exit(replay_recording(directory, url, is_paced=pace is Pace.RECORDED))
    except (ReplayFailed, ValueError) as error:
        fail(str(error))


def main() -> NoReturn:
    """Run the command."""
    try:
        app()
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.exit(f"duplane: {missing.name} is not installed; this needs duplane[worker]")
    sys.exit(0)


if __name__ == "__main__":
    main()
