"""`tools/install.py` picks a build of torch, and continues if the index is unreachable."""

from __future__ import annotations

import contextlib
import importlib.util
import json
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


@pytest.fixture
def calls(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Record the calls of pip instead of running them; calls with an index URL fail."""
    found: list[Sequence[str]] = []

    def pip(_: Path, arguments: Sequence[str]) -> int:
        found.append(arguments)
        return int("--index-url" in arguments)

    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(install.platform, "system", lambda: "Linux")
    monkeypatch.setattr(install, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(install, "default_build_needs_cuda", lambda *_: False)
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
    assert everything == ("-e", f"{ROOT}[worker]")
    output = capsys.readouterr().out
    assert [line[:5] for line in output.splitlines() if line.startswith("[")] == [
        *("[1/4]", "[2/4]", "[3/4]", "[4/4]")
    ]
    assert "torch comes from the default index" in output


def test_tools_of_development_are_installed_only_on_request(
    install: ModuleType, calls: list[Sequence[str]], tmp_path: Path
) -> None:
    assert install.main(["--dev", str(tmp_path)], {}) == 0
    assert calls[-1] == ("-e", f"{ROOT}[worker,dev]")


def test_build_with_cuda_is_never_installed_without_its_name(
    install: ModuleType,
    calls: list[Sequence[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a driver, and with an index of CPU builds that cannot be reached."""
    monkeypatch.setattr(install, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(install, "default_build_needs_cuda", lambda *_: True)
    assert install.main([str(tmp_path)], {}) == 1
    output = capsys.readouterr()
    assert "make clean run TORCH=cuda" in output.out
    assert "2.5 GB" in output.err
    assert [call[-1].partition("==")[0] for call in calls] == ["torch"]


@pytest.mark.parametrize(
    ("requirements", "needs_cuda"),
    [(["filelock", "nvidia-cublas==13.1; platform_system == 'Linux'"], True), (["sympy"], False)],
)
def test_default_build_that_needs_cuda_is_noticed(
    install: ModuleType, tmp_path: Path, requirements: list[str], needs_cuda: bool
) -> None:
    """The report is in the form that pip prints."""
    report = json.dumps({"install": [{"metadata": {"requires_dist": requirements}}]})
    python = fake_python(tmp_path, f"cat <<'END'\n{report}\nEND\n")
    assert install.default_build_needs_cuda(python, "torch==2.13.0") is needs_cuda


def test_path_with_a_space_reaches_pip_as_one_constraint(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraints = tmp_path / "a b" / "constraints.txt"
    constraints.parent.mkdir()
    constraints.write_text("torch==2.13.0\n")
    monkeypatch.setattr(install, "CONSTRAINTS", constraints)
    python = fake_python(tmp_path, f'echo "$PIP_CONSTRAINT" >"{tmp_path}/found"\n')
    assert install.pip(python, ()) == 0
    found = (tmp_path / "found").read_text().split()
    assert len(found) == 1
    assert found[0].startswith("file:///")
    assert found[0].endswith("a%20b/constraints.txt")


def test_silent_installation_says_that_it_works(
    install: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(install, "SILENCE_S", 0.01)
    assert install.pip(fake_python(tmp_path, "sleep 0.5\n"), ()) == 0
    assert "pip works since" in capsys.readouterr().out


def fake_python(folder: Path, script: str) -> Path:
    """Return a program that runs `script` instead of pip."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}")
    python.chmod(0o755)
    return python


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
