"""The errors of a fetch, as they cross to the router.

FetchError
├── NotFound       no such adapter, or no right to know that it exists
├── Forbidden      the token lacks access
├── Invalid        the files cannot be used
├── TooLarge       more bytes than allowed
└── Unavailable    the hub or the disk failed, and may work later
"""

from __future__ import annotations

from typing import ClassVar

JsonValue = str | int | float | None


class FetchError(Exception):
    """A fetch failed; `answer` is what the router gets."""

    kind: ClassVar[str]

    def answer(self) -> dict[str, JsonValue]:
        return {"error": self.kind, "reason": str(self)}


class NotFound(FetchError):
    """There is no such adapter, or the client has no right to know that it exists."""

    kind = "not_found"


class Forbidden(FetchError):
    """The token lacks access."""

    kind = "forbidden"


class Invalid(FetchError):
    """The files cannot be used; the message names the field or the tensor."""

    kind = "invalid"


class TooLarge(FetchError):
    """The files have more bytes than allowed."""

    kind = "too_large"

    def __init__(self, num_bytes: int, limit: int) -> None:
        super().__init__(f"{num_bytes} bytes, and at most {limit} are allowed")
        self.num_bytes = num_bytes
        self.limit = limit

    def answer(self) -> dict[str, JsonValue]:
        return super().answer() | {"num_bytes": self.num_bytes, "limit": self.limit}


class Unavailable(FetchError):
    """The hub or the disk failed, and may work later."""

    kind = "unavailable"

    def __init__(self, reason: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds

    def answer(self) -> dict[str, JsonValue]:
        return super().answer() | {"retry_after_seconds": self.retry_after_seconds}
