"""The check of licences finds what may not be published."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from supply.licences import faults_of_files, faults_of_packages, is_allowed, main

PACKAGES = Path(sysconfig.get_path("purelib"))


def plant(folder: Path, name: str, *lines: str) -> None:
    """Install a package that consists of metadata."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    head = ("Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0")
    (info / "METADATA").write_text("\n".join((*head, *lines)) + "\n")


@pytest.mark.slow
def test_no_installed_package_has_a_licence_that_is_not_allowed() -> None:
    assert list(faults_of_packages(PACKAGES, set())) == []


@pytest.mark.parametrize(
    ("stated", "shown"),
    [
        ("License-Expression: GPL-3.0-or-later", "GPL-3.0-or-later is not allowed"),
        ("License-Expression: MIT AND GPL-2.0-only", "MIT AND GPL-2.0-only is not allowed"),
        ("License: AGPL-3.0-only", "AGPL-3.0-only is not allowed"),
        (
            "Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)",
            "GNU General Public License v3 (GPLv3) is not allowed",
        ),
        ("License: see the web page", "has no licence that is known here"),
        ("Summary: says nothing", "has no licence that is known here"),
    ],
)
def test_a_planted_package_is_found(
    stated: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path, "allowed", "License-Expression: MIT")
    plant(tmp_path, "planted-package", stated)
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == (f"planted-package: {shown}\n2 packages, 1 not allowed\n")
    assert main([str(tmp_path), "--except", "Planted_Package"]) == 0


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True),
        ("GPL-2.0-only OR MIT", True),
        ("GPL-2.0-only AND MIT", False),
        ("MPL-2.0 AND (Apache-2.0 OR GPL-3.0-only)", True),
        ("MPL-2.0 AND (AGPL-3.0-only OR GPL-3.0-only)", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("Apache-2.0 WITH Classpath-exception-2.0", False),
        ("GPL-3.0-or-later WITH GCC-exception-3.1", True),
        ("AGPL-3.0-only WITH GCC-exception-3.1", False),
        ("", False),
        ("MIT)", False),
        ("(MIT", False),
    ],
)
def test_an_expression_is_allowed_as_a_whole(expression: str, *, expected: bool) -> None:
    assert is_allowed(expression) is expected


@pytest.mark.parametrize(
    ("name", "content", "shown"),
    [
        (
            "video.libs/libavcodec-5e6b81c2.so.62",
            b"\x7fELF\0libx264-d6533a8d.so.165\0",
            "video: libavcodec-5e6b81c2.so.62 needs libx264-d6533a8d.so.165, which is not allowed",
        ),
        (
            "video/codec.so",
            b"\x7fELF\0libx265.so.216\0",
            "video: codec.so needs libx265.so.216, which is not allowed",
        ),
        (
            "libavutil.so.60",
            b"\x7fELF\0libavutil license: GPL version 3 or later\0",
            "libavutil-so-60: libavutil.so.60 says GPL version 3 or later, which is not allowed",
        ),
        (
            "video.libs/libstrange-5e6b81c2.so.6",
            b"\x7fELF\0",
            "video: libstrange-5e6b81c2.so.6 has a licence that is not known or not allowed here",
        ),
        ("libavutil.so.60", b"\x7fELF\0libavutil license: LGPL version 2.1 or later\0", ""),
        ("libavutil.so.61", b"", ""),
    ],
)
def test_a_library_is_known_and_needs_none_that_is_not_allowed(
    name: str, content: bytes, shown: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert list(faults_of_files(tmp_path)) == [shown] * bool(shown)


def test_the_wheel_of_pyav_is_found(tmp_path: Path) -> None:
    """This is why the images build it from source."""
    wheel = PACKAGES / "av.libs"
    if not wheel.exists():
        pytest.skip("PyAV was built from source here")
    (tmp_path / "av.libs").symlink_to(wheel)
    for library in wheel.glob("libavcodec-*"):
        (tmp_path / library.name).symlink_to(library)
    faults = "\n".join(faults_of_files(tmp_path))
    assert "needs libx264-" in faults
    assert "needs libx265-" in faults


def test_what_is_no_directory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["/nowhere/at/all"])
    assert ended.value.code == 2
    assert "/nowhere/at/all: is no directory" in capsys.readouterr().err
