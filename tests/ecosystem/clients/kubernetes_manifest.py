"""`kubernetes_manifest.py FILE`: read every object of a manifest as Kubernetes's own client types, strictly.

The types are made from the API server's OpenAPI description. A field that a type does not have, a value of another
kind, and a required field that is missing end the program.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client import models

KINDS = {"str": str, "int": int, "bool": bool, "float": float, "object": (str, int, dict)}


def check(value: Any, kind: str, place: str) -> None:
    """Raise TypeError or KeyError unless `value` is of the client's `kind`."""
    if inner := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        for number, item in enumerate(value):
            check(item, inner[1], f"{place}[{number}]")
    elif inner := re.fullmatch(r"[Dd]ict[(\[]str, (.*)[)\]]", kind):
        for key, item in value.items():
            check(item, inner[1], f"{place}.{key}")
    elif kind in KINDS:
        if not isinstance(value, KINDS[kind]) or (kind == "int" and isinstance(value, bool)):
            raise TypeError(f"{place}: {value!r} is no {kind}")
    else:
        check_object(value, getattr(models, kind), place)


def check_object(value: dict[str, Any], kind: Any, place: str) -> None:
    """Check every field, and that required ones are there."""
    names = {theirs: ours for ours, theirs in kind.attribute_map.items()}
    for key, item in value.items():
        if key not in names:
            raise KeyError(f"{place}.{key} is no field of {kind.__name__}")
        check(item, kind.openapi_types[names[key]], f"{place}.{key}")
    # The constructor refuses an object without its required fields.
    kind(**{names[key]: item for key, item in value.items()})


def main() -> None:
    """Check the file."""
    for document in yaml.safe_load_all(Path(sys.argv[1]).read_text()):
        version = document["apiVersion"].rpartition("/")[2].capitalize()
        kind = f"{version}{document['kind']}"
        check_object(document, getattr(models, kind), document["kind"])
        sys.stdout.write(f"passed {document['kind']}\n")


if __name__ == "__main__":
    main()
