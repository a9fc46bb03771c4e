"""Tool calling: prompts, grammars and parsers of each call format.

Entry points: `formats.format_of`, `parser.AnswerParser`. Calls that are JSON objects are read here, others in `blocks`,
`parameters`, `xml` and `expressions`.
May import: request, text, errors.
"""
