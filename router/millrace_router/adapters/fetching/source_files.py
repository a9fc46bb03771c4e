"""The two files of an adapter, as they come from a folder or the hub."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from millrace_router.adapters.fetching.errors import Invalid, TooLarge
from millrace_router.adapters.fetching.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Private copies, each read once."""

    config: bytearray
    weights: bytearray

    def digest(self) -> str:
        """The key under which a refusal of these files is remembered."""
        parts = [hashlib.sha256(part).hexdigest() for part in (self.config, self.weights)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def check_listing(sizes: dict[str, int], max_bytes: int) -> None:
    """Check the files of an adapter by name and size, before any is read.

    Raises:
        Invalid: a file is missing, or there is a pickle alone.
        TooLarge: a file is larger than allowed.

    """
    if CONFIG_FILE not in sizes:
        raise Invalid(f"there is no {CONFIG_FILE}")
    if WEIGHTS_FILE not in sizes:
        pickle = next((name for name in PICKLES if name in sizes), None)
        raise Invalid(
            f"there is no {WEIGHTS_FILE}"
            if pickle is None
            else f"there is no {WEIGHTS_FILE}; {pickle} is a pickle, which can run code and is never loaded"
        )
    if sizes[CONFIG_FILE] > MAX_CONFIG_BYTES:
        raise Invalid(f"{CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
    if sizes[WEIGHTS_FILE] > max_bytes:
        raise TooLarge(sizes[WEIGHTS_FILE], max_bytes)
