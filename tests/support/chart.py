"""The Helm chart, rendered with sets of values by a process with Helm's own library."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
import yaml
from support.paths import ROOT
from support.time_limits import WITHIN_S

CHART = ROOT / "deploy/chart/duplane"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
# The oldest version that the chart accepts, a later one and the latest one with schemas.
VERSIONS = ("1.30", "1.34", "1.37")
NAMESPACE = "speech"
_TOOLS = ROOT / ".clients-chart"
_WITHIN_S = 4 * WITHIN_S  # Helm's library and the schemas are large

needs_chart_tools = pytest.mark.skipif(
    not (_TOOLS / ".installed").exists(), reason="Helm's library: run make clients"
)


@dataclass(frozen=True)
class Rendered:
    """The manifests of one set of values."""

    documents: Sequence[Mapping[str, Any]]
    problems: Sequence[str]
    error: str

    def of_kind(self, kind: str) -> Mapping[str, Any]:
        """Return the manifests of a kind by their names."""
        found = [document for document in self.documents if document["kind"] == kind]
        return {document["metadata"]["name"]: document for document in found}

    def pods(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the specification of the pods of each Deployment."""
        for name, deployment in self.of_kind("Deployment").items():
            yield name, deployment["spec"]["template"]["spec"]

    def pod(self, name: str) -> Any:
        return self.of_kind("Deployment")[name]["spec"]["template"]["spec"]

    def arguments(self, name: str) -> Sequence[str]:
        return self.pod(name)["containers"][0]["args"]


def render(sets: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Rendered]:
    """Render the chart with each set of values, and check the manifests."""
    done = subprocess.run(
        (
            *(str(_TOOLS / "bin/python"), str(ROOT / "tests/clients/helm_chart.py")),
            *(str(CHART), ",".join(VERSIONS)),
        ),
        input=orjson.dumps(sets),
        capture_output=True,
        check=False,
        timeout=_WITHIN_S,
    )
    assert done.returncode == 0, done.stderr.decode()
    return {name: Rendered(**found) for name, found in orjson.loads(done.stdout).items()}


@functools.cache
def rendered_examples() -> Mapping[str, Rendered]:
    return render({name: yaml.safe_load(path.read_text()) for name, path in EXAMPLES.items()})
