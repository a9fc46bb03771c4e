"""Positions of tokens in the text of a completion."""

from __future__ import annotations

import codecs

from millrace_router.request.events import Token
from millrace_router.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class CompletionOffsets:
    """Follows the text of one choice.

    All tokens of one character have its position. A character that stays unfinished appears with the next token,
    whose own text begins one position later.
    """

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        self._tokenizer = tokenizer
        self._end = start
        self._utf8 = _Utf8Decoder(errors="replace")

    def push(self, token: Token, text: str) -> int:
        """Take the next token and the text sent with it; return the position of the token's own text."""
        start = self._end
        self._end += len(text)
        if not self._tokenizer.has_token_bytes:
            return start
        unfinished = self._utf8.getstate()[0]
        if token.special:
            self._utf8.reset()
            is_continued = not unfinished
        else:
            added = self._tokenizer.token_bytes(token.id)
            self._utf8.decode(added)
            is_continued = _is_continued(unfinished, added[:1])
        is_after = text.startswith(_REPLACEMENT) and not is_continued
        return start + is_after


def _is_continued(unfinished: bytes, byte: bytes) -> bool:
    """Whether `byte` continues the unfinished character, if there is one."""
    if not unfinished:
        return True
    try:
        _Utf8Decoder().decode(unfinished + byte)
    except UnicodeDecodeError:
        return False
    return True
