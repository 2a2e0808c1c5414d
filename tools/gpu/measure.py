"""Code that the scripts of this folder share: flags, checkpoint, timing, tables and JSON file."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson
import torch

from duplane.fabric.files import write_atomically
from duplane.tools.bench.peaks import synchronize
from duplane.tools.checkpoint.random_weights import write_random
from duplane.worker.models.minicpm_o.model import DuplexModel

LIKE = "minicpm-o-4.5"
FULL_BYTES = 25 * 10**9
"""Upper bound of the size of a full checkpoint."""
SMALL_SCALE = 0.01
SHARED_MEMORY = Path("/dev/shm")

Cell = str | int | float


@dataclass(frozen=True)
class Options:
    """The flags of a script. `small` means a tiny model and few repetitions."""

    checkpoint: Path | None
    device_name: str
    dtype: str
    minutes: float
    small: bool
    out: Path

    @property
    def device(self) -> torch.device:
        """The torch device."""
        return torch.device(self.device_name)


def read_options(arguments: Sequence[str] | None) -> Options:
    """Read the command line. The defaults with `--small` are the CPU and float32."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, help="directory; default: random, full size")
    parser.add_argument("--device", help="default: cuda:0, or cpu with --small")
    parser.add_argument("--dtype", help="default: bfloat16, or float32 with --small")
    parser.add_argument("--minutes", type=float, default=10, help="start no case after this time")
    parser.add_argument("--small", action="store_true", help="a tiny model, few repetitions")
    parser.add_argument("--out", type=Path, default=Path(), help="directory of the JSON file")
    flags = parser.parse_args(arguments)
    flags.out.mkdir(parents=True, exist_ok=True)
    return Options(
        checkpoint=flags.checkpoint,
        device_name=flags.device or ("cpu" if flags.small else "cuda:0"),
        dtype=flags.dtype or ("float32" if flags.small else "bfloat16"),
        minutes=flags.minutes,
        small=flags.small,
        out=flags.out,
    )


class Table:
    """A table that is printed row by row, as the figures are measured."""

    def __init__(self, title: str, columns: Sequence[str], save: Callable[[], None]) -> None:
        self.content: dict[str, Any] = {"title": title, "columns": list(columns), "rows": []}
        self._save = save
        self._widths = [max(len(name) + 2, 38 if first else 11) for name, first in _first(columns)]
        print(f"\n{title}\n\n{self._line(columns)}", flush=True)

    def add(self, *cells: Cell) -> None:
        """Print a row and write it to the file; floats get three decimals."""
        self.content["rows"].append(list(cells))
        self._save()
        texts = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
        print(self._line(texts), flush=True)

    def _line(self, texts: Sequence[str]) -> str:
        cells = zip(texts, self._widths, strict=True)
        return "".join(
            text.ljust(width) if number == 0 else text.rjust(width)
            for number, (text, width) in enumerate(cells)
        ).rstrip()


def _first(columns: Sequence[str]) -> Iterator[tuple[str, bool]]:
    return ((name, number == 0) for number, name in enumerate(columns))


class Report:
    """The tables of one script. A JSON file holds them, and is rewritten after every row."""

    def __init__(self, name: str, options: Options) -> None:
        self._path = options.out / f"gpu-{name}.json"
        self._end = time.monotonic() + 60 * options.minutes
        self._content: dict[str, Any] = {
            "script": name,
            "machine": machine(options),
            "tables": [],
            "failures": [],
        }
        for key, value in self._content["machine"].items():
            print(f"{key}: {value}")
        self._save()

    def table(self, title: str, columns: Sequence[str]) -> Table:
        """Begin a table."""
        table = Table(title, columns, self._save)
        self._content["tables"].append(table.content)
        self._save()
        return table

    @contextmanager
    def case(self, name: str) -> Generator[None, None, None]:
        """Print and record an exception in the body of the `with`; the script continues."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the next case may work
            traceback.print_exc()
            self._content["failures"].append({"case": name, "error": repr(error)[:2000]})
            self._save()
            print(f"FAILED: {name}: {error!r}"[:300], flush=True)

    def has_time(self, case: str) -> bool:
        """Return whether there is time for another case; print a line if not."""
        if time.monotonic() < self._end:
            return True
        print(f"no time left for: {case}", flush=True)
        return False

    @property
    def exit_code(self) -> int:
        """1 after a failure."""
        return 1 if self._content["failures"] else 0

    def _save(self) -> None:
        write_atomically(self._path, orjson.dumps(self._content, option=orjson.OPT_INDENT_2))


def machine(options: Options) -> dict[str, Cell]:
    """Return the machine's properties, for the report."""
    found: dict[str, Cell] = {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count() or 0,
        "dtype": options.dtype,
        "device": options.device_name,
    }
    if options.device.type == "cuda":
        # torch declares no type for the result.
        properties = cast("Any", torch.cuda).get_device_properties(options.device)
        found |= {
            "name": properties.name,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": str(torch.version.cuda),
            "cudnn": torch.backends.cudnn.version() or 0,
        }
    return found


@contextmanager
def checkpoint_directory(options: Options) -> Generator[Path, None, None]:
    """Yield the checkpoint that the flags name, or else write a random checkpoint to memory."""
    if options.checkpoint is not None:
        yield options.checkpoint
        return
    scale = SMALL_SCALE if options.small else 1.0
    needed = 0 if options.small else FULL_BYTES
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > needed
    folder = SHARED_MEMORY if in_memory else None
    with tempfile.TemporaryDirectory(prefix="duplane-gpu-", dir=folder) as name:
        begin = time.monotonic()
        write_random(Path(name), LIKE, factor=scale, device=options.device)
        print(f"random checkpoint in {time.monotonic() - begin:.1f} s", flush=True)
        yield Path(name)


def load(
    options: Options, directory: Path, slots: int, context: int, *, cuda_graphs: bool
) -> DuplexModel:
    """Load the checkpoint for this number of conversations."""
    gc.collect()  # memory of the previous model
    begin = time.monotonic()
    model = DuplexModel.load(
        directory,
        slot_count=slots,
        context_capacity=context,
        device=options.device_name,
        dtype=options.dtype,
        cuda_graphs=cuda_graphs,
    )
    synchronize(options.device)
    parameters = f"{model.parameter_count / 1e6:,.1f} M parameters"
    print(f"{parameters}, {slots} slots, in {time.monotonic() - begin:.1f} s", flush=True)
    return model


@dataclass(frozen=True)
class Times:
    """Median milliseconds until the device has finished a call, and until the call returns."""

    device_ms: float
    host_ms: float


def measured(
    device: torch.device, call: Callable[[], object], repeats: int, restore: Callable[[], object]
) -> Times:
    """Time repeated calls, without the first two.

    `restore` runs after each call and is not timed.
    """
    done: list[float] = []
    asked: list[float] = []
    for number in range(2 + repeats):
        synchronize(device)
        begin = time.perf_counter()
        call()
        returned = time.perf_counter()
        synchronize(device)
        if number >= 2:
            done.append(1e3 * (time.perf_counter() - begin))
            asked.append(1e3 * (returned - begin))
        restore()
    return Times(statistics.median(done), statistics.median(asked))


def nothing() -> None:
    """Restore nothing."""
