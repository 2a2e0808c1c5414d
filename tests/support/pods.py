"""Pods of a rendered chart without a cluster: volumes as folders, and expanded arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.chart import Rendered

Secrets = Mapping[str, Mapping[str, bytes]]
"""The files of each secret."""


def volumes_of(rendered: Rendered, pod: Any, folder: Path, secrets: Secrets) -> None:
    """Write the volumes of a pod below `folder`, at the paths at which they are mounted.

    A secret or a claim that `secrets` does not have becomes an empty folder.
    """
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in pod["containers"][0]["volumeMounts"]:
        target = folder / mount["mountPath"].lstrip("/")
        target.mkdir(parents=True)
        match volumes[mount["name"]]:
            case {"secret": {"secretName": name, "defaultMode": mode}}:
                project(target, secrets.get(name, {}), mode)
            case {"configMap": {"name": name}}:
                texts = rendered.of_kind("ConfigMap")[name]["data"]
                project(target, {key: text.encode() for key, text in texts.items()}, 0o644)
            case _:
                pass


def project(folder: Path, files: Mapping[str, bytes], mode: int) -> None:
    """Write files as the kubelet does: links to a folder that is replaced as a whole."""
    content = folder / "..2026_01_01"
    content.mkdir()
    (folder / "..data").symlink_to(content.name)
    for name, text in files.items():
        file = content / name
        file.write_bytes(text)
        file.chmod(mode)
        (folder / name).symlink_to(Path("..data") / name)


def expanded(pod: Any, folder: Path, variables: Mapping[str, str]) -> Sequence[str]:
    """Return the arguments of a pod, with its variables, and with its files in `folder`."""
    found: list[str] = []
    for argument in pod["containers"][0]["args"]:
        for name, value in variables.items():
            argument = argument.replace(f"$({name})", value)
        flag, separator, value = argument.partition("=")
        path = f"{folder}{value}" if value.startswith("/") else value
        found.append(f"{flag}{separator}{path}")
    return found


def create_missing(arguments: Sequence[str], folder: Path) -> None:
    """Create what arguments name in the volumes below `folder`: models are folders."""
    for argument in arguments:
        path = Path(argument.partition("=")[2])
        if path.is_relative_to(folder) and not path.exists():
            if path.is_relative_to(folder / "models"):
                path.mkdir(parents=True)
            else:
                path.touch(mode=0o600)
