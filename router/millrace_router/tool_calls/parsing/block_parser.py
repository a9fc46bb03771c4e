"""Separates calls in blocks from text in a stream; formats differ in the texts around calls and in a call's reader.

It holds text back that may begin a call: blanks, the beginning of an opener, and a call until its name is known and
its arguments begin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from millrace_router.tool_calls.parsing.cursor import BLANKS, MAX_BLANKS, Cursor, Wait
from millrace_router.tool_calls.parsing.syntax import any_of, marker_pattern
from millrace_router.tool_calls.tool import CallDelta, Parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The texts around calls. Blanks are allowed between any two parts."""

    openers: tuple[str, ...]
    """Texts before a call, anywhere in the answer."""
    kept: tuple[str, ...] = ()
    """Texts that begin a call without an opener; they are part of what the reader reads."""
    bare: str = ""
    """With this text, a block may begin the answer without an opener."""
    closers: tuple[str, ...] = ()
    """Texts that may follow a call and end the block."""
    several: bool = False
    """Whether calls may follow each other in one block."""
    separators: str = ""
    """Characters of which one may be between two calls in a block."""


class CallSink(Protocol):
    """Takes a call while it is read."""

    def start(self, name: str) -> None:
        """Announce a call of a tool; from now on it cannot become text."""

    def give(self, arguments: str) -> None:
        """Add to the JSON text of the arguments, which stand for all text before the position of the cursor."""

    def end(self) -> None:
        """Announce that the arguments are whole."""


class CallReader(Protocol):
    """Reads one call."""

    def read(self, cursor: Cursor, sink: CallSink) -> Wait[bool]:
        """Read from the position of `cursor` on; False if the text is not a call, or is cut off within it.

        What was read before `sink.start` may be read again, so it has to be bounded.
        """


