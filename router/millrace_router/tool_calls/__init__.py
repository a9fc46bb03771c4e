"""Tool calling: prompts, grammars and parsers of each call format.

Entry points: `formats.registry.format_of`, `tool.AnswerParser`. `formats` has a page for each family of models,
`parsing` what they share; `text_tool` is for tools whose input is a text.
Imports: errors, request.
"""
