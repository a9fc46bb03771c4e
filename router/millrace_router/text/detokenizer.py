"""Token ids to text, token by token; only complete characters are returned."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from millrace_router.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_NUM_CONTEXT_TOKENS = 5
_MAX_WITHHELD_TOKENS = 4
"""A character has at most four bytes, so four tokens that do not complete one are not a character."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class _Steps(Protocol):
    def step(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """The growing text of one generation, as the continuation of its prompt.

    The first word keeps its leading space. Invalid bytes become U+FFFD as soon as they are certain to be invalid.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._steps: _Steps = (
            _BytesSteps(tokenizer)
            if tokenizer.has_token_bytes
            else _WindowSteps(tokenizer, prompt_ids)
        )
        self._texts: list[str] = []

    def step(self, token_id: int) -> str:
        """Return the text that this token adds; "" while a character is incomplete."""
        if self._tokenizer.is_special(token_id):
            pending = self._steps.flush()
            self._texts.append(pending)
            return pending + self._steps.step(token_id)
        text = self._steps.step(token_id)
        self._texts.append(text)
        return text

    def flush(self) -> str:
        """Return the withheld text after the last token; an incomplete character becomes U+FFFD."""
        text = self._steps.flush()
        self._texts.append(text)
        return text

    def final_text(self) -> str:
        """Return the whole text without special tokens; ends the generation."""
        self.flush()
        return "".join(self._texts)


class _BytesSteps:
    """For tokens that stand for whole bytes: concatenate and decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = _Utf8Decoder(errors="replace")
        self._unfinished = False

    def step(self, token_id: int) -> str:
        if not self._unfinished:
            text = self._tokenizer.whole_text(token_id)
            if text is not None:
                return text
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._unfinished = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        self._unfinished = False
        return self._utf8.decode(b"", final=True)


class _WindowSteps:
    """For any decoder: compare the text of a few tokens with and without the new one (TGI's method, bounded)."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-_NUM_CONTEXT_TOKENS:])
        self._num_read = len(self._window)
        self._num_chars = len(self._decode())

    def step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode()
        if not text.endswith(_REPLACEMENT):
            return self._emit(text)
        whole = text[self._num_chars : -1]
        if whole and not whole.endswith(_REPLACEMENT):
            # The token completes one character and begins another.
            return self._emit(text, num_unfinished=1)
        num_withheld = len(self._window) - self._num_read
        return "" if num_withheld < _MAX_WITHHELD_TOKENS else self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode())

    def _emit(self, text: str, *, num_unfinished: int = 0) -> str:
        added = text[self._num_chars : len(text) - num_unfinished]
        if not added:
            # A token without text, such as an id outside the vocabulary, is dropped from the context.
            del self._window[self._num_read :]
            return ""
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        self._num_chars = len(self._decode()) - num_unfinished
        return added

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
