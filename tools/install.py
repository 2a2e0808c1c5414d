"""Installs the project into a virtual environment: python tools/install.py [--dev] .venv

Uses only the standard library, and the versions of constraints.txt. With `--dev` the tools of
development are installed too. The environment variable TORCH chooses the build of torch: `cpu`
(about 200 MB; the default), or `cuda` (about 2.5 GB with the CUDA packages, on Linux). The CUDA
build is never installed unless TORCH names it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BUILDS = ("cpu", "cuda")
SHOWN = re.compile(r"\s*(Downloading \S+ \([\d.]+ [MG]B\)|Installing collected packages)")
SILENCE_S = 15.0  # pip can be silent for minutes; after this time a line says that it still works


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Install into the directory that `arguments` name; return the exit code."""
    if sys.version_info < (3, 11):  # noqa: UP036  an older Python can run this file
        return _fail("python is older than 3.11; set PYTHON=...")
    extras = "worker,dev" if "--dev" in arguments else "worker"
    target = Path(*(argument for argument in arguments if argument != "--dev"))
    build = environment.get("TORCH") or "cpu"
    if build not in BUILDS:
        return _fail(f"TORCH is {build!r}, must be one of {', '.join(BUILDS)}")
    begin = time.monotonic()
    python = target / "bin" / "python"
    _step(1, f"virtual environment {target}")
    if not python.exists():
        venv.create(target, with_pip=True)
    is_linux = platform.system() == "Linux"
    if not is_linux:
        _step(2, "torch from the default index")
    elif build == "cuda":
        _step(2, "torch from the default index, with CUDA (about 2.5 GB)")
    elif failure := install_cpu_torch(python):
        return _fail(failure)
    size = "700 MB" if extras == "worker,dev" else "300 MB"
    _step(3, f"all packages (about {size} beside torch)")
    if code := pip(python, ("-e", f"{ROOT}[{extras}]")):
        return _fail("the installation failed; the same command continues it", code)
    _step(4, f"installed in {time.monotonic() - begin:.0f} s")
    return 0


def install_cpu_torch(python: Path) -> str:
    """Install the CPU build of torch on Linux; return why this is impossible, or an empty string.

    If the index of CPU builds cannot be reached, the default index is tried, but only if it offers
    a build without CUDA.
    """
    version = pinned("torch", CONSTRAINTS.read_text(encoding="utf-8"))
    _step(2, f"torch {version}, build for the CPU (about 200 MB)")
    if has_nvidia_driver():
        print(
            "      This machine has an NVIDIA driver. To use it, install the build with CUDA"
            " (about 2.5 GB): make clean run TORCH=cuda"
        )
    package = f"torch=={version}"
    index = ("--index-url", CPU_INDEX, "--no-deps", "--retries", "0", "--timeout", "15")
    if not pip(python, (*index, package)):
        return ""
    if default_build_needs_cuda(python, package):
        return (
            f"{CPU_INDEX} cannot be reached, and the default index has only the build with CUDA"
            " (about 2.5 GB); TORCH=cuda installs that"
        )
    print(f"      {CPU_INDEX} cannot be used; torch comes from the default index")
    return ""


def default_build_needs_cuda(python: Path, package: str) -> bool:
    """Return whether pip would install a build that needs the packages of CUDA.

    A build that is installed already needs nothing, so the result is False.
    """
    report = ("--dry-run", "--no-deps", "--quiet", "--report", "-", package)
    command = [str(python), "-m", "pip", "install", *report]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        return False  # the next step fails for the same reason, and shows it
    needed = [
        requirement
        for build in json.loads(found.stdout)["install"]  # noqa: TID251  no orjson here yet
        for requirement in build["metadata"].get("requires_dist", ())
    ]
    return any(requirement.startswith(("nvidia-", "cuda-")) for requirement in needed)


def has_nvidia_driver() -> bool:
    """Return whether this machine has an NVIDIA driver."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def pinned(package: str, constraints: str) -> str:
    """Return the version of a package, from the text of constraints.txt."""
    match = re.search(rf"^{re.escape(package)}==(\S+)$", constraints, re.MULTILINE)
    if match is None:
        raise ValueError(f"{package} is not in constraints.txt")
    return match[1]


def pip(python: Path, arguments: Sequence[str]) -> int:
    """Run `pip install`; return the exit code. Show pip's downloads, and its errors if it fails."""
    command = [str(python), "-m", "pip", "install", "--progress-bar", "off", *arguments]
    # A flag would not reach the build back end, but an environment variable reaches it. pip splits
    # the value at spaces, so that a path with a space must be a URI.
    settings = {"PIP_CONSTRAINT": CONSTRAINTS.as_uri(), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    progress = Progress()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **settings},
    ) as running:
        lines: list[str] = []
        with progress:
            for line in running.stdout or ():
                lines = [*lines[-20:], line]
                if shown := SHOWN.match(line):
                    progress.show(shown[1])
    if running.returncode:
        sys.stderr.write("".join(line for line in lines if "ERROR" in line) or "".join(lines))
    return running.returncode


class Progress:
    """Prints lines, and after each `SILENCE_S` without a line the time since the begin."""

    def __init__(self) -> None:
        self._shown = threading.Event()
        self._is_over = False
        self._begin_s = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._shown.set()
        self._thread.join()

    def show(self, text: str) -> None:
        """Print a line."""
        print(f"      {text}", flush=True)
        self._shown.set()

    def _watch(self) -> None:
        while not self._is_over:
            if self._shown.wait(SILENCE_S):
                self._shown.clear()
            else:
                print(f"      pip works since {time.monotonic() - self._begin_s:.0f} s", flush=True)


def _step(number: int, text: str) -> None:
    print(f"[{number}/4] {text}", flush=True)


def _fail(message: str, code: int = 1) -> int:
    sys.stderr.write(f"{message}\n")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], os.environ))
    except KeyboardInterrupt:
        sys.exit(130)
