"""Errors of journals."""

from __future__ import annotations


class JournalError(Exception):
    """A journal cannot be written or read."""


class JournalUnusable(JournalError):  # noqa: N818
    """The file is missing, is not a journal, or belongs to another version or model."""


class JournalDamaged(JournalError):  # noqa: N818
    """The content of a journal is damaged; an incomplete end does not count as damage."""
