"""Flags are read from declared fields, and written as arguments again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from pydantic_settings import NoDecode

from millrace_proto.flags import LONGEST_ARGUMENT, as_options, flags_in, read_arguments, refuse


class Fields(BaseModel):
    folder: Path = Field(description="Where.")
    port: int = Field(default=3000, description="Listens; 5 % of the time.")
    names: Annotated[tuple[str, ...], NoDecode] = Field(default=(), description="Several.")
    sizes: Annotated[tuple[int, ...] | None, NoDecode] = Field(default=None, description="Sizes.")
    mode: Literal["on", "off"] | None = Field(default=None, description="Mode.")
    fast: bool = Field(default=False, description="Faster.")


def read(*argv: str) -> dict[str, object]:
    return read_arguments(
        Fields.model_fields, argv, program="prog", description="About.", shorts={"port": "-p"}
    )


def test_values_come_by_field_unchecked_and_lists_joined() -> None:
    argv = ("--folder=a", "-p", "x", "--names=a", "--names", "b,c", "--sizes=1", "--fast")
    expected = {"folder": "a", "port": "x", "names": "a,b,c", "sizes": "1", "fast": True}
    assert read(*argv) == expected
    assert read() == {}


def test_the_help_has_type_and_default_of_each_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read("--help")
    assert end.value.code == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "--folder Path Where. (required)",
        "--port int, -p int Listens; 5 % of the time. (default: 3000)",
        "--names str,... Several.",
        "--sizes int,... Sizes.",
        "--mode {on,off} Mode.",
        "--fast Faster. (default: False)",
    ):
        assert line in lines


def test_an_unknown_flag_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read("--prot", "1")
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("prog: error: unrecognized arguments: --prot 1\n")


def test_a_problem_names_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        refuse([{"loc": ("max_n",), "msg": "too large"}, {"loc": ("a_b", 0), "msg": "wrong"}])
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: --max-n: too large\nerror: --a-b-0: wrong\n"


def test_a_flag_that_takes_a_list_is_repeatable_only_where_it_cannot_be_absent() -> None:
    flags = {flag.name: flag for flag in flags_in("me", Fields.model_fields)}
    assert [name for name, flag in flags.items() if flag.is_repeatable] == ["names"]
    several = [name for name, flag in flags.items() if flag.has_several_values]
    assert several == ["names", "sizes"]
    assert flags["mode"].choices == ("on", "off")


@given(
    port=st.integers(),
    names=st.lists(st.text("abc={}/", min_size=1), max_size=5),
    mode=st.sampled_from(["on", "off", None]),
    fast=st.booleans(),
)
def test_arguments_read_back_are_the_values(
    port: int, names: list[str], mode: str | None, fast: bool
) -> None:
    values = {"folder": Path("f"), "port": port, "names": tuple(names), "mode": mode, "fast": fast}
    argv = list(as_options(Fields.model_fields, values))
    read_back = read(*argv)
    split = tuple(str(read_back.get("names", "")).split(",")) if names else ()
    result = Fields.model_validate({**read_back, "names": split})
    assert result.model_dump(exclude={"sizes"}) == values


def test_a_long_list_is_several_arguments_and_an_empty_one_is_0() -> None:
    names = tuple(str(number) * 1000 for number in range(250))
    options = list(as_options(Fields.model_fields, {"names": names}))
    assert len(options) > 1
    assert max(map(len, options)) < LONGEST_ARGUMENT + 1100
    assert read(*options)["names"] == ",".join(names)
    assert list(as_options(Fields.model_fields, {"sizes": ()})) == ["--sizes=0"]
