"""Writes an SBOM (CycloneDX) of each image: python -m supply.sbom DIRECTORY

It lists the packages of the image's locks with their hashes, and the FFmpeg of the worker's image.
The packages of Debian in the base image are not in it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from supply.locks import FOLDER, ROOT

IMAGES = {
    "edge": ("edge",),
    "worker-cpu": ("worker-cpu", "av"),
    "worker-cuda": ("worker-cuda", "av"),
}
_BUILD_FFMPEG = ROOT / "deploy" / "images" / "build_ffmpeg.sh"


def main(arguments: Sequence[str]) -> int:
    """Write the SBOMs; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m supply.sbom", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cyclonedx", default="cyclonedx-py", help="program cyclonedx-py")
    given = parser.parse_args(arguments)
    given.directory.mkdir(parents=True, exist_ok=True)
    for image, locks in IMAGES.items():
        text = "\n".join((FOLDER / f"{lock}.txt").read_text(encoding="utf-8") for lock in locks)
        bom = _of_packages(given.cyclonedx, text)
        if "av" in locks:
            bom["components"].append(ffmpeg())
        path = given.directory / f"{image}.cdx.json"
        path.write_bytes(orjson.dumps(bom, option=orjson.OPT_INDENT_2))
        print(f"{path}: {len(bom['components'])} components")
    return 0


def ffmpeg() -> dict[str, Any]:
    """Return FFmpeg as a component, from the script that builds it."""
    script = _BUILD_FFMPEG.read_text(encoding="utf-8")
    version, sha256 = (
        re.findall(rf"^{name}=(\S+)$", script, re.MULTILINE)[0] for name in ("VERSION", "SHA256")
    )
    return {
        "type": "library",
        "bom-ref": f"ffmpeg=={version}",
        "name": "ffmpeg",
        "version": version,
        "purl": f"pkg:generic/ffmpeg@{version}?checksum=sha256:{sha256}",
        "licenses": [{"license": {"id": "LGPL-2.1-or-later"}}],
        "externalReferences": [
            {
                "type": "source-distribution",
                "url": f"https://ffmpeg.org/releases/ffmpeg-{version}.tar.xz",
                "hashes": [{"alg": "SHA-256", "content": sha256}],
            }
        ],
    }


def _of_packages(cyclonedx: str, locks: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(locks)
        file.flush()
        done = subprocess.run(
            (
                *(cyclonedx, "requirements", file.name, "--output-reproducible"),
                *("--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application"),
            ),
            stdout=subprocess.PIPE,
            check=True,
        )
    return orjson.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
