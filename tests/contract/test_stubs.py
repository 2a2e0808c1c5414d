"""The committed stubs equal the stubs that are generated from the protos."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.slow

PROTOS = sorted((ROOT / "proto/duplane/fabric/v1").glob("*.proto"))
SCHEDULER = ROOT / "scheduler"
SCHEDULER_PROTOS = sorted(SCHEDULER.rglob("*.proto"))
STUBS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    command = [*protoc, *flags, f"--mypy_grpc_out=quiet:{out}", *map(str, PROTOS)]
    # buf finds protoc's plugin by PATH, which may lack the folder of this interpreter.
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))
    subprocess.run(command, check=True, env={**os.environ, "PATH": path})
    messages = [*protoc, f"-I{SCHEDULER}", *flags[:2], *map(str, SCHEDULER_PROTOS)]
    subprocess.run(messages, check=True)
    return out


@pytest.mark.parametrize("proto", PROTOS, ids=lambda proto: proto.stem)
@pytest.mark.parametrize("suffix", STUBS)
def test_committed_stub_is_fresh(generated: Path, proto: Path, suffix: str) -> None:
    committed = proto.with_name(proto.stem + suffix)
    fresh = generated / "duplane/fabric/v1" / committed.name
    assert committed.read_text() == fresh.read_text(), "run `make proto`"


@pytest.mark.parametrize("proto", SCHEDULER_PROTOS, ids=lambda proto: proto.stem)
@pytest.mark.parametrize("suffix", STUBS[:2])
def test_committed_messages_of_the_scheduler_are_fresh(
    generated: Path, proto: Path, suffix: str
) -> None:
    committed = proto.with_name(proto.stem + suffix)
    fresh = generated / committed.relative_to(SCHEDULER)
    assert committed.read_text() == fresh.read_text(), "run `make proto`"
