"""The name of one answer's stream, and what follows from it: ids, times and seeds that would differ from run to run.

The same request with the same name has the same answer, byte for byte, on this server or on another one that serves
the same model. Nothing else in an answer is drawn at random.
"""

from __future__ import annotations

import re
import secrets
import string
import time
from hashlib import blake2b
from typing import Self

from millrace_router.errors import ValidationError

STREAM_HEADER = "x-millrace-stream"
FORM = re.compile(r"[0-9]{10}-[0-9a-f]{32}")
_ALPHABET = string.ascii_letters + string.digits
_NUM_KEY_BYTES = 32


def new_stream() -> str:
    """Return a new name of a stream: the Unix time in seconds, and 128 random bits."""
    return f"{int(time.time()):010d}-{secrets.token_hex(16)}"


class Names:
    """Derives ids and seeds from a stream's name and its caller: another caller gets others under the same name."""

    def __init__(self, stream: str, key: bytes, *, part: str = "") -> None:
        """`key` has 32 bytes; `part` is what the names are of, if not of the whole answer."""
        self.stream = stream
        self.key = key
        self.ended_at: int | None = None
        """When the answer ended, in Unix seconds; None before."""
        self._part = part

    @classmethod
    def of_caller(cls, stream: str, caller: bytes) -> Self:
        """Return the names of the stream of `caller`, whom at most 64 bytes identify.

        Raises:
            ValidationError: `stream` does not have the form of a name.

        """
        if FORM.fullmatch(stream) is None:
            raise ValidationError(
                f"`{STREAM_HEADER}` must be 10 digits of Unix time, `-` and 32 hex digits in lower case: leave it "
                "out, and the server makes one"
            )
        key = blake2b(stream.encode(), key=caller, digest_size=_NUM_KEY_BYTES).digest()
        return cls(stream, key)

    @classmethod
    def new(cls) -> Self:
        """Return the names of a new stream without a caller."""
        return cls.of_caller(new_stream(), b"")

    def part(self, index: int | str) -> Self:
        """Return the names of a part of the answer; part 0 has the names of the whole."""
        return type(self)(self.stream, self.key, part=f"{self._part}{index}/") if index else self

    @property
    def created(self) -> int:
        """When the stream was named, in Unix seconds."""
        return int(self.stream.partition("-")[0])

    def end(self) -> int:
        """Return when the answer ended, in Unix seconds: now, the first time."""
        if self.ended_at is None:
            self.ended_at = int(time.time())
        return self.ended_at

    def digits(self, kind: str, num_bytes: int, number: int = 0) -> str:
        """Return `2 * num_bytes` hex digits, up to 128, which are distinct for each `kind` and `number`."""
        return self._bytes(kind, num_bytes, number).hex()

    def call_id(self, number: int) -> str:
        """Return the id of a tool call in OpenAI's form."""
        return f"call_{self.digits('call', 12, number)}"

    def short_call_id(self, number: int) -> str:
        """Return nine letters and digits, the only form that Mistral's templates accept."""
        drawn = int.from_bytes(self._bytes("short call", 16, number))
        return "".join(
            _ALPHABET[drawn // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(9)
        )

    def seed(self) -> int:
        """Return the 64-bit seed of a request whose client has left it open."""
        return int.from_bytes(self._bytes("seed", 8, 0))

    def _bytes(self, kind: str, count: int, number: int) -> bytes:
        what = f"{self._part}{kind}/{number}".encode()
        return blake2b(what, key=self.key, digest_size=count).digest()
