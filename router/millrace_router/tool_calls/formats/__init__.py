"""The call formats: a page for each family of models, and the registry, which chooses one.

Entry points: `registry.format_of`.
Imports: tool_calls, tool_calls.parsing.
"""
