"""Names in the folder of the adapter cache, `<cache>/<digest>/adapter.safetensors`."""

from __future__ import annotations

import re

ADAPTER_FILE = "adapter.safetensors"
PARTIAL_PREFIX = ".partial-"
"""Prefix of folders that are being written; the process id of the writer and another dash follow."""
DIGEST = re.compile(r"[0-9a-f]{64}")
