"""Formats in which a call is an expression, `name(key=value)`: Python's for Llama 4, OLMo 3 and LFM2, and Gemma's own.

Entry points: `formats`' classes.
May import: tool_calls.blocks, tool_calls.parameters and below.
"""
