"""Triton's interpreter without repeated work.

At every call of a device function the interpreter looks through all names of `triton.language` and replaces those that
kernels call. The first call of a launch has done that for all others with the same modules. A fifth of the time of a
kernel goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace_names_once() -> None:
    """From now on, the interpreter replaces the names of a module once in a launch. No effect on a GPU."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    keys: dict[Callable[..., Any], tuple[bool, ...]] = {}
    """Which of the two modules each function sees."""
    replaced: set[tuple[bool, ...]] = set()
    """Those of the current launch."""

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        return launch(self, *args, **kwargs)

    def patched(fn: Callable[..., Any]) -> Any:
        if fn not in keys:
            seen = list(fn.__globals__.values())
            keys[fn] = tuple(any(each is lang for each in seen) for lang in (tl, tl.core))
        if keys[fn] in replaced:
            return interpreter._LangPatchScope()
        replaced.add(keys[fn])
        return patch_lang(fn)

    vars(interpreter)["_patch_lang"] = patched
    interpreter.GridExecutor.__call__ = launched
