"""Installs the project into a virtual environment: python tools/install.py .venv

Uses only the standard library, and the versions of constraints.txt. The environment variable TORCH
chooses the build of torch: `cpu` (about 200 MB), `cuda` (about 2.5 GB with the CUDA packages, on
Linux), or `auto`, which means `cpu` if no NVIDIA driver is found. If the index of the CPU build
cannot be reached, torch comes from the default index.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BUILDS = ("auto", "cpu", "cuda")
SHOWN = re.compile(r"\s*(Downloading \S+ \([\d.]+ [MG]B\)|Installing collected packages)")


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Install into the directory that `arguments` name; return the exit code."""
    if sys.version_info < (3, 11):  # noqa: UP036  an older Python can run this file
        return _fail("python is older than 3.11; set PYTHON=...")
    target = Path(*arguments)
    build = environment.get("TORCH") or "auto"
    if build not in BUILDS:
        return _fail(f"TORCH is {build!r}, must be one of {', '.join(BUILDS)}")
    begin = time.monotonic()
    python = target / "bin" / "python"
    _step(1, f"virtual environment {target}")
    if not python.exists():
        venv.create(target, with_pip=True)
    if wants_cpu_build(build, has_driver=has_nvidia_driver(), system=platform.system()):
        version = pinned("torch", CONSTRAINTS.read_text(encoding="utf-8"))
        _step(2, f"torch {version}, build for the CPU (about 200 MB); TORCH=cuda for the other")
        options = ("--index-url", CPU_INDEX, "--no-deps", "--retries", "0", "--timeout", "15")
        if pip(python, (*options, f"torch=={version}")):
            print(f"      {CPU_INDEX} cannot be used; torch comes from the default index")
    else:
        _step(2, "torch from the default index; on Linux with CUDA (about 2.5 GB)")
    _step(3, "all packages (about 400 MB beside torch)")
    if code := pip(python, ("-e", f"{ROOT}[worker,dev]")):
        return _fail("the installation failed; `make run` continues it", code)
    _step(4, f"installed in {time.monotonic() - begin:.0f} s")
    return 0


def wants_cpu_build(build: str, *, has_driver: bool, system: str) -> bool:
    """Return whether to install torch from the index of CPU builds.

    Outside Linux the answer is no, because the default index has the CPU build there.
    """
    return system == "Linux" and (build == "cpu" or (build == "auto" and not has_driver))


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
    # A flag would not reach the build back end, but an environment variable reaches it.
    settings = {"PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **settings},
    ) as running:
        lines: list[str] = []
        for line in running.stdout or ():
            lines = [*lines[-20:], line]
            if shown := SHOWN.match(line):
                print(f"      {shown[1]}", flush=True)
    if running.returncode:
        sys.stderr.write("".join(line for line in lines if "ERROR" in line) or "".join(lines))
    return running.returncode


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
