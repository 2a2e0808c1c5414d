"""Checks the licences of installed packages: python -m supply.licences [DIRECTORY...]

Each DIRECTORY has packages (site-packages) or libraries; the default are the packages of this
Python. A package or bundled library with a licence that is not allowed, or with an unknown one, is
printed, and the exit code is 1. `--except NAME` leaves out a package that is not published.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import mmap
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

# May be part of a published image. LGPL and MPL: as libraries and files that are not changed.
ALLOWED = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "FTL",
        "IJG",
        "ISC",
        "LGPL-2.1-or-later",
        "LGPL-3.0-or-later",
        "libpng-2.0",
        "libtiff",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "PSF-2.0",
        "Unlicense",
        "Zlib",
    }
)
# Packages whose metadata have no licence that a program can read, and where it was read.
PACKAGES = {
    "kosoku": "Apache-2.0",  # its file LICENSE
    "jinja2": "BSD-3-Clause",  # its file LICENSE.txt; the metadata say only BSD
    "mpmath": "BSD-3-Clause",  # its file LICENSE
    "nodeenv": "BSD-3-Clause",  # its file LICENSE
    "sympy": "BSD-3-Clause",  # its file LICENSE
    "soundfile": "BSD-3-Clause",  # its file LICENSE
}
# NVIDIA's licence allows to distribute its libraries with an application (its attachment A).
REDISTRIBUTABLE = re.compile(r"(nvidia|cuda)-[a-z0-9-]+")
TEXTS = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}
# Libraries that wheels bundle, without the hash that auditwheel adds to a name.
LIBRARIES = {
    "libavcodec": "LGPL-2.1-or-later",
    "libavdevice": "LGPL-2.1-or-later",
    "libavfilter": "LGPL-2.1-or-later",
    "libavformat": "LGPL-2.1-or-later",
    "libavif": "BSD-2-Clause",
    "libavutil": "LGPL-2.1-or-later",
    "libbrotlicommon": "MIT",
    "libbrotlidec": "MIT",
    "libdav1d": "BSD-2-Clause",
    "libfreetype": "FTL",
    "libgfortran": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "libgomp": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "libharfbuzz": "MIT",
    "libjpeg": "IJG",
    "liblcms2": "MIT",
    "liblzma": "0BSD",
    "libopenjp2": "BSD-2-Clause",
    "libpng16": "libpng-2.0",
    "libquadmath": "LGPL-2.1-or-later",
    "libscipy_openblas64_": "BSD-3-Clause",
    "libsharpyuv": "BSD-3-Clause",
    "libsndfile_x86_64": "LGPL-2.1-or-later",
    "libswresample": "LGPL-2.1-or-later",
    "libswscale": "LGPL-2.1-or-later",
    "libtiff": "libtiff",
    "libwebp": "BSD-3-Clause",
    "libwebpdemux": "BSD-3-Clause",
    "libwebpmux": "BSD-3-Clause",
    "libXau": "MIT",
    "libxcb": "MIT",
    "libzstd": "BSD-3-Clause",
}
# The libraries in these folders belong to the package around them, with its licence.
_OWN = re.compile(r"/(torch/lib|onnxruntime/capi|nvidia/.*|triton/.*)/[^/]*$")
_BUNDLED = re.compile(r"(lib[A-Za-z0-9_]+?)(?:-[0-9a-f]{8})*(?:[-.][\w.-]*)?\.so[.\d]*$")
# The name under which a library needs another one is text in it, and so is FFmpeg's own licence.
_NEEDED = re.compile(rb"\0(lib(?:x264|x265|xvidcore|postproc|fdk-aac|rubberband)[-.\w]*\.so[.\d]*)")
_FFMPEG = re.compile(rb"\0lib\w+ license: ([^\0]+)")
_TOKEN = re.compile(r"\(|\)|[^\s()]+")


def main(arguments: Sequence[str]) -> int:
    """Print what is not allowed; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m supply.licences", description=__doc__)
    parser.add_argument("directories", nargs="*", type=Path, default=())
    parser.add_argument("--except", dest="left_out", action="append", default=[], metavar="NAME")
    given = parser.parse_args(arguments)
    for directory in given.directories:
        if not directory.is_dir():
            parser.error(f"{directory}: is no directory")
    directories = given.directories or [Path(sysconfig.get_path("purelib"))]
    left_out = {_normal(name) for name in given.left_out}
    faults = [
        fault
        for directory in directories
        for fault in (*faults_of_packages(directory, left_out), *faults_of_files(directory))
        if fault.partition(":")[0] not in left_out
    ]
    for fault in faults:
        print(fault)
    count = sum(1 for directory in directories for _ in _packages(directory))
    print(f"{count} packages, {len(faults)} not allowed")
    return int(bool(faults))


