"""Imports go one way: the rule table of the folders, checked on every source file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("proto", "edge", "scheduler", "worker", "tools")

# What files below a package must not import.
FORBIDDEN = {
    "duplane.fabric": (
        "duplane.edge",
        "duplane.scheduler",
        "duplane.worker",
        "duplane.tools",
        "torch",
    ),
    "duplane.edge": ("duplane.scheduler", "duplane.worker", "duplane.tools", "torch"),
    "duplane.edge.dialects": ("asyncio", "websockets", "grpc", "uvloop"),
    "duplane.scheduler": ("duplane.edge", "duplane.worker", "duplane.tools", "torch"),
    "duplane.worker": ("duplane.edge", "duplane.scheduler", "duplane.tools"),
    "duplane.worker.model": ("duplane.fabric", "grpc", "asyncio", "websockets", "uvloop"),
}


def imports_of(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def module_name(folder: str, source: Path) -> str:
    return ".".join(source.relative_to(ROOT / folder).with_suffix("").parts)


SOURCES = [
    (module_name(folder, source), source)
    for folder in FOLDERS
    for source in sorted((ROOT / folder / "duplane").rglob("*.py"))
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
    """Only the model, its device, and what builds, checks and measures checkpoints import torch."""
    allowed = (
        "duplane.worker.model",
        "duplane.worker.device",
        "duplane.tools.tiny",
        "duplane.tools.replay",
        "duplane.tools.checkpoints",
        "duplane.tools.bench.model",
        "duplane.tools.bench.peaks",
        "duplane.tools.bench.stages",
        "duplane.tools.bench.syncs",
    )
    broken = [
        name
        for name, source in SOURCES
        if not any(is_below(name, package) for package in allowed)
        for imported in imports_of(source)
        if is_below(imported, "torch")
    ]
    assert not broken
