"""Flags from the fields of a configuration: one declaration, one parser, one way back to text.

Router and shard read their command line here, and the launcher reads its own and theirs. A field is declared with
pydantic, which checks values, ranges and the environment afterwards; this module needs only the standard library.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, Protocol, Union, get_args, get_origin

LONGEST_ARGUMENT = 100_000
"""Bytes; Linux allows 131 072 in one argument."""


class Declaration(Protocol):
    """A field of a configuration, as pydantic's FieldInfo has it."""

    annotation: Any
    description: str | None
    default: Any

    def is_required(self) -> bool:
        """Whether the field lacks a default."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as its owner declares it."""

    owner: str
    """The process that uses it: launcher, router or shard."""
    name: str
    """The name of the field."""
    field: Declaration

    @property
    def option(self) -> str:
        """The flag's name on the command line, such as `--max-input-tokens`."""
        return option_name(self.name)

    @property
    def help(self) -> str:
        """The text for --help."""
        return self.field.description or ""

    @property
    def variable(self) -> str:
        """The environment variable."""
        return self.name.upper()

    @property
    def is_switch(self) -> bool:
        """Whether it has no value on the command line."""
        return self.field.annotation is bool

    @property
    def is_repeatable(self) -> bool:
        """Whether it may occur several times."""
        return get_origin(self.field.annotation) is tuple

    @property
    def has_several_values(self) -> bool:
        """Whether a value is a list separated by commas."""
        return any(get_origin(kind) is tuple for kind in self._kinds)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, or empty if any value is allowed."""
        for kind in self._kinds:
            if get_origin(kind) is Literal:
                return tuple(map(str, get_args(kind)))
        return ()

    @property
    def type_word(self) -> str:
        """The type for the launcher's --help: INT, STR, …"""
        kind = self._kinds[0]
        kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
        if get_origin(kind) is Literal:
            return self.name.upper().rpartition("_")[2].removesuffix("S")
        words = {"ByteSize": "BYTES", "bool": "true|false"}
        name = str(kind.__name__)
        return words.get(name, name.upper())

    @property
    def type_text(self) -> str:
        """The type for --help of the planes, such as `str,...`."""
        return _type_text(self.field.annotation)

    @property
    def default_text(self) -> str | None:
        """The default as it is written on the command line, or None."""
        return None if self.field.is_required() else as_text(self.field.default)

    @property
    def _kinds(self) -> tuple[Any, ...]:
        """The types of its values, without None."""
        return tuple(
            kind for kind in _alternatives(self.field.annotation) if kind is not type(None)
        )


def flags_in(owner: str, fields: Mapping[str, Declaration]) -> Iterator[Flag]:
    """The flags of one configuration, in the order of declaration."""
    return (Flag(owner, name, field) for name, field in fields.items())


def option_name(name: str) -> str:
    """The flag's name on the command line."""
    return "--" + name.replace("_", "-")


def as_text(value: object) -> str | None:
    """A field's value in the form of command line and environment; None for none."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def as_options(fields: Mapping[str, Declaration], values: Mapping[str, object]) -> Iterator[str]:
    """Arguments for all of `values` that differ from the defaults of their fields."""
    for name, value in values.items():
        field = fields[name]
        if value == field.default:
            continue
        if field.annotation is bool:
            yield option_name(name)
        elif isinstance(value, tuple):
            for part in _parts(value):
                yield f"{option_name(name)}={as_text(part)}"
        elif (text := as_text(value)) is not None:
            yield f"{option_name(name)}={text}"


def _parts(values: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    """All of `values` in a row, if they fit in one argument; the system limits its length. For none, a 0."""
    part: list[object] = []
    length = 0
    for value in values:
        size = len(str(value).encode()) + 1
        if part and length + size > LONGEST_ARGUMENT:
            yield tuple(part)
            part, length = [], 0
        part.append(value)
        length += size
    yield tuple(part or [0])


def read_arguments(
    fields: Mapping[str, Declaration],
    argv: Sequence[str],
    *,
    program: str,
    description: str | None,
    epilog: str | None = None,
    positional: str | None = None,
    shorts: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the unchecked values on a plane's command line by field; SystemExit 2 where a flag is unknown.

    Args:
        fields: the plane's fields, which are its flags.
        argv: the arguments without the program.
        program: its name in messages and help.
        description: what --help begins with.
        epilog: what --help ends with.
        positional: the field that is given without its name.
        shorts: further names of flags, such as `-p`, by field.

    Values of a repeated flag are joined by commas; other empty values are as given, for the caller to judge.

    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for flag in flags_in(program, fields):
        if flag.name == positional:
            metavar = flag.option.removeprefix("--").upper()
            parser.add_argument(flag.name, metavar=metavar, help=_plane_help(flag, is_named=False))
        else:
            short = (shorts or {}).get(flag.name)
            _add_flag(parser, flag, [flag.option, *([short] if short else [])])
    values = vars(parser.parse_args(argv))
    return {
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in values.items()
    }


def _add_flag(parser: argparse.ArgumentParser, flag: Flag, names: Sequence[str]) -> None:
    settings: dict[str, Any] = {"dest": flag.name, "help": _plane_help(flag)}
    if flag.is_switch:
        settings["action"] = "store_true"
    else:
        settings["metavar"] = flag.type_text
        if flag.has_several_values:
            settings["action"] = "append"
    parser.add_argument(*names, **settings)


def refuse(problems: Iterable[Mapping[str, Any]]) -> NoReturn:
    """Name each of pydantic's `problems` by its flag on stderr, and end with exit code 2."""
    for problem in problems:
        flag = option_name("-".join(map(str, problem["loc"])))
        sys.stderr.write(f"error: {flag}: {problem['msg']}\n")
    raise SystemExit(2)


def _plane_help(flag: Flag, *, is_named: bool = True) -> str:
    words = [flag.help]
    if flag.field.is_required():
        words += ["(required)"] if is_named else []
    elif (default := flag.field.default) not in (None, ()):
        words.append(f"(default: {as_text(default) if isinstance(default, tuple) else default})")
    return " ".join(words).replace("%", "%%")


def _type_text(type_: Any) -> str:  # noqa: ANN401
    """A type, without None, as it is written in annotations; choices in braces."""
    origin = get_origin(type_)
    if origin is Annotated:
        return _type_text(get_args(type_)[0])
    if origin is Literal:
        return _one_of([str(word) for word in get_args(type_)])
    if origin in (Union, types.UnionType):
        return _one_of([_type_text(each) for each in get_args(type_) if each is not type(None)])
    if origin is tuple:
        return f"{_type_text(get_args(type_)[0])},..."
    return "bytes" if type_.__qualname__ == "ByteSize" else str(type_.__qualname__)


def _one_of(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{{{','.join(words)}}}"


def _alternatives(annotation: Any) -> tuple[Any, ...]:  # noqa: ANN401
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def log_level(value: object) -> object:
    """Map TGI's names of levels, and filter directives that name no level, to ours."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    word = {"warn": "warning", "critical": "error"}.get(word, word)
    return word if word in ("trace", "debug", "info", "warning", "error") else "info"