def faults_of_packages(directory: Path, left_out: set[str]) -> Iterator[str]:
    """Yield `NAME: fault` for each package whose licence is not allowed."""
    for package in _packages(directory):
        name = _normal(package.metadata["Name"])
        licence = licence_of(package)
        if name in left_out or REDISTRIBUTABLE.fullmatch(name):
            continue
        if not licence:
            yield f"{name}: has no licence that is known here"
        elif not is_allowed(licence):
            yield f"{name}: {licence} is not allowed"


def faults_of_files(directory: Path) -> Iterator[str]:
    """Yield `PACKAGE: fault` for each library that may not be published, or needs such a one."""
    for path in sorted(directory.rglob("*.so*")):
        relative = path.relative_to(directory)
        owner = _normal(relative.parts[0].removesuffix(".libs"))
        bundled = _BUNDLED.match(path.name)
        if bundled and not _OWN.search(f"/{relative}"):
            licence = LIBRARIES.get(bundled[1], "")
            if not is_allowed(licence):
                yield f"{owner}: {path.name} has a licence that is not known or not allowed here"
        for fault in _faults_of_content(path):
            yield f"{owner}: {path.name} {fault}, which is not allowed"


def _faults_of_content(path: Path) -> list[str]:
    if path.stat().st_size == 0:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        needed = {match[1].decode() for match in _NEEDED.finditer(content)}
        stated = {match[1].decode() for match in _FFMPEG.finditer(content)}
    faults = [f"needs {library}" for library in sorted(needed)]
    return faults + [f"says {licence}" for licence in sorted(stated) if licence[:5] != "LGPL "]


def licence_of(package: importlib.metadata.Distribution) -> str:
    """Return the SPDX expression of a package, or an empty string if none can be read."""
    name = _normal(package.metadata["Name"])
    if name in PACKAGES:
        return PACKAGES[name]
    classifiers = [
        value.rpartition(" :: ")[2]
        for value in _values(package, "Classifier")
        if value.startswith("License :: ")
    ]
    stated = (
        *_values(package, "License-Expression"),
        *_values(package, "License"),
        *classifiers,
    )
    for text in stated:
        try:
            return canonicalize_license_expression(TEXTS.get(text.strip().lower(), text))
        except InvalidLicenseExpression:
            continue
    return classifiers[0] if classifiers else ""


def _values(package: importlib.metadata.Distribution, field: str) -> list[str]:
    return list(package.metadata.get_all(field) or ())


def is_allowed(expression: str) -> bool:
    """Return whether an SPDX expression allows publication: all of AND, one of OR."""
    tokens = _TOKEN.findall(expression)
    return _any_of(tokens) and not tokens


def _any_of(tokens: list[str]) -> bool:
    allowed = _all_of(tokens)
    while tokens and tokens[0] == "OR":
        tokens.pop(0)
        allowed = _all_of(tokens) or allowed
    return allowed


def _all_of(tokens: list[str]) -> bool:
    allowed = _one(tokens)
    while tokens and tokens[0] == "AND":
        tokens.pop(0)
        allowed = _one(tokens) and allowed
    return allowed


def _one(tokens: list[str]) -> bool:
    if not tokens:
        return False
    licence = tokens.pop(0)
    if licence == "(":
        allowed = _any_of(tokens)
        return bool(tokens and tokens.pop(0) == ")") and allowed
    exception = ""
    if tokens and tokens[0] == "WITH":
        tokens.pop(0)
        exception = tokens.pop(0) if tokens else "none"
    if exception == "GCC-exception-3.1":
        return licence in {"GPL-3.0-or-later", "GPL-2.0-or-later"}
    return licence in ALLOWED and exception in {"", "LLVM-exception"}


def _packages(directory: Path) -> list[importlib.metadata.Distribution]:
    found = importlib.metadata.distributions(path=[str(directory)])
    return sorted(found, key=lambda package: _normal(package.metadata["Name"]))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
