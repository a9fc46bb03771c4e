"""`chart.py FOLDER RELEASE NAMESPACE`: lint and render a chart with Helm's own library.

Reads a list of values as JSON from stdin. Prints for each, as JSON, `messages` of the strict linter, the `objects` and
`invalid`: what Kubernetes's schemas refuse in those of its own kinds, and in pods. A chart that does not take the
values has `error` alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import helm_python as helm
import kubernetes_validate
import yaml

KUBERNETES = "1.37"
INFORMATION = 1
OWN_GROUPS = {"apps", "autoscaling", "networking.k8s.io", "policy", "v1"}


def checked(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The object itself if it is of Kubernetes's own kinds, and the templates of pods in others."""
    if document["apiVersion"].partition("/")[0] in OWN_GROUPS:
        yield document
    for template in document.get("spec", {}).get("leaderWorkerTemplate", {}).values():
        if isinstance(template, dict):
            name = document["metadata"]["name"]
            yield {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": name},
                "template": template,
            }


def problems(document: dict[str, Any]) -> Iterator[str]:
    """The fields that the schemas refuse."""
    for part in checked(document):
        try:
            kubernetes_validate.validate(part, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{part['kind']} {part['metadata']['name']}: {error.message}"


def answer(folder: str, release: str, namespace: str, values: dict[str, Any]) -> dict[str, Any]:
    """Helm's and the validator's words on one shape."""
    found = helm.lint(folder, values, strict=True, namespace=namespace)
    messages = [one for one in found["messages"] if one["severity"] > INFORMATION]
    with helm.Chart.load(folder) as chart:
        try:
            chart.validate_schema(values)
            files = chart.render(values, name=release, namespace=namespace)
        except helm.HelmError as error:
            return {"error": str(error)}
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    objects = [one for text in texts for one in yaml.safe_load_all(text) if one]
    invalid = [problem for one in objects for problem in problems(one)]
    return {"messages": messages, "objects": objects, "invalid": invalid}


def main() -> None:
    """Answer for each of the values."""
    shapes = json.load(sys.stdin)
    json.dump([answer(*sys.argv[1:4], values) for values in shapes], sys.stdout)


if __name__ == "__main__":
    main()
