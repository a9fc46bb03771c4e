"""Separates calls from text in a stream: one state machine for all formats, which differ in the text around a call.

It decides character by character, so the result does not depend on how the stream is cut. It holds text back that may
begin a call: blanks, the beginning of a marker, and a call until its name is known and its arguments begin.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from millrace_router.tool_calls.parsing.call_reader import CallReader
from millrace_router.tool_calls.parsing.cursor import STRAY
from millrace_router.tool_calls.parsing.json_mender import behind_blanks
from millrace_router.tool_calls.parsing.syntax import Syntax, any_of, earliest, num_begun
from millrace_router.tool_calls.tool import AnswerParser, CallDelta, Parsed

_CALL_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_BLANKS = " \t\n\r"
_MAX_BLANKS = 256
"""More blanks in a row count as text, so that the time to hold them back is bounded."""
_STRAY = re.compile(f"(?:[{re.escape(STRAY)}][{_BLANKS}]{{0,32}}){{0,8}}")
_STRAY_IN_LIST = re.compile(f"(?:[{re.escape(STRAY.replace(']', ''))}][{_BLANKS}]{{0,32}}){{0,8}}")
_BETWEEN_CALLS = f"{_BLANKS},;"
_BEHIND_NAME = re.compile(r"(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?[ \t\n\r]*")


class CallParser:
    """Parses one answer; the cuts between pushed pieces make no difference."""

    def __init__(
        self, syntax: Syntax, names: frozenset[str], *, is_single: bool, new_id: Callable[[], str]
    ) -> None:
        """`names` are the names of the tools; with `is_single`, calls after the first are dropped."""
        self._syntax = syntax
        self._names = names
        self._is_single = is_single
        self._new_id = new_id
        self._sought = {*syntax.openers, *syntax.hidden}
        firsts = "".join({marker[0] for marker in self._sought})
        self._begins_marker = re.compile(f"[{re.escape(firsts)}]")
        self._hidden = any_of(syntax.hidden)
        self._rest = ""
        """Undecided text."""
        self._num_searched = 0
        """The length of the part of `_rest` that has no beginning of a call."""
        self._is_last = False
        self._unsaid = ""
        """What was read of the call since its last output."""
        self._before = ""
        """The text before a call that has not started; it becomes text if no call follows."""
        self._in_list = False
        self._reader = CallReader(names)
        self._is_called = False
        """Whether the last output was a call."""
        self._index = -1
        self._is_announced = False
        self._texts: list[str] = []
        self._calls: list[CallDelta] = []
        self._step: Callable[[], bool] = self._at_start if syntax.bare else self._in_text

    def push(self, text: str) -> Parsed:
        """Parse more text; text that may begin a call is held back."""
        if not self._rest and self._is_plain(text):
            self._is_called = False
            return Parsed(text)
        self._rest += text
        return self._parsed()

    def _is_plain(self, text: str) -> bool:
        """Return whether text can be output at once, if none is held."""
        if self._step != self._in_text or text[-1:] in _BLANKS:
            return False
        return self._begins_marker.search(text) is None

    def finish(self) -> Parsed:
        """Parse the held text as the end of the answer."""
        self._is_last = True
        return self._parsed()

    def _parsed(self) -> Parsed:
        while self._step():
            pass
        parsed = Parsed("".join(self._texts), tuple(self._calls))
        self._texts.clear()
        self._calls.clear()
        return parsed

    # Each step removes decided text from `_rest`, and returns whether another step can go on.

    def _at_start(self) -> bool:
        begin = behind_blanks(self._rest, 0)
        if begin == len(self._rest) <= _MAX_BLANKS and not self._is_last:
            return False
        self._step = self._in_text
        if begin <= _MAX_BLANKS and self._opens_call(begin):
            self._begin_call(begin)
        return True

    def _in_text(self) -> bool:
        num_safe, marker = len(self._rest), ""
        if self._begins_marker.search(self._rest, self._num_searched):
            match = earliest(self._rest, self._sought, self._num_searched)
            num_safe, marker = match or (num_safe - num_begun(self._rest, self._sought), "")
        num_released = self._num_released(num_safe)
        self._give_text(self._rest[:num_released])
        if marker in self._syntax.openers:
            self._before = self._rest[num_released : num_safe + len(marker)]
            self._step = self._behind_opener
        elif marker:
            self._give_text(self._rest[num_released:num_safe])
        elif self._is_last:
            left = self._rest[num_released:]
            self._give_text("" if self._is_called and not left.strip(_BLANKS) else left)
            num_safe = len(self._rest)
        else:
            num_safe = num_released
        num_done = num_safe + len(marker)
        self._rest = self._rest[num_done:]
        self._num_searched = max(0, self._num_searched - num_done)
        return bool(marker)

    def _num_released(self, num_safe: int) -> int:
        """The length of text before markers that becomes output; blanks at its end may precede a call, and are held."""
        text = self._rest[max(0, num_safe - _MAX_BLANKS) : num_safe]
        return num_safe - len(text) + len(text.rstrip(_BLANKS))

    def _behind_opener(self) -> bool:
        self._move(behind_blanks(self._rest, 0))
        if not self._rest:
            return self._give_back_at_end()
        if self._opens_call(0):
            self._begin_call(0)
        elif not self._before.strip(_BLANKS):
            self._rest, self._before = self._before + self._rest, ""
            self._num_searched = len(self._rest) - len(self._rest.lstrip(_BLANKS))
            self._step = self._in_text
        elif self._syntax.names:
            self._step = self._in_name
        else:
            self._give_back()
        return True

    def _opens_call(self, start: int) -> bool:
        char = self._rest[start : start + 1]
        return char == "{" or (char == "[" and self._syntax.lists)

    def _begin_call(self, start: int) -> None:
        self._move(start)
        if self._rest[0] == "[":
            self._step = self._in_bracket
        else:
            self._read(CallReader(self._names))

    def _in_bracket(self) -> bool:
        """At a bracket, which begins a list if a call follows; else it is text, and may begin a marker."""
        begin = behind_blanks(self._rest, 1)
        if begin == len(self._rest) <= _MAX_BLANKS and not self._is_last:
            return False
        if begin > _MAX_BLANKS or self._rest[begin : begin + 1] != "{":
            self._give_back()
            return True
        self._move(begin)
        self._in_list = True
        self._read(CallReader(self._names))
        return True

    def _behind_comma(self) -> bool:
        """In a list, or after a separator, where another call must follow."""
        self._move(behind_blanks(self._rest, 0))
        if not self._rest:
            return self._give_back_at_end()
        if self._rest[0] == "{":
            self._read(CallReader(self._names))
        else:
            self._give_back()
        return True

    def _in_name(self) -> bool:
        if not self._is_last and any(name.startswith(self._rest) for name in self._names):
            return False
        name = max((n for n in self._names if self._rest.startswith(n)), key=len, default=None)
        if name is None:
            self._give_back()
            return True
        behind = _BEHIND_NAME.match(self._rest, len(name))
        assert behind is not None
        tail = self._rest[behind.end() :]
        if tail[:1] == "{":
            self._move(behind.end())
            self._read(CallReader.of_arguments(name))
        elif self._is_last or not (_CALL_ID.startswith(tail) or _ARGUMENTS.startswith(tail)):
            self._give_back()
        else:
            return False
        return True

    def _read(self, reader: CallReader) -> None:
        self._reader = reader
        self._is_announced = False
        self._unsaid = ""
        self._step = self._in_call

    def _in_call(self) -> bool:
        reader = self._reader
        if not self._rest:
            return self._is_last and self._give_back_cut_call()
        stop, arguments = reader.push(self._rest)
        self._unsaid += self._rest[:stop]
        self._rest = self._rest[stop:]
        if reader.is_started:
            self._give_arguments(arguments)
        if reader.ended or (reader.failed and reader.is_started and reader.is_complete):
            self._step = self._behind_call
        elif reader.failed and reader.is_started:
            self._before = self._unsaid
            self._give_back()
        elif reader.failed:
            self._give_back_call()
        return True

    def _behind_call(self) -> bool:
        begin = behind_blanks(self._rest, 0)
        if begin > _MAX_BLANKS:
            self._in_list = False
            self._step = self._in_text
            return True
        begin = self._behind_stray(begin)
        rest = self._rest[begin:]
        may_close = not self._in_list and any(c.startswith(rest) for c in self._syntax.closers)
        if not rest or (may_close and rest not in self._syntax.closers):
            # At the end of the answer, an incomplete closer is dropped.
            self._rest = "" if self._is_last else self._rest
            return False
        self._step = self._in_text
        if self._in_list:
            self._go_on_in_list(begin)
        elif closer := next((c for c in self._syntax.closers if rest.startswith(c)), None):
            self._rest = rest[len(closer) :]
        elif rest and rest[0] in self._syntax.separators:
            self._move(begin + 1)
            self._step = self._behind_comma
        elif rest and rest[0] == "{":
            self._begin_call(begin)
        return True

    def _behind_stray(self, begin: int) -> int:
        """Return the position behind stray signs, if what ends the call or the text follows them."""
        pattern, ends = _STRAY, self._syntax.closers
        if self._in_list:
            pattern, ends = _STRAY_IN_LIST, (",", "]")
        end = pattern.match(self._rest, begin).end()  # type: ignore[union-attr]  # the empty text matches too
        rest = self._rest[end:]
        is_ended = any(one.startswith(rest) or rest.startswith(one) for one in ends)
        return end if is_ended or not rest else begin

    def _go_on_in_list(self, begin: int) -> None:
        char = self._rest[begin : begin + 1]
        self._in_list = char == ","
        if char == ",":
            self._move(begin + 1)
            self._step = self._behind_comma
        elif char == "]":
            self._rest = self._rest[begin + 1 :]
            self._step = self._behind_call

    def _move(self, num_chars: int) -> None:
        """Move text that belongs to a call, if one follows, from `_rest` to `_before`."""
        self._before += self._rest[:num_chars]
        self._rest = self._rest[num_chars:]

    def _give_back(self) -> None:
        """Output the text before a call that did not follow."""
        self._give_text(self._hidden.sub("", self._before))
        self._before = ""
        self._in_list = False
        self._step = self._in_text

    def _give_back_at_end(self) -> bool:
        if self._is_last:
            if self._is_called and not self._before.strip(_BETWEEN_CALLS):
                self._before = ""
            self._give_back()
        return self._is_last

    def _give_back_call(self) -> bool:
        self._before += self._reader.held
        self._give_back()
        return True

    def _give_back_cut_call(self) -> bool:
        """Output a call that the end of the answer cuts: as text, or with what is left of it."""
        if not self._reader.is_started:
            return self._give_back_call()
        is_dropped = self._is_single and self._index
        if self._unsaid and not (self._reader.is_complete or is_dropped):
            source = self._hidden.sub("", self._unsaid)
            self._calls.append(CallDelta(self._index, None, None, "", source))
        self._unsaid = ""
        return False

    def _give_text(self, text: str) -> None:
        if text:
            self._is_called = False
            self._texts.append(text)

    def _give_arguments(self, arguments: str) -> None:
        self._is_called = True
        is_first, self._is_announced = not self._is_announced, True
        self._index += is_first
        if not (arguments or is_first):
            return
        reader = self._reader
        source = self._hidden.sub("", self._before + self._unsaid.removesuffix(reader.undecided))
        self._before, self._unsaid = "", reader.undecided
        if self._is_single and self._index:
            return
        id_, name = (self._new_id(), reader.name) if is_first else (None, None)
        self._calls.append(
            CallDelta(
                self._index, id_, name, arguments, source, bool(arguments) and reader.is_complete
            )
        )


class UntaggedParser:
    """Takes an answer that is one call or one list of calls without the right tags; another is as `tagged` has it.

    Such calls come whole at their end, because text behind them makes them text.
    """

    def __init__(self, tagged: AnswerParser, untagged: AnswerParser) -> None:
        self._tagged = tagged
        self._untagged: AnswerParser | None = untagged
        """None once the answer is something else."""
        self._held = ""
        self._calls: list[CallDelta] = []

    def push(self, text: str) -> Parsed:
        if self._untagged is None:
            return self._tagged.push(text)
        self._held += text
        if self._may_be_calls(self._untagged.push(text)):
            return Parsed()
        self._untagged = None
        return self._tagged.push(self._held)

    def finish(self) -> Parsed:
        if self._untagged is None:
            return self._tagged.finish()
        may_be_calls = self._may_be_calls(self._untagged.finish())
        self._untagged = None
        num_whole = sum(call.is_last for call in self._calls)
        num_begun = sum(call.id is not None for call in self._calls)
        if may_be_calls and num_whole == num_begun > 0:
            return Parsed("", tuple(self._calls))
        parsed, rest = self._tagged.push(self._held), self._tagged.finish()
        return Parsed(parsed.text + rest.text, parsed.calls + rest.calls)

    def _may_be_calls(self, parsed: Parsed) -> bool:
        self._calls += parsed.calls
        others = (call for call in parsed.calls if call.index and call.id is not None)
        return not parsed.text.strip() and all(call.source.startswith(",") for call in others)
