"""Access to repositories: the hub's answers, each kept for a minute. Tokens are kept as hashes alone."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from hashlib import blake2b

from millrace_router.adapters.names.recent import Recent

ACCESS_SECONDS = 60.0
"""A revoked token is refused after this time at the latest."""
MAX_GRANTS = 16_384
_SALT = secrets.token_bytes(16)

Holder = bytes
"""Hash of a token; that of no token is empty."""


def holder_of(token: str | None) -> Holder:
    """Hash a token with a salt of this process."""
    if token is None:
        return b""
    return blake2b(token.encode(errors="surrogatepass"), key=_SALT, digest_size=16).digest()


class Access:
    """Remembers which holders of tokens the hub let read which repositories."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._grants: Recent[tuple[Holder, str, str | None], str] = Recent(
            MAX_GRANTS, seconds=ACCESS_SECONDS, clock=clock
        )

    def allow(self, holder: Holder, repository: str, revision: str | None, commit: str) -> None:
        """Let `holder` use a revision of a repository, which is at `commit` now, for a minute."""
        self._grants.put((holder, repository, revision), commit)

    def forbid(self, holder: Holder, repository: str, revision: str | None) -> None:
        """Forget that `holder` was allowed."""
        self._grants.drop((holder, repository, revision))

    def commit(self, holder: Holder, repository: str, revision: str | None) -> str | None:
        """Return the commit that `holder` was allowed to use within the last minute; None: ask the hub."""
        return self._grants.get((holder, repository, revision))

    def allowed(self, holder: Holder) -> list[tuple[str, str | None]]:
        """Return the (repository, revision) that `holder` may use now."""
        return [(name, revision) for who, name, revision in self._grants.kept() if who == holder]
