"""The folder in which Triton keeps compiled kernels; without one, every start of a server compiles for a minute."""

from __future__ import annotations

import os
import tempfile

from millrace_shard.kernels.build import BuildError, cache_folder, check_owners
from millrace_shard.variables import Variables

VARIABLE = "TRITON_CACHE_DIR"


def use_triton_cache() -> None:
    """Let Triton use TRITON_CACHE_DIR, or else the folder triton in Millrace's cache; call this before Triton compiles.

    Raises BuildError if the folder cannot be written, or if other users can write to Millrace's.
    """
    named = Variables().triton_cache_dir
    folder = named or cache_folder("triton")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if named is None:
            check_owners(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        changed = "MILLRACE_CACHE" if named is None else VARIABLE
        raise BuildError(
            f"Triton cannot keep compiled kernels: {error}; {changed} names another folder"
        ) from error
    os.environ[VARIABLE] = str(folder)
