"""Checks rules of the source tree: directions and cycles of imports, sizes of folders and files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support.paths import ROOT

FOLDERS = ("proto", "edge", "scheduler", "worker", "tools", "clients/python")
# Packages in tools/ that the wheel does not have.
OUTSIDE = ("pages", "supply", "training")

_IO = ("asyncio", "websockets", "aiohttp", "grpc", "uvloop")

MINICPM_O, SCRIPTED = "duplane.worker.models.minicpm_o", "duplane.worker.models.scripted"
FAMILIES = (MINICPM_O, SCRIPTED)
_ENGINE = ("duplane.worker.engine", "duplane.worker.session", "duplane.worker.service")

# Package -> modules that its files must not import.
FORBIDDEN = {
    "duplane": OUTSIDE,
    "duplane.fabric": (
        "duplane.edge",
        "duplane.scheduler",
        "duplane.worker",
        "duplane.tools",
        "duplane.client",
        "torch",
    ),
    "duplane.client": ("duplane.fabric", "duplane.edge", "duplane.tools", "numpy", "orjson"),
    "duplane.edge": (
        "duplane.scheduler",
        "duplane.worker",
        "duplane.tools",
        "duplane.client",
        "torch",
    ),
    "duplane.edge.payload": (*_IO, "duplane.edge.dialects", "duplane.edge.session"),
    "duplane.edge.dialects": (*_IO, "duplane.edge.session", "duplane.edge.transport"),
    "duplane.edge.speech": (*_IO, "duplane.edge.dialects", "duplane.edge.session"),
    "duplane.scheduler": (
        "duplane.edge",
        "duplane.worker",
        "duplane.tools",
        "duplane.client",
        "torch",
    ),
    "duplane.scheduler.policy": (*_IO, "duplane.scheduler.rpc", "duplane.scheduler.state"),
    "duplane.worker": ("duplane.edge", "duplane.scheduler", "duplane.tools", "duplane.client"),
    "duplane.worker.engine": FAMILIES,
    "duplane.worker.session": FAMILIES,
    "duplane.worker.service": FAMILIES,
    "duplane.worker.models.types": (*_IO, *FAMILIES, "duplane.fabric", "torch"),
    "duplane.worker.models.chat": (*_IO, *FAMILIES, "duplane.fabric", "torch"),
    "duplane.worker.models.interface": (*_IO, *FAMILIES, "duplane.fabric", "torch"),
    "duplane.worker.models.families": FAMILIES,
    MINICPM_O: (*_IO, *_ENGINE, "duplane.fabric", SCRIPTED),
    SCRIPTED: (*_IO, *_ENGINE, "duplane.fabric", "torch", MINICPM_O),
}

# For each folder of the model: the folders that it may import, besides BASE. BASE are the modules
# at the root of the model, without those that build the model or use it.
MODEL = MINICPM_O
NETWORKS = ("audio", "vision", "llm", "tts", "vocoder")
MODEL_FOLDERS = {
    "audio": ("blocks",),
    "vision": (),
    "attention": (),
    "blocks": (),
    "llm": ("attention", "blocks"),
    "tts": ("attention", "llm"),
    "vocoder": ("audio", "blocks"),
    "packing": ("llm",),
    "preparer_parts": ("audio", "vision", "llm", "vocoder"),
    "loader": (*NETWORKS, "packing", "preparer_parts"),
    "memory": (*NETWORKS, "preparer_parts", "loader"),
    "duplex": (*NETWORKS, "preparer_parts", "loader"),
    "chat": (*NETWORKS, "preparer_parts", "loader"),
    "preparer": ("vocoder", "preparer_parts", "duplex", "chat"),
    "launches": (*NETWORKS, "loader", "duplex", "chat"),
    "model": (*NETWORKS, "preparer_parts", "loader", "duplex", "chat", "preparer", "launches"),
    "worker_model": ("chat", "preparer", "model"),
    "two_lanes": ("audio", "llm", "tts", "vocoder", "preparer", "model"),
    "family": (
        *("vision", "preparer_parts", "memory", "preparer", "model", "worker_model"),
        "two_lanes",
    ),
}
BASE = (
    "batch_isolation",
    "batch_sizes",
    "checkpoint",
    "dtype",
    "layers",
    "precision",
    "probe",
    "proof",
    "stopwatch",
    "transfer",
    "types",
)


def imports_of(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert not getattr(node, "level", 0), f"{source}: relative import"
            yield from imported_by(node)


def imported_by(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    yield node.module or ""
    yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def module_name(folder: str, source: Path) -> str:
    return ".".join(source.relative_to(ROOT / folder).with_suffix("").parts)


SOURCES = [
    (module_name(folder, source), source)
    for folder, package in [
        *((folder, "duplane") for folder in FOLDERS),
        *(("tools", package) for package in OUTSIDE),
    ]
    for source in sorted((ROOT / folder / package).rglob("*.py"))
]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_package_imports_only_what_it_may(package: str) -> None:
    members = [(name, source) for name, source in SOURCES if is_below(name, package)]
    assert members, f"no source below {package}"
    broken = [
        f"{name} imports {imported}"
        for name, source in members
        for imported in imports_of(source)
        for forbidden in FORBIDDEN[package]
        if is_below(imported, forbidden)
    ]
    assert not broken, "\n".join(broken)


def test_no_folder_owns_the_namespace() -> None:
    owners = [folder for folder in FOLDERS if (ROOT / folder / "duplane/__init__.py").exists()]
    assert not owners


def test_base_install_needs_no_torch() -> None:
    """Only the model, its device, and tools for checkpoints, devices and benchmarks need torch."""
    allowed = (
        MINICPM_O,
        "duplane.worker.models.torch_device",
        "duplane.tools.golden_replay",
        "duplane.tools.checkpoint",
        "duplane.tools.doctor.device",
        "training",
        "duplane.tools.bench.launches",
        "duplane.tools.bench.model",
        "duplane.tools.bench.peaks",
        "duplane.tools.bench.rebuild",
        "duplane.tools.bench.rebuild_window",
        "duplane.tools.bench.stages",
        "duplane.tools.bench.host_waits",
    )
    broken = [
        name
        for name, source in SOURCES
        if not any(is_below(name, package) for package in allowed)
        for imported in imports_of(source)
        if is_below(imported, "torch")
    ]
    assert not broken


def part_of_model(name: str) -> str | None:
    """Return the folder of the model that contains a module; for a module at the root, its name."""
    if not is_below(name, MODEL) or name == MODEL:
        return None
    return name.removeprefix(f"{MODEL}.").split(".")[0]


def test_folders_of_the_model_import_one_way() -> None:
    broken: list[str] = []
    for name, source in SOURCES:
        part = part_of_model(name)
        if part is None or part == "__init__":
            continue
        allowed = {part, *BASE, *MODEL_FOLDERS.get(part, ())}
        assert part in MODEL_FOLDERS or part in BASE, f"{name} is in no folder of the table"
        broken += [
            f"{name} imports {imported}"
            for imported in imports_of(source)
            if part_of_model(imported) not in (None, *allowed)
        ]
    assert not broken, "\n".join(broken)


def test_only_functions_that_need_kernels_import_triton() -> None:
    """A worker on a CPU has no Triton, and importing it takes a second."""

    def is_kernel(name: str) -> bool:
        return any(part.startswith("triton") for part in name.split("."))

    broken = [
        f"{name}: {ast.unparse(node)}"
        for name, source in SOURCES
        if not is_kernel(name)
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(is_kernel(imported) for imported in imported_by(node))
    ]
    assert not broken, "\n".join(broken)


def test_there_is_no_import_cycle() -> None:
    modules = {name.removesuffix(".__init__") for name, _ in SOURCES}
    graph = {
        name.removesuffix(".__init__"): {
            imported for imported in imports_of(source) if imported in modules
        }
        for name, source in SOURCES
    }
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    assert set(order) == modules
