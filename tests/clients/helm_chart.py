"""Renders a chart with sets of values as `helm template` does, and checks it like `helm lint`.

usage: helm_chart.py CHART VERSION,... < SETS

SETS is a JSON object of values by name. The output is a JSON object with the outcome of each set:
`documents`; `problems` that lint found, or the strict schemas of these versions of Kubernetes; and
`error`, which is empty if the chart could be rendered.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from typing import Any

import helm_python as helm
import kubernetes_validate
import yaml
from kubernetes_validate import utils

RELEASE = "duplane"
NAMESPACE = "speech"
WARNING = 2  # the lowest severity of lint that is a problem
# Groups of other projects, whose kinds have no schema in Kubernetes.
FOREIGN = ("cert-manager.io", "keda.sh", "monitoring.coreos.com")


def outcome(chart: Any, path: str, versions: list[str], values: dict[str, Any]) -> dict[str, Any]:
    try:
        chart.validate_schema(values)
        files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    except helm.HelmError as error:
        return {"documents": [], "problems": [], "error": str(error)}
    documents = {
        file: [document for document in yaml.safe_load_all(text) if document]
        for file, text in files.items()
        if file.endswith(".yaml")
    }
    problems = [*lint_problems(path, values), *schema_problems(documents, versions)]
    found = [document for of_file in documents.values() for document in of_file]
    return {"documents": found, "problems": problems, "error": ""}


def lint_problems(path: str, values: dict[str, Any]) -> Iterator[str]:
    report = helm.lint(path, values, strict=True, namespace=NAMESPACE)
    yield from report["errors"]
    for message in report["messages"]:
        if message["severity"] >= WARNING:
            yield f"{message['path']}: {message['error']}"


def schema_problems(documents: dict[str, list[Any]], versions: list[str]) -> Iterator[str]:
    for file, found in documents.items():
        for document in found:
            for version in versions:
                if problem := schema_problem(document, version):
                    yield f"{file}, {document['metadata']['name']}, {version}: {problem}"


def schema_problem(document: Any, version: str) -> str:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except utils.SchemaNotFoundError as error:
        group = document["apiVersion"].partition("/")[0]
        return "" if group in FOREIGN else error.message
    except utils.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return ""


def main() -> None:
    # Otherwise the library reads all definitions of a version again for each document.
    utils.schema_contents = functools.cache(utils.schema_contents)
    path, versions = sys.argv[1], sys.argv[2].split(",")
    with helm.Chart.load(path) as chart:
        sets = json.load(sys.stdin).items()
        found = {name: outcome(chart, path, versions, values) for name, values in sets}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
