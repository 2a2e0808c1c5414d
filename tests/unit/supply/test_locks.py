"""The locks have the versions of constraints.txt, a hash of each file, and all that is declared."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from support.paths import ROOT

from supply.locks import FOLDER, LOCKS, main

ENTRY = re.compile(r"([a-z0-9.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    return normal(re.split(r"[\[<>=! ;]", requirement)[0])


@pytest.fixture(scope="module")
def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


def locked(name: str) -> dict[str, str]:
    """Return the versions of a lock, which has nothing but packages with hashes."""
    text = (FOLDER / f"{name}.txt").read_text()
    entries = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    assert ENTRY.sub("", entries) == ""
    return {package: version for package, version, _ in ENTRY.findall(entries)}


def test_each_lock_has_a_file() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.txt" for name in LOCKS}


@pytest.mark.parametrize("name", [name for name, lock in LOCKS.items() if not lock.is_tool])
def test_the_versions_are_those_of_all_installs(name: str, constraints: dict[str, str]) -> None:
    expected = dict(constraints)
    if LOCKS[name].has_cpu_torch:
        expected["torch"] += "+cpu"
    assert {
        package: version
        for package, version in locked(name).items()
        if expected.get(package) != version
    } == {}


@pytest.mark.parametrize("name", LOCKS)
def test_what_is_declared_is_locked(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = LOCKS[name].extras
    declared = [*LOCKS[name].packages, *(project["dependencies"] if extras else ())]
    declared += [package for extra in extras for package in project["optional-dependencies"][extra]]
    missing = {name_of(requirement) for requirement in declared} - set(locked(name))
    assert missing == set(LOCKS[name].omits) - {"numpy"}


def test_workers_get_av_from_its_own_lock() -> None:
    assert set(locked("av")) == {"av"}
    assert not {"av"} & (set(locked("worker-cpu")) | set(locked("worker-cuda")))


def test_no_image_has_tools_of_development() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Packages of images need these, too.
    needed = {"opentelemetry-exporter-otlp-proto-common", "packaging", "pyjwt", "triton"}
    dev = {name_of(package) for package in project["optional-dependencies"]["dev"]} - needed
    for name in ("edge", "worker-cpu", "worker-cuda"):
        assert not dev & set(locked(name))


def test_only_the_image_for_gpus_has_cuda_and_only_workers_have_torch() -> None:
    assert "torch" not in locked("edge")
    assert not [package for package in locked("worker-cpu") if package.startswith("nvidia-")]
    assert "nvidia-cublas" in locked("worker-cuda")


def test_the_command_refuses_an_unknown_lock(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["worker-tpu"])
    assert ended.value.code == 2
    assert "worker-tpu: must be one of edge, worker-cpu" in capsys.readouterr().err


def test_the_command_gives_uv_all_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for uv writes what it is given."""
    monkeypatch.setattr("supply.locks.FOLDER", tmp_path)
    uv = tmp_path / "uv"
    uv.write_text(
        "#!/bin/sh\n"
        f'while [ "$1" != --constraints ]; do shift; done\n'
        f"cat > {tmp_path}/packages\n"
        f'cat "$2" > {tmp_path}/constraints\n'
    )
    uv.chmod(0o755)
    assert main(["worker-cpu", "--uv", str(uv), "--cpu-torch", str(tmp_path)]) == 0
    constraints = (tmp_path / "constraints").read_text()
    (torch,) = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert (tmp_path / "packages").read_text() == f"{torch}+cpu"
    assert "aiohttp==" in constraints
    assert "\ntorch==" not in constraints
