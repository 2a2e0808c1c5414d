"""Every third-party package that the code imports is declared, and pinned."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.slow

CLIENTS = ROOT / "tests/clients"  # its programs have packages of their own
FOLDERS = ("proto", "edge", "scheduler", "worker", "tools")
OURS = {"duplane", "pages", "supply", "training", "support", "fuzz"}


def project() -> dict[str, list[str]]:
    """Return the declared requirements of each extra; the key "" is the base install."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[\[<>=! ;]", requirement)[0]) for requirement in requirements}


def imported_modules(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(*folders: str) -> list[Path]:
    return [
        source
        for folder in folders
        for source in (ROOT / folder).rglob("*.py")
        if CLIENTS not in source.parents
    ]


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


@functools.cache
def files_of(package: str) -> frozenset[str]:
    return frozenset(str(file) for file in importlib.metadata.files(package) or ())


@functools.cache
def packages_of(module: str) -> frozenset[str]:
    """Return the packages that provide a module.

    Several packages share the names google and grpc.
    """
    owners = set(distributions().get(module.partition(".")[0], []))
    if len(owners) > 1:
        path = module.replace(".", "/")
        providing = {f"{path}.py", f"{path}.pyi", f"{path}/__init__.py"}
        owners = {owner for owner in owners if files_of(owner) & providing}
    return frozenset(normal(owner) for owner in owners)


def foreign(files: list[Path]) -> dict[str, str]:
    """Return imported third-party modules, each with one file that imports it."""
    return {
        module: str(source.relative_to(ROOT))
        for source in files
        for module in imported_modules(source)
        if module.partition(".")[0] not in sys.stdlib_module_names | OURS | {""}
    }


@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        (("proto", "edge", "scheduler"), ("", "jwt", "vad")),
        (("worker", "tools"), ("", "worker", "dev")),
        (("tests",), ("", "worker", "dev")),
    ],
    ids=["base", "worker", "tests"],
)
def test_every_imported_package_is_declared(
    folders: tuple[str, ...], extras: tuple[str, ...]
) -> None:
    declared = {name for extra in extras for name in names(project()[extra])}
    missing = {
        f"{module} ({', '.join(packages)}), imported in {source}"
        for module, source in foreign(sources(*folders)).items()
        if (packages := packages_of(module)) and not packages & declared
    }
    assert not missing


def test_every_declared_package_is_pinned() -> None:
    pinned = names((ROOT / "constraints.txt").read_text().splitlines()[1:])
    declared = {name for requirements in project().values() for name in names(requirements)}
    assert not declared - pinned
    assert all("==" in line for line in (ROOT / "constraints.txt").read_text().splitlines()[1:])


def test_every_declared_package_of_the_product_is_imported() -> None:
    imported = {package for module in foreign(sources(*FOLDERS)) for package in packages_of(module)}
    loaded_by_others = {"transformers"}
    declared = {name for extra in ("", "jwt", "worker") for name in names(project()[extra])}
    assert declared - imported - loaded_by_others == set()