class BlockParser:
    """Parses one answer; the cuts between pushed pieces make no difference."""

    def __init__(
        self,
        block: Block,
        reader: CallReader,
        *,
        hidden: Collection[str],
        is_single: bool,
        new_id: Callable[[], str],
    ) -> None:
        """`hidden` are special tokens that clients never get; with `is_single`, calls after the first are dropped."""
        self._block = block
        self._reader = reader
        self._hidden = frozenset(hidden)
        self._hidden_pattern = any_of(self._hidden)
        self._begins = {*block.openers, *block.kept}
        self._sought = self._begins | self._hidden
        self._pattern = marker_pattern(tuple(sorted(self._sought)))
        self._is_in_text = False
        """Whether the last text was outside of calls, and all of it but `_cursor.text` was output."""
        self._is_single = is_single
        self._new_id = new_id
        self._cursor = Cursor()
        self._is_called = False
        """Whether the last output was a call."""
        self._num_started = 0
        self._texts: list[str] = []
        self._calls: list[CallDelta] = []
        self._pending: tuple[int, str | None, str | None] | None = None
        """Index, id and name of the last call; id and name only until they are output."""
        self._arguments: list[str] = []
        self._sources: list[str] = []
        """Text of the call that is being read, which was not output."""
        self._begin = 0
        """Position of the text that belongs to the next call."""
        self._is_whole = False
        self._steps: Wait[None] | None = self._answer()

    def push(self, text: str) -> Parsed:
        """Parse more text; text that may begin a call is held back."""
        if self._is_in_text and not self._cursor.text and self._is_plain(text):
            self._is_called = False
            return Parsed(text)
        self._cursor.text += text
        return self._parsed()

    def _is_plain(self, text: str) -> bool:
        """Return whether text can be output at once."""
        return text[-1:] not in BLANKS and self._pattern.search(text) is None

    def finish(self) -> Parsed:
        """Parse the held text as the end of the answer."""
        self._cursor.is_last = True
        return self._parsed()

    def start(self, name: str) -> None:
        cursor = self._cursor
        self._take()
        self._pending = self._num_started, self._new_id(), name
        self._num_started += 1
        self._is_called = True
        self._is_whole = False
        self._sources.append(cursor.text[self._begin : cursor.position])
        cursor.drop()
        cursor.holds, cursor.records = False, True

    def give(self, arguments: str) -> None:
        if arguments:
            self._arguments.append(arguments)
            self._sources.append(self._cursor.taken())

    def end(self) -> None:
        self._is_whole = True
        self._cursor.taken()
        self._cursor.records = False

    def _take(self) -> None:
        """Add the call that is being read to the output, with the text of its arguments so far."""
        if self._pending is None:
            return
        index, id_, name = self._pending
        arguments, source = "".join(self._arguments), "".join(self._sources)
        self._arguments.clear()
        self._sources.clear()
        self._pending = index, None, None
        if not (self._is_single and index) and (id_ is not None or arguments or source):
            source = self._hidden_pattern.sub("", source)
            is_last = self._is_whole and bool(arguments)
            self._calls.append(CallDelta(index, id_, name, arguments, source, is_last))

    def _give_up(self) -> None:
        """Output what was read of a call that is broken; of one that is cut, it belongs to the call."""
        cursor = self._cursor
        left = cursor.taken()
        cursor.records = False
        if cursor.is_last and not cursor.text:
            self._sources.append(left)
            return
        left = self._hidden_pattern.sub("", left)
        if left:
            self._is_called = False
            self._texts.append(left)

    def _parsed(self) -> Parsed:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        self._take()
        parsed = Parsed("".join(self._texts), tuple(self._calls))
        self._texts.clear()
        self._calls.clear()
        return parsed

    def _answer(self) -> Wait[None]:
        if self._block.bare:
            yield from self._at_start()
        while (opener := (yield from self._text())) is not None:
            yield from self._open(opener)

    def _at_start(self) -> Wait[None]:
        cursor = self._cursor
        yield from cursor.skip()
        is_open = bool((yield from cursor.take([self._block.bare])))
        self._begin = 0
        if not (is_open and (yield from self._read_calls())):
            cursor.position = 0

    def _text(self) -> Wait[str | None]:
        """Output text up to an opener, but not the blanks before it; return the opener, None at the end."""
        cursor = self._cursor
        while True:
            match = self._pattern.search(cursor.text, cursor.position)
            marker = match[0] if match and match[0] in self._sought else ""
            end = match.start() if match and (marker or not cursor.is_last) else len(cursor.text)
            self._give_text(self._num_released(end))
            if marker in self._begins:
                return marker
            if marker:
                self._give_text(end)
                cursor.position += len(marker)
            elif cursor.is_last:
                left = cursor.text[cursor.position :]
                if not (self._is_called and not left.strip(BLANKS)):
                    self._give_text(len(cursor.text))
                return None
            else:
                cursor.drop()
                self._is_in_text = True
                yield from cursor.more()
                self._is_in_text = False

    def _num_released(self, end: int) -> int:
        """Return the end of the text before `end` that becomes output; blanks may precede a call, and are held."""
        held = self._cursor.text[max(self._cursor.position, end - MAX_BLANKS) : end]
        return end - len(held) + len(held.rstrip(BLANKS))

    def _give_text(self, end: int) -> None:
        """Output the text up to `end`."""
        text = self._cursor.text[self._cursor.position : end]
        self._cursor.position = end
        if text:
            self._is_called = False
            self._texts.append(text)

    def _open(self, opener: str) -> Wait[None]:
        """Read a block; if no call follows, the opener is text."""
        cursor, mark = self._cursor, self._cursor.position
        begin = cursor.text.index(opener, mark)
        cursor.position = begin if opener in self._block.kept else begin + len(opener)
        self._begin = mark
        if not (yield from self._read_calls()):
            cursor.position = mark
            self._give_text(begin if opener in self._hidden else begin + len(opener))
            cursor.position = begin + len(opener)

    def _read_calls(self) -> Wait[bool]:
        """Read the calls of a block and what ends it; whether there was one."""
        cursor, num_calls, mark = self._cursor, 0, self._cursor.position
        while True:
            yield from cursor.skip()
            num_started = self._num_started
            is_whole = yield from self._reader.read(cursor, self)
            cursor.holds = True
            if self._num_started == num_started:
                cursor.position = mark
                return num_calls > 0
            if not self._is_whole:
                self._give_up()
            num_calls, mark = num_calls + 1, cursor.position
            self._begin = mark
            if not is_whole or not (yield from self._goes_on()):
                return True

    def _goes_on(self) -> Wait[bool]:
        """Step over what ends a block; whether another call may follow in it."""
        cursor, block, mark = self._cursor, self._block, self._cursor.position
        if (yield from cursor.close(block.closers)):
            return False
        rest = cursor.text[cursor.position : cursor.position + MAX_BLANKS]
        if cursor.is_last and any(closer.startswith(rest) for closer in block.closers):
            # At the end of the answer, an incomplete closer is dropped.
            cursor.position = len(cursor.text)
            return False
        if block.several:
            if block.separators:
                yield from cursor.skip(block.separators, 1)
            return True
        cursor.position = mark
        return False
