"""Reasoning: separates a model's thought from its answer, and puts the thought before grammars and budgets.

Entry points: `formats.reasoning_of_model`, `reasoning_format.ReasoningFormat`.
Imports: config, errors, request, text, tool_calls.parsing.
"""
