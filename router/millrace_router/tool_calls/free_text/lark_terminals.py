"""Lark's own terminals, which a grammar imports from `common`, as expressions."""

from __future__ import annotations

from collections.abc import Mapping

_FRACTION = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = rf"(?:[0-9]+[eE][+\-]?[0-9]+|{_FRACTION}(?:[eE][+\-]?[0-9]+)?)"
COMMON: Mapping[str, str] = {
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": _FRACTION,
    "FLOAT": _FLOAT,
    "NUMBER": f"(?:{_FLOAT}|[0-9]+)",
    "SIGNED_NUMBER": rf"[+\-]?(?:{_FLOAT}|[0-9]+)",
    "SIGNED_FLOAT": rf"[+\-]?{_FLOAT}",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[a-zA-Z]",
    "WORD": r"[a-zA-Z]+",
    "CNAME": r"[a-zA-Z_][a-zA-Z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
}
