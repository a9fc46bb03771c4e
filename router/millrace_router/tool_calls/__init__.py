"""Tool calling: prompts, grammars and parsers of each call format.

Entry points: `formats.format_of`, `parser.AnswerParser`. Calls that are JSON objects are read here, others in `blocks`,
`parameters`, `xml` and `expressions`; `free_text` has tools whose input is a text.
May import: request, text, errors.
"""
