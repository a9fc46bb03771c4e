"""Keys of KV blocks: each key covers its block's tokens and all tokens before them.

Keys are SHA-256, so that no client can craft a prompt that reads the KV of another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from millrace_router.request.images import ImageSpan

KEY_FORM = 1
"""Changes with what a key is computed from: routers of two versions may use each other's blocks."""


def root_key(adapter: str | None = None, salt: Sequence[str] = ()) -> bytes:
    """Return the parent of a first block; it depends on the adapter's digest, because the KV does, and on the salt."""
    root = sha256(b"root" if adapter is None else b"root " + adapter.encode()).digest()
    for part in salt:
        root = sha256(b"salt" + root + part.encode(errors="surrogatepass")).digest()
    return root


def child_key(parent: bytes, token_ids: Sequence[int], images: bytes = b"") -> bytes:
    """Return the key of the block with these tokens, and `images` among them, after the block with the key `parent`."""
    form = b"images" if images else b"block"
    return sha256(form + parent + array("I", token_ids).tobytes() + images).digest()


def images_within(spans: Sequence[ImageSpan], start: int, end: int) -> bytes:
    """Return what a key covers of the pictures with placeholders in [start, end): which, where, and which rows."""
    return b"".join(
        span.image.digest + array("q", (span.position - start, span.tokens, span.row)).tobytes()
        for span in spans
        if span.position < end and span.end > start
    )


class ContentKey(bytes):
    """A key that knows its block's content, for publishers of what is cached."""

    parent: bytes | None
    """Key of the block before; None for a first block."""
    token_ids: array[int]
    adapter: str | None
    """Name of the LoRA adapter that computes the KV."""


class BlockHashes:
    """The keys of the full blocks of one growing sequence, each computed once."""

    def __init__(
        self,
        block_size: int,
        adapter: str | None = None,
        salt: Sequence[str] = (),
        *,
        keeps_content: bool = False,
        adapter_name: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> None:
        """`adapter` is the digest of the adapter that computes the KV; blocks are shared only with the same `salt`.

        With `keeps_content`, and without a salt and `images`, the keys are `ContentKey`s.
        """
        self._block_size = block_size
        self._last = root_key(adapter, salt)
        self._keys: list[bytes] = []
        self._keeps_content = keeps_content and not salt and not images
        self._images = images
        self._adapter_name = adapter_name

    def first(self, count: int, prompt: Sequence[int], generated: Sequence[int]) -> Sequence[bytes]:
        """Return the keys of the first `count` full blocks of `prompt` + `generated`.

        Raises:
            ValueError: there are fewer full blocks.

        """
        size = self._block_size
        if count * size > len(prompt) + len(generated):
            raise ValueError(f"{count} blocks of {size} are not full")
        for start in range(len(self._keys) * size, count * size, size):
            ids = list(prompt[start : start + size])
            if len(ids) < size:
                first = max(0, start - len(prompt))
                ids += generated[first : first + size - len(ids)]
            images = images_within(self._images, start, start + size) if self._images else b""
            self._last = child_key(self._last, ids, images)
            self._keys.append(self._with_content(ids) if self._keeps_content else self._last)
        return self._keys[:count]

    def _with_content(self, ids: Sequence[int]) -> ContentKey:
        """Return the key of a new last block."""
        key = ContentKey(self._last)
        key.parent = self._keys[-1] if self._keys else None
        key.token_ids = array("I", ids)
        key.adapter = self._adapter_name
        return key
