"""`tools/install.py` picks a build of torch, and continues if the index is unreachable."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from support.fabric.processes import alive
from support.paths import ROOT
from support.time_limits import WITHIN_S


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("build", "has_driver", "system", "is_cpu"),
    [
        ("auto", False, "Linux", True),
        ("auto", True, "Linux", False),
        ("cpu", True, "Linux", True),
        ("cuda", False, "Linux", False),
        ("cpu", False, "Darwin", False),
    ],
)
def test_build_of_torch_is_chosen(
    install: ModuleType, build: str, has_driver: bool, system: str, is_cpu: bool
) -> None:
    assert install.wants_cpu_build(build, has_driver=has_driver, system=system) is is_cpu


@pytest.fixture
def calls(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Record the calls of pip instead of running them; calls with an index URL fail."""
    found: list[Sequence[str]] = []

    def pip(_: Path, arguments: Sequence[str]) -> int:
        found.append(arguments)
        return int("--index-url" in arguments)

    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(install.platform, "system", lambda: "Linux")
    monkeypatch.setattr(install, "has_nvidia_driver", lambda: True)  # TORCH=cpu overrides it
    monkeypatch.setattr(install.venv, "create", lambda *_, **__: None)
    return found


def test_index_that_cannot_be_reached_does_not_fail_the_installation(
    install: ModuleType,
    calls: list[Sequence[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert install.main([str(tmp_path)], {"TORCH": "cpu"}) == 0
    torch, everything = calls
    assert torch[-1].startswith("torch==")
    assert install.CPU_INDEX in torch
    assert everything == ("-e", f"{ROOT}[worker,dev]")
    output = capsys.readouterr().out
    assert [line[:5] for line in output.splitlines() if line.startswith("[")] == [
        *("[1/4]", "[2/4]", "[3/4]", "[4/4]")
    ]
    assert "torch comes from the default index" in output


def test_unknown_build_is_refused(
    install: ModuleType, calls: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert install.main([".venv"], {"TORCH": "rocm"}) == 1
    assert "cpu, cuda" in capsys.readouterr().err
    assert not calls


def test_pinned_version_is_read(install: ModuleType) -> None:
    assert install.pinned("torch", "# x\ntorch==2.13.0\n") == "2.13.0"
    with pytest.raises(ValueError, match="jax"):
        install.pinned("jax", "torch==2.13.0\n")


# Replaces `python -m pip`: it writes the first lines of pip's output, then hangs as in a download.
ENDLESS_PIP = """#!/bin/sh
echo "Collecting torch==2.13.0"
echo "  Downloading torch-2.13.0-cp311-linux_x86_64.whl (190.5 MB)"
echo "  Downloading small-1.0.whl (12 kB)"
exec sleep 600
"""


@pytest.mark.parametrize(("build", "size"), [("cpu", "200 MB"), ("cuda", "2.5 GB")])
def test_installation_shows_its_progress_and_ends_at_once_when_interrupted(
    build: str, size: str, tmp_path: Path
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(ENDLESS_PIP)
    python.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "install.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCH": build},
        start_new_session=True,  # like a shell: Ctrl-C reaches the whole process group
    ) as running:
        assert running.stdout
        try:
            shown = [running.stdout.readline()]
            while shown[-1] and "Downloading" not in shown[-1]:
                shown.append(running.stdout.readline())
            (pip,) = psutil.Process(running.pid).children()
            os.killpg(running.pid, signal.SIGINT)
            output, errors = running.communicate(timeout=WITHIN_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 130
    assert not alive([pip])
    assert (output, errors) == ("", "")
    assert shown[0].startswith("[1/4] virtual environment")
    assert shown[1].startswith("[2/4] torch")
    assert size in shown[1]
    assert shown[-1] == "      Downloading torch-2.13.0-cp311-linux_x86_64.whl (190.5 MB)\n"
