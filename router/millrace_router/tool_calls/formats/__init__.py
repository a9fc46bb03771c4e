"""The call formats: a page for each family of models, and the registry, which chooses one.

Entry points: `registry.format_of`.
May import: tool_calls.parsing, tool_calls' own modules and what these import.
"""
