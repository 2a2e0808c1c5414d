"""The wheel in an environment of its own, with the packages of a base install and no others."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

CLIENT = ROOT / "clients/python"


def install_base(folder: Path) -> Path:
    """Build the wheel and install it without extras; return the folder of its programs."""
    return _install("duplane", ROOT, folder)


def install_client(folder: Path) -> Path:
    """Do the same with the client for Python."""
    return _install("duplane-client", CLIENT, folder)


def _install(name: str, source: Path, folder: Path) -> Path:
    """Build the wheel of `source` and install it; return the folder of its programs.

    The packages that the wheel requires are links to those of this environment, so nothing is
    downloaded.
    """
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    programs = environment / "bin"
    wheels = folder / "wheels"
    _run("-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels), cwd=source)
    (wheel,) = wheels.iterdir()
    target = ("--python", str(programs / "python"))
    _run("-m", "pip", *target, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    (packages,) = environment.glob("lib/python*/site-packages")
    (built,) = importlib.metadata.distributions(name=name, path=[str(packages)])
    for needed in required(built.requires or ()):
        _link(importlib.metadata.distribution(needed), packages)
    return programs


def required(requirements: list[str] | tuple[()]) -> set[str]:
    """Return the installed packages that `requirements` need without extras, also indirectly."""
    found: set[str] = set()
    waiting = list(requirements)
    while waiting:
        needed, _, marker = waiting.pop().partition(";")
        name = re.split(r"[^\w.-]", needed.strip())[0]
        if "extra ==" in marker or name in found:
            continue
        try:
            more = importlib.metadata.requires(name)
        except importlib.metadata.PackageNotFoundError:
            assert marker, f"{name} is not installed"  # needed by another Python or system
            continue
        found.add(name)
        waiting.extend(more or ())
    return found


def _link(package: importlib.metadata.Distribution, packages: Path) -> None:
    origin = Path(sysconfig.get_path("purelib"))
    for file in _files(package):
        link = packages / file
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(origin / file)


def _files(package: importlib.metadata.Distribution) -> Iterator[str]:
    """Yield the files of a package, without its programs."""
    return (str(file) for file in package.files or () if ".." not in file.parts)


def _run(*arguments: str, cwd: Path = ROOT) -> None:
    subprocess.run((sys.executable, *arguments), cwd=cwd, check=True, stdout=subprocess.DEVNULL)
