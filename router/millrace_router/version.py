"""The version of the server, for its answers."""

from __future__ import annotations

from millrace_proto.version import VERSION

__all__ = ["VERSION"]
