"""Tool calling: prompts, grammars and parsers of each call format.

Entry points: `formats.format_of`, `call_parser.CallParser`.
May import: request, text, errors.
"""
