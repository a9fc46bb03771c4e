"""The interface through which requests get their adapters."""

from __future__ import annotations

from typing import Protocol

from millrace_router.request.adapter import AdapterReference, AdapterVersion


class AdapterService(Protocol):
    """Resolves names to versions."""

    async def resolve(self, reference: AdapterReference, caller: str) -> AdapterVersion:
        """Return the version that `caller` gets for `reference`; its canonical file is on disk.

        Raises:
            AdapterNotFound: there is no such adapter for this caller.
            AdapterForbidden: the token has no access to it.
            AdapterInvalid: its files are not valid for the served model.
            AdapterTooLarge: it is larger than the server allows.
            AdapterUnavailable: the hub or the disk failed.

        """
