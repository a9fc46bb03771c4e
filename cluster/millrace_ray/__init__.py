"""Millrace on a Ray cluster. Nothing else of Millrace imports Ray.

Entry points: `__main__`, a child of the launcher with `--cluster ray`, which places the ranks of one model on several
hosts; `app`, which `serve run millrace_ray:app` runs, for replicas of a whole server (`serving`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve import Application


def app(arguments: Mapping[str, object]) -> Application:
    """The application for Ray Serve from its arguments; docs/several-hosts.md lists them."""
    # Ray Serve takes a second to load, and the child of the launcher does without it.
    from millrace_ray.serving.application import build  # noqa: PLC0415

    return build(arguments)
