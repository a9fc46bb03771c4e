"""Triton's interpreter without work whose result it does not use.

Half of the time of a kernel goes with it: most of it is Python's, since tests have small shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def spare_unused_work() -> None:
    """From now on, interpret kernels faster, to the same bits. No effect on a GPU."""
    _replace_names_once()
    _check_no_overflow()
    _broadcast_what_differs()
    _look_types_up_once()


def _replace_names_once() -> None:
    """Replace the names of a module once in a launch.

    At every call of a device function the interpreter looks through all names of `triton.language` and replaces those
    that kernels call. The first call of a launch has done that for all others with the same modules.
    """
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


def _check_no_overflow() -> None:
    """Leave out checks of integers: without `debug`, the interpreter computes them and does not look at them."""
    from triton.runtime.interpreter import interpreter_builder as builder

    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _broadcast_what_differs() -> None:
    """Broadcast only blocks of different shapes: the interpreter compares a tuple with a list, which always differ."""
    from triton.runtime.interpreter import interpreter_semantic as semantic

    broadcast = semantic.broadcast_impl_value

    def broadcasted(lhs: Any, rhs: Any) -> Any:
        are_blocks = lhs.type.is_block() and rhs.type.is_block()
        if are_blocks and lhs.type.shape == rhs.type.shape:
            return lhs, rhs
        return broadcast(lhs, rhs)

    semantic.broadcast_impl_value = broadcasted


def _look_types_up_once() -> None:
    """Keep NumPy's type of each of Triton's: the interpreter builds a table of all of them to look one up."""
    from triton.runtime import interpreter

    look_up = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def looked_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    vars(interpreter)["_get_np_dtype"] = looked_up
