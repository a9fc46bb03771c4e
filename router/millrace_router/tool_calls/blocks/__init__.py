"""Calls in blocks: the parser and the grammars of all formats in which a call is no JSON object.

Entry points: `block_format.BlockFormat`, `block_parser.BlockParser`.
May import: tool_calls' own modules and what these import.
"""
