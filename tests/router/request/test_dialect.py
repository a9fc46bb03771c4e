"""The two dialects, and the flag that selects one."""

from __future__ import annotations

from dataclasses import astuple

from millrace_router.request.dialect import MILLRACE, TGI, dialect_of


def test_every_switch_is_off_in_one_dialect_and_on_in_the_other() -> None:
    assert set(astuple(MILLRACE)) == {False}
    assert set(astuple(TGI)) == {True}


def test_the_flag_selects_a_dialect() -> None:
    assert dialect_of(strict_tgi=False) is MILLRACE
    assert dialect_of(strict_tgi=True) is TGI
