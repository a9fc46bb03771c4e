"""Tools whose input is a text that may have to match a grammar: their function, their calls.

Entry points: `text_tool.text_tool`, `text_reader.TextReader`.
May import: tool_calls.tool, request, errors.
"""
