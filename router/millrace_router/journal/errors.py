"""What can be wrong with a journal."""

from __future__ import annotations


class JournalError(Exception):
    """A journal cannot be written where it should be, or not be read."""


class JournalUnusable(JournalError):  # noqa: N818
    """It is not there, is no journal, or one of another version or another model."""


class JournalDamaged(JournalError):  # noqa: N818
    """Something within it is not as it was written; a torn end is no damage."""
