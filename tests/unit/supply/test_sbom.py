"""The SBOM of an image has its locked packages, and the FFmpeg that it is built with."""

from __future__ import annotations

import re
from pathlib import Path

import orjson
import pytest
from support.paths import ROOT

from supply.sbom import IMAGES, main


@pytest.fixture
def boms(tmp_path: Path) -> dict[str, list[dict[str, object]]]:
    """Return the components of each image. The stand-in for cyclonedx-py lists the packages."""
    program = tmp_path / "cyclonedx"
    program.write_text(
        "#!/bin/sh\n"
        'test "$1" = requirements || exit 1\n'
        """sed -n 's/^\\([a-z0-9.-]*\\)==.*/{"name": "\\1"}/p' "$2" | paste -sd, | """
        """sed 's/^/{"components": [/; s/$/]}/'\n"""
    )
    program.chmod(0o755)
    folder = tmp_path / "new/folder"
    assert main([str(folder), "--cyclonedx", str(program)]) == 0
    assert {path.name for path in folder.iterdir()} == {f"{image}.cdx.json" for image in IMAGES}
    return {
        image: orjson.loads((folder / f"{image}.cdx.json").read_bytes())["components"]
        for image in IMAGES
    }


def test_each_image_has_its_packages(boms: dict[str, list[dict[str, object]]]) -> None:
    names = {image: {part["name"] for part in parts} for image, parts in boms.items()}
    assert all("grpcio" in found for found in names.values())
    assert "torch" not in names["edge"]
    assert {"torch", "av", "ffmpeg"} <= names["worker-cpu"]
    assert {"torch", "av", "ffmpeg", "nvidia-cublas"} <= names["worker-cuda"]


def test_ffmpeg_is_the_one_of_the_build(boms: dict[str, list[dict[str, object]]]) -> None:
    script = (ROOT / "deploy/images/build_ffmpeg.sh").read_text()
    (version,) = re.findall(r"^VERSION=(.*)$", script, re.MULTILINE)
    (part,) = [part for part in boms["worker-cpu"] if part["name"] == "ffmpeg"]
    assert part["version"] == version
    assert f"ffmpeg-{version}.tar.xz" in str(part["externalReferences"])
