"""The standard streams of a program whose locale knows only ASCII."""

from __future__ import annotations

import codecs
import io
import sys


def take_any_text() -> None:
    """Let stdin and stdout have any character: in UTF-8 where the locale is ASCII, which only means that none is set.

    A character that another encoding lacks becomes a question mark, and bytes that are no text U+FFFD. It must be
    called before the first byte is read.
    """
    for stream in (sys.stdin, sys.stdout):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        is_ascii = codecs.lookup(stream.encoding).name == "ascii"
        stream.reconfigure(encoding="utf-8" if is_ascii else stream.encoding, errors="replace")
